"""ZeroRedundancyOptimizer overlapped with our DistributedDataParallel, against an optimizer."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from commhooks.ddp_comm_hooks.ddp_zero_hook import (
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)
from ddp_core import DistributedDataParallel
from tests.distributed.harness import run_ranks
from tests.distributed.models import loss_of
from tests.distributed.test_ddp_steps import Breaks
from tests.distributed.training import averaged, batch, mlp, outcome, parameters

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.9)}),
}
HOOKS = {"once": hook_with_zero_step, "interleaved": hook_with_zero_step_interleaved}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"static_graph": True},
    {"find_unused_parameters": True, "gradient_as_bucket_view": True},
]


class Net(nn.Module):
    """Layers of several sizes; one is left out now and then; backward may raise."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.idle, self.last = mlp(seed=1), nn.Linear(16, 16), nn.Linear(16, 64)

    def forward(self, x: torch.Tensor, idle: bool = False, breaks: bool = False) -> torch.Tensor:
        x = Breaks.apply(self.first(x), breaks)
        return self.last(x if idle else self.idle(x))


def _zero(rank: int, world_size: int, how: str) -> list[str]:
    wrong = []
    cases = itertools.product(KINDS.items(), OPTIONS, (False, True))
    for (kind, (build, settings)), options, shards in cases:
        model = DistributedDataParallel(Net(), bucket_cap_mb=0.002, **options)
        plain = DistributedDataParallel(Net(), bucket_cap_mb=0.002, **options)
        zero = ZeroRedundancyOptimizer(model.parameters(), build, overlap_with_ddp=True, **settings)
        hook = HOOKS[how](default_hooks.fp16_compress_hook, model, zero, shards)
        model.register_comm_hook(None, hook)
        plain.register_comm_hook(None, default_hooks.fp16_compress_hook)
        optimizer = build(plain.parameters(), foreach=False, **settings)
        for step in range(6):
            for one in (zero, optimizer):
                one.param_groups[0]["lr"] = settings["lr"] / (1 + step // 3)
            optimizer.zero_grad()
            model.zero_grad()
            for one in (model, plain):
                idle = step in (2, 4) and "find_unused_parameters" in options
                with one.no_sync():
                    loss_of(one(batch(100 + step, rank, 4, 16), idle)).backward()
                loss_of(one(batch(step, rank, 4, 16), idle)).backward()
            optimizer.step()
            if not torch.equal(parameters(model), parameters(plain)):
                wrong.append(f"{kind} {options} {shards} {step}")
        if sum(map(len, zero.optim.state.values())) >= 2 * len(list(model.parameters())):
            wrong.append(f"{kind}: this rank has the state of all parameters")
        refused = outcome(model.join)
        assert refused is not None
        assert "overlap_with_ddp=False" in refused[1]
    return wrong


@pytest.mark.parametrize(("world_size", "how"), [(2, "once"), (3, "interleaved")])
def test_zero_overlapped_has_the_bits_of_an_optimizer_from_the_first_step(world_size, how):
    for wrong in run_ranks(_zero, world_size, how, ignore_warnings=(".*functional",)):
        assert wrong == []


def _after_a_raise(rank: int, world_size: int) -> None:
    for hook in HOOKS.values():
        model = DistributedDataParallel(Net(), bucket_cap_mb=0.0005)
        zero = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1
        )
        model.register_comm_hook(None, hook(default_hooks.allreduce_hook, model, zero))
        for step in range(8):
            breaks = step in (0, 3, 4)
            loss = loss_of(model(batch(step, rank, 4, 16), breaks=breaks))
            with pytest.raises(ArithmeticError) if breaks else contextlib.nullcontext():
                loss.backward()
        everything = parameters(model)
        assert torch.equal(averaged(everything), everything)


def test_ranks_stay_equal_when_backward_raises_between_zeros_steps():
    run_ranks(_after_a_raise, 2)


def _refusals(rank: int, world_size: int) -> list[Any]:
    model = DistributedDataParallel(mlp())
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    overlapped = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1
    )
    return [
        outcome(hook_with_zero_step, default_hooks.allreduce_hook, model, zero),
        outcome(hook_with_zero_step, default_hooks.allreduce_hook, TorchDDP(mlp()), overlapped),
    ]


def test_what_cannot_overlap_is_refused():
    ((plain, torchs),) = run_ranks(_refusals, 1)
    assert "overlap_with_ddp=True" in plain[1]
    assert "Gloo" in torchs[1]  # torch's function on torch's class
