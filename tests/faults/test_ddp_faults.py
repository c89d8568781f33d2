"""Ranks of our class that fail, stop, or die in a rebuild: the others raise in time, and end."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import commhooks
from commhooks import Scheme
from commhooks.core import Result
from ddp_core import AllReduce, CollectiveError, DistributedDataParallel
from tests.tools.harness import Died, run_ranks
from tests.tools.models import loss_of
from tests.tools.training import batch, mlp

VICTIM = 1


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Seen:
    """The error that a surviving rank met, and how long it took from the fault."""

    name: str
    text: str
    place: tuple[int, int, int]
    seconds: float
    ended: bool  # the process group could be destroyed


def survive(model: nn.Module, rank: int, steps: int = 6) -> Seen:
    """Trains until an error comes."""
    began = time.monotonic()
    try:
        for step in range(steps):
            model.zero_grad()
            began = time.monotonic()
            loss_of(model(batch(step, rank, 8, 16))).backward()
    except RuntimeError as error:
        seconds = time.monotonic() - began
        place = (-1, -1, -1)
        if isinstance(error, CollectiveError):
            place = (error.step, error.bucket, error.round)
        text, name = str(error), type(error).__name__
        del error, model
        dist.destroy_process_group()
        return Seen(name, text, place, seconds, ended=True)
    raise AssertionError("no error came")


def small(module: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module, bucket_cap_mb=0.001, **options)


def _in_rebuild(rank: int, world_size: int) -> Seen:
    model = small(mlp())
    if rank == VICTIM:
        model.reducer.plan.step_ended = lambda _: die()  # at the end of the first step
    return survive(model, rank)


def test_a_rank_killed_in_the_rebuild():
    alive = run_ranks(_in_rebuild, 2, may_die=[VICTIM], pg_timeout=8)
    assert alive[VICTIM] == Died(-signal.SIGKILL)
    seen = alive[0]
    assert seen.name == "CollectiveError"
    assert "new buckets" in seen.text or "step 1" in seen.text
    assert seen.seconds < 16


def _hook_raises(rank: int, world_size: int, kind: str) -> Seen:
    model = small(mlp())
    calls = 0

    def hook(state: None, bucket: Any) -> Any:
        nonlocal calls
        calls += 1
        if rank == VICTIM and calls == 8:
            raise ArithmeticError("on purpose")
        return default_hooks.allreduce_hook(None, bucket)

    if kind == "hook":
        model.register_comm_hook(None, hook)
    else:
        commhooks.register(model, Raises(at_step=2))
    try:
        return survive(model, rank)
    except ArithmeticError as error:
        return Seen("ArithmeticError", str(error), (-1, -1, -1), 0.0, ended=True)


@dataclass(frozen=True)
class Raises(Scheme):
    """Fails on one rank."""

    at_step: int

    def exchange(self, bucket: Any) -> Any:
        if bucket.rank == VICTIM and bucket.step == self.at_step:
            raise ArithmeticError("on purpose")
        mean = yield AllReduce(bucket.gradient)
        return Result(mean)


@pytest.mark.parametrize("kind", ["hook", "scheme"])
def test_an_exception_in_a_hook_on_one_rank_reaches_all_long_before_the_timeout(kind):
    alive = run_ranks(_hook_raises, 3, kind, pg_timeout=60)
    assert "on purpose" in alive[VICTIM].text
    for seen in (alive[0], alive[2]):
        assert seen.name == "CollectiveError", seen
        assert "on purpose" in seen.text
        assert f"rank {VICTIM}" in seen.text
        assert seen.place[0] == {"hook": 3, "scheme": 2}[kind]
        assert seen.seconds < 10
