"""CUDA kernels on a device: under graph capture, on the current stream, without synchronising.

That they equal their definitions is tested in tests/kernels, which takes a GPU if there is one.
"""

from __future__ import annotations

import pytest
import torch

from commhooks.kernels import philox, top_k, use_kernels
from commhooks.kernels.blockwise import payload_bytes, quantize
from commhooks.kernels.runtime import cuda
from tests.kernels.inputs import plain

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(autouse=True)
def kernels_only():
    assert cuda.missing() is None
    with use_kernels("native"):
        yield


def quantized(inputs: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    payload = torch.empty(
        payload_bytes(inputs.numel(), "int4", 256), dtype=torch.uint8, device=inputs.device
    )
    quantize(inputs, payload, "int4", 256, random=philox.RandomBits(1, step))
    return payload


def test_a_captured_graph_draws_new_bits_at_every_replay():
    inputs, step = plain(100_000).cuda(), torch.tensor(0, device="cuda")
    quantized(inputs, step)  # compiled and loaded before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        payload = quantized(inputs, step)
        step += 1
    seen = []
    for replay in range(3):
        graph.replay()
        seen.append(payload.cpu())
        assert torch.equal(seen[-1], quantized(inputs.cpu(), torch.tensor(replay)))
    assert not torch.equal(seen[0], seen[1])


def test_kernels_run_on_the_current_stream():
    inputs, side = torch.zeros(2**24, device="cuda"), torch.cuda.Stream()
    step = torch.tensor(0, device="cuda")  # here: the copy would make the host wait for the stream
    quantized(inputs, step)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        inputs.fill_(1.0)
        payload = quantized(inputs, step)
    side.synchronize()
    assert torch.equal(payload.cpu(), quantized(torch.ones(2**24), torch.tensor(0)))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_synchronises():
    inputs = plain(100_000).cuda()
    indices, values = torch.empty(100, dtype=torch.int32).cuda(), torch.empty(100).cuda()
    step = torch.tensor(0, device="cuda")
    quantized(inputs, step)
    top_k(inputs, 100, indices, values)
    try:
        torch.cuda.set_sync_debug_mode("error")
        quantized(inputs, step)
        top_k(inputs, 100, indices, values)
    finally:
        torch.cuda.set_sync_debug_mode("default")
