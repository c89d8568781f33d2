"""torch.compile: graphs are split where buckets end, and the splits are the buckets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager

import commhooks
from ddp_core import DistributedDataParallel
from tests.tools.harness import on_ranks
from tests.tools.training import batch, gradients

WIDTH, DEPTH = 64, 8
LAYER = 4 * (WIDTH * WIDTH + WIDTH)  # bytes
SMALL = {"bucket_cap_mb_list": [LAYER / 2**20, 2 * LAYER / 2**20]}


class Net(nn.Module):
    """Layers of which two share a weight, batch norm, and one graph break if asked for."""

    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.layers[6].weight = self.layers[1].weight
        self.norm = nn.BatchNorm1d(WIDTH)
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if self.breaks and number == DEPTH // 2:
                torch._dynamo.graph_break()
        return self.norm(x)


@pytest.mark.parametrize("scheme", [None, "fp16"])
@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "broken"])
@on_ranks(2, timeout=110, ignore_warnings=(".*",), pg_timeout=90)
def test_splits_become_buckets_gradients_agree_and_communication_overlaps(rank, breaks, scheme):
    torch._dynamo.reset()
    eager, model = (DistributedDataParallel(Net(breaks=breaks), **SMALL) for _ in range(2))
    if scheme is not None:
        for replica in (eager, model):
            commhooks.register(replica, scheme)
    compiled = torch.compile(model, backend=aot_eager if breaks else "aot_eager")
    model.timeline.every = 1
    for step in range(4):
        for replica, called in ((eager, eager), (model, compiled)):
            replica.zero_grad()
            F.softplus(called(batch(step, rank, 8, WIDTH))).mean().backward()
        torch.testing.assert_close(gradients(model), gradients(eager), rtol=1e-5, atol=1e-7)
    frame = model.timeline.frame()
    times = frame[frame.step == 3]
    buckets = [bucket.names for bucket in model.reducer.buckets]
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, buckets)
    assert everyone == [buckets] * 2
    # Small first bucket, then two layers each; the shared weight comes with its first use.
    assert len(buckets) >= 4
    assert {"norm.weight", "norm.bias", "layers.7.weight", "layers.7.bias"} == set(buckets[0])
    names = [name for bucket in buckets for name in bucket]
    assert len(names) == len(set(names)) == 2 * DEPTH + 1
    assert next(i for i, b in enumerate(buckets) if "layers.1.weight" in b) > len(buckets) // 2
    # Gradients of a compiled graph come at its end. Unless it was split, all come at once.
    last_gradient = times.last_ready.max()
    assert (times.launched < last_gradient).sum() >= len(buckets) - 1
    # A bucket's gradients come together: it is exactly one subgraph.
    for _, row in times.iterrows():
        others = times[times.bucket != row.bucket]
        inside = (others.first_ready > row.first_ready) & (others.first_ready < row.last_ready)
        assert not inside.any()


FIXED = {"find_unused_parameters": True}
# Options, the step from which all go on, and the rank without inputs.
IDLE = [({}, 3, 1), ({}, 1, 1), ({}, 1, 0), (FIXED, 0, 1), (FIXED, 0, 0), (FIXED, 3, 1)]


@pytest.mark.parametrize(("options", "saved_at", "idle"), IDLE)
@on_ranks(2, timeout=110, ignore_warnings=(".*",))
def test_a_rank_without_inputs_joins_a_compiled_model(rank, options, saved_at, idle):
    """A rank without inputs in the first steps of a process compiles nothing."""
    torch._dynamo.reset()
    first, second = (DistributedDataParallel(Net(), **SMALL, **options) for _ in range(2))
    hook, again = (commhooks.register(model, "int8") for model in (first, second))
    for step in range(saved_at):
        F.softplus(first(batch(step, rank, 8, WIDTH))).mean().backward()
    compiled = torch.compile(second, backend=aot_eager)
    if saved_at:
        again.load_state_dict(hook.state_dict())
    with second.join():
        for step in range(0 if rank == idle else 3):
            F.softplus(compiled(batch(step, rank, 8, WIDTH))).mean().backward()
    assert again.step == saved_at + 3


@pytest.mark.slow
@on_ranks(2, timeout=110, ignore_warnings=(".*",), pg_timeout=90)
def test_a_module_that_was_compiled_before_it_is_wrapped_is_split_too(rank):
    torch._dynamo.reset()
    eager = DistributedDataParallel(Net(), **SMALL)
    model = DistributedDataParallel(torch.compile(Net(), backend="aot_eager"), **SMALL)
    for step in range(3):
        for replica in (eager, model):
            replica.zero_grad()
            F.softplus(replica(batch(step, rank, 8, WIDTH))).mean().backward()
        torch.testing.assert_close(gradients(model), gradients(eager), rtol=1e-5, atol=1e-7)
    assert len(model.reducer.buckets) >= 4
