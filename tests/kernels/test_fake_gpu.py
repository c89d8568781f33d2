"""The pretended GPU counts launches, and refuses what would make a host wait."""

from __future__ import annotations

import pytest
import torch

from commhooks.kernels import payload_bytes, quantize
from experiments.tools.fake_gpu import fake_gpu


def test_launches_operations_and_allocations_are_counted():
    with fake_gpu() as counts:
        x = torch.empty(512, device="meta")
        payload = torch.empty(payload_bytes(512, "int8", 256), dtype=torch.uint8, device="meta")
        assert (counts.launches, counts.allocations) == (0, 2)
        counts.may_copy = True  # the table of blocks, once
        quantize(x, payload, "int8", 256)
        counts.may_copy = False
        counts.clear()
        quantize(x, payload, "int8", 256)
        x[:256].view(2, 128).add_(1.0)
        assert (dict(counts.kernels), dict(counts.operations)) == ({"quantize": 1}, {"add_": 1})
        assert counts.allocations == 0


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).all()),
        lambda x: x.copy_(torch.empty(3)),
        lambda x: torch.empty(3).to(x.device),
    ],
)
def test_what_waits_for_the_device_raises(wait):
    with fake_gpu(), pytest.raises((RuntimeError, NotImplementedError)):
        wait(torch.empty(3, device="meta"))
