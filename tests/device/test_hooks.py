"""Hooks on a GPU: streams, numbers, memory and launches; skipped where there is none.

Most of it runs on the CPU as well: the bodies in tests/hook/test_device_cases.py, streams
on a lazy device in tests/unit/test_deferred_streams.py.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

import commhooks
from commhooks.core._layout import Layout
from commhooks.hook._engine import Engine
from commhooks.kernels.runtime import cuda
from ddp_core import Streams, Task
from ddp_core.reducer._failures import POLL_INTERVAL
from experiments.tools.fake_gpu import counts_of
from tests.device.device_cases import (
    BODIES,
    CLASSES,
    SCHEMES,
    SHAPES,
    backward,
    given,
    network,
    trained,
)
from tests.device.host_cases import ALL
from tests.device.loopback import loopback

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SLEEP = 20_000_000  # clock cycles, 10 ms: longer than what a test computes


@pytest.fixture(scope="module")  # a communicator takes a second or two
def gloo() -> Iterator[Any]:
    """NCCL is the default group; a group of Gloo for what is compared on the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", init_method=f"file://{folder}/s", rank=0, world_size=1)
        yield dist.new_group(backend="gloo")
        dist.destroy_process_group()


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("name", SCHEMES)
def test_training_gives_what_it_gives_on_the_cpu(gloo: Any, name: str, cls: str) -> None:
    on_gpu = trained("cuda", name, cls=cls)
    on_cpu = trained("cpu", name, cls=cls, group=gloo)
    assert len(on_gpu) == len(on_cpu)
    for value, other in zip(on_gpu, on_cpu, strict=True):
        assert_close(value, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("name", SCHEMES)
def test_nobody_reads_before_a_slow_link_has_written(gloo: Any, name: str, cls: str) -> None:
    expected = trained("cuda", name, cls=cls)
    with loopback(torch.cuda, 1, SLEEP) as link:
        results = trained("cuda", name, cls=cls)
    assert link.issued
    for value, other in zip(results, expected, strict=True):
        assert torch.equal(value, other)


@pytest.mark.parametrize("name", ["grad scaler", "diloco"])
def test_a_body_gives_what_it_gives_on_the_cpu(gloo: Any, name: str) -> None:
    for body, other in zip(BODIES[name]("cuda"), BODIES[name]("cpu", gloo), strict=True):
        assert_close(body, other, rtol=1e-4, atol=1e-5)


# FSDP1 on one rank says both, also without a hook.
@pytest.mark.filterwarnings("ignore:.*NO_SHARD", "ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("name", sorted(ALL.keys() - {"grad scaler", "diloco"}))
@pytest.mark.usefixtures("gloo")
def test_a_body_holds(name: str) -> None:
    ALL[name]("cuda")


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("ranks", [1, 8])
def test_a_bucket_launches_what_a_pretended_gpu_counts(name: str, ranks: int) -> None:
    scheme, settings = SCHEMES[name]
    made = commhooks.make(scheme, **settings)
    launched: Counter[str] = Counter()
    launch = cuda.launch

    def note(source: str, kernel: str, *rest: Any, **options: Any) -> None:
        launched[kernel.partition("<")[0]] += 1
        launch(source, kernel, *rest, **options)

    engine = Engine(made, rank=0, world_size=ranks)
    layout = Layout([f"p{i}" for i in range(len(SHAPES))], SHAPES)
    streams = Streams(None)  # type: ignore[arg-type]  # the loopback asks no group
    with loopback(torch.cuda, ranks), mock.patch.object(cuda, "launch", note):
        for step in range(4):  # the step that `counts_of` counts: sides of a matrix take turns
            launched.clear()
            gradient = torch.cat([value.flatten() for value in given(step, 0)]).cuda()
            engine.begin_bucket(0, is_last=True)
            task = Task(
                engine.exchange(gradient, layout),
                step=step,
                bucket=0,
                dense_bytes=gradient.nbytes,
                world_size=ranks,
                max_rounds=made.traits.rounds,
            )
            assert streams.run(task, gradient.device).wait().isfinite().all()
    assert launched == counts_of(made, SHAPES, world_size=ranks).kernels


@pytest.mark.usefixtures("gloo")
def test_memory_is_two_gradients_and_a_few_buckets_more() -> None:
    """A residual, the next one, and what the exchange of a bucket needs."""
    size, layers = 1024, 16
    gradient_bytes, bucket_bytes = 4 * size * size * layers, 4 * size * size * 2

    def peak(scheme: str | None) -> int:
        parts = [torch.nn.Linear(size, size, bias=False) for _ in range(layers)]
        model = torch.nn.Sequential(*parts)
        ddp = torch.nn.parallel.DistributedDataParallel(
            model.cuda(), bucket_cap_mb=8, gradient_as_bucket_view=True
        )
        hook = None if scheme is None else commhooks.register(ddp, scheme, error_feedback=True)
        inputs = torch.randn(4, size, device="cuda")
        for step in range(4):
            if step == 2:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            ddp(inputs).square().mean().backward()
        torch.cuda.synchronize()
        if hook is not None:
            hook.close()
        return torch.cuda.max_memory_allocated()

    plain = peak(None)
    torch.cuda.empty_cache()
    assert peak("int8") - plain <= 2.2 * gradient_bytes + 4 * bucket_bytes


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.usefixtures("gloo")
def test_a_hook_is_not_captured_in_a_graph() -> None:
    gradients = [value.cuda() for value in given(0, 0)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # gradients are accumulated on the stream that made the model
        model = network("ours", "cuda")
        hook = commhooks.register(model, "int8", error_feedback=True, block=64)
        for _ in range(3):
            backward(model, "cuda", gradients)
    torch.cuda.synchronize()
    step = hook.step
    message = ""
    # The end of a capture that was interrupted may raise, too.
    with suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
        try:
            model(gradients).backward()
        except RuntimeError as error:
            message = str(error)
    assert "is being captured in a CUDA graph" in message
    torch.cuda.synchronize()
    assert hook.step == step
    hook.close()


@pytest.mark.usefixtures("gloo")
def test_a_graph_is_captured_while_the_watchdog_looks_at_a_step() -> None:
    model = network("ours", "cuda")
    hook = commhooks.register(model, "int8")
    gradients = [value.cuda() for value in given(0, 0)]
    x, graph = torch.zeros(3, device="cuda"), torch.cuda.CUDAGraph()
    backward(model, "cuda", gradients)
    torch.cuda._sleep(100 * SLEEP)  # so that the step is not over
    with torch.cuda.graph(graph):
        x += 1
        time.sleep(3 * POLL_INTERVAL.total_seconds())
    graph.replay()
    assert x.tolist() == [1.0] * 3
    hook.close()
