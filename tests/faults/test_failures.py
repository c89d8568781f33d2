"""Wrong use, dead peers and overflows: a clear error on every rank, never a hang or a drift."""

from __future__ import annotations

import copy
import os
import time
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks import HookState, Scheme
from commhooks.core import Result, Traits
from ddp_core import AllReduce
from ddp_core import DistributedDataParallel as CoreDDP
from tests.tools.harness import Died, on_ranks, run_ranks
from tests.tools.training import (
    OTHERS,
    STATEFUL,
    averaged,
    batch,
    ddp,
    equal_on_all_ranks,
    gradients,
    mlp,
    outcome,
    residuals,
    through_file,
)

KINDS = {"torch": DistributedDataParallel, "core": CoreDDP}


def _backward(model: nn.Module, step: int, rank: int) -> None:
    model.zero_grad()
    model(batch(step, rank, 8, 16)).square().mean().backward()


# ---- ranks that do not agree


DIFFERENCES = [  # what differs, and what the error says of it
    ("scheme", "scheme and options", "has 'powersgd, rank=1', rank 2 has 'batched_powersgd'"),
    ("options", "scheme and options", "has 'powersgd, rank=1', rank 2 has 'powersgd, rank=2'"),
    ("parameters", "parameters", "first.weight"),
    ("seed", "seed", "1"),
]


@on_ranks(3)
def test_a_mismatch_names_rank_and_field_on_every_rank(rank, world_size):
    odd = rank == world_size - 1
    for how, field, value in DIFFERENCES:
        name = "first" if odd and how == "parameters" else "zeroth"
        model = ddp(nn.Sequential(OrderedDict([(name, nn.Linear(8, 8))])))
        options = {"rank": 2 if odd and how == "options" else 1}
        scheme = "batched_powersgd" if odd and how == "scheme" else "powersgd"
        seed = 1 if odd and how == "seed" else 0
        begin = time.monotonic()
        error = outcome(commhooks.register, model, scheme, seed=seed, **options)
        assert time.monotonic() - begin < 10
        assert error[0] == "MismatchError"
        assert field in error[1]
        assert value in error[1]
        assert "rank 2" in error[1]
        # Nothing was registered: the ranks can agree on another scheme, if names are alike.
        assert outcome(commhooks.register, model, "none") is None or how == "parameters"


@on_ranks(2)
def test_a_mismatching_switch_is_an_error_and_the_old_scheme_goes_on(rank):
    model = ddp(mlp())
    hook = commhooks.register(model, "powersgd", rank=1)
    _backward(model, 0, rank)
    with pytest.raises(commhooks.errors.MismatchError, match=r"HookState\.switch"):
        hook.switch("fp16" if rank else "none")
    _backward(model, 1, rank)
    assert "powersgd" in repr(hook)
    assert equal_on_all_ranks(gradients(model))


def _one_does_not_register(rank: int, world_size: int) -> Any:
    model = ddp(mlp())
    if rank == 1:
        time.sleep(3)
        return None
    return outcome(commhooks.register, model, "powersgd")


def test_a_rank_that_does_not_register_is_an_error_in_time():
    error, _ = run_ranks(_one_does_not_register, 2, pg_timeout=2)
    assert error[0] == "MissingRankError"
    assert "rank 1 did not within 2 s" in error[1]


# ---- wrong arguments


def test_without_a_process_group_register_says_so():
    with pytest.raises(commhooks.errors.RegistrationError, match="init_process_group"):
        commhooks.register(mlp(), "none")


@on_ranks(1)
def test_a_model_without_one_ddp_is_an_error():
    two = nn.Sequential(ddp(mlp()), ddp(mlp()))
    for model, text in (
        (mlp(), "not wrapped in DistributedDataParallel"),
        (two, "holds 2 DistributedDataParallel"),
        ("model", "got str"),
    ):
        with pytest.raises(commhooks.errors.RegistrationError, match=text):
            commhooks.register(model, "none")


def _foreign_hook(
    state: object,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    raise NotImplementedError


# DDP compares annotations with the classes, and here they are strings.
_foreign_hook.__annotations__ = {
    "bucket": dist.GradBucket,  # type: ignore[attr-defined]
    "return": torch.futures.Future[torch.Tensor],
}


@on_ranks(2)
def test_a_second_hook_is_an_error_that_names_the_first(rank):
    model, foreign = ddp(mlp()), ddp(mlp())
    commhooks.register(model, "powersgd", rank=1)
    foreign.register_comm_hook(None, _foreign_hook)
    for hooked, text in ((model, r"hook\.switch"), (foreign, "_foreign_hook")):
        with pytest.raises(commhooks.errors.RegistrationError, match=text):
            commhooks.register(hooked, "none")
    _backward(model, 0, rank)


@on_ranks(2)
def test_one_state_for_two_models_is_an_error(rank):
    first, second = ddp(mlp()), ddp(mlp(depth=2))
    state = HookState("powersgd", first, rank=1)
    for model in (first, second):
        model.register_comm_hook(state, commhooks.comm_hook)
    _backward(first, 0, rank)
    assert "one HookState serves one model" in outcome(_backward, second, 0, rank)[1]


# ---- switching


@on_ranks(2)
def test_switch_save_and_load_in_the_middle_of_a_step_are_errors(rank):
    model = ddp(mlp())
    hook = commhooks.register(model, "powersgd", rank=1)
    errors = []

    def meddle(grad: Tensor) -> None:
        errors.append(outcome(hook.switch, "none"))
        errors.append(outcome(hook.state_dict))
        errors.append(outcome(hook.load_state_dict, {}))

    _backward(model, 0, rank)
    # The first layer's gradient comes last, when other buckets are on their way.
    handle = next(model.parameters()).register_hook(meddle)
    _backward(model, 1, rank)
    handle.remove()
    assert [name for name, _ in errors] == ["RegistrationError"] * 3
    assert all("under way" in text for _, text in errors)
    hook.switch("none")


@pytest.mark.parametrize("config", sorted(set(STATEFUL) - OTHERS))
@on_ranks(2)
def test_the_residual_is_flushed_by_the_first_step_after_a_switch(rank, config):
    scheme, options = STATEFUL[config]
    model, local = ddp(mlp()), mlp()
    hook = commhooks.register(model, scheme, **options)
    applied, wanted, held = torch.zeros(()), torch.zeros(()), []
    for step in range(12):
        if step in (4, 10):
            hook.switch("none")
        if step == 7:
            hook.switch(scheme, **options)
        _backward(model, step, rank)
        _backward(local, step, rank)
        applied, wanted = applied + gradients(model), wanted + averaged(gradients(local))
        held.append(float(residuals(hook, model).abs().max()))
    assert equal_on_all_ranks(applied)
    assert held[3] > 0
    assert held[4] == held[5] == held[6] == held[10] == held[11] == 0
    assert held[9] > 0
    # Nothing is held back, so what was applied is the sum. The bound is that of float32 sums,
    # or of the rounding of a 16-bit sum, which feedback does not see.
    share = 2.0**-9 if "fp16" in config else 1e-5
    bound = share * 12 * float(wanted.abs().max())
    torch.testing.assert_close(applied, wanted, rtol=0, atol=bound)


# ---- a peer that dies


@dataclass(frozen=True)
class DiesBetween(Scheme):
    """Two averages; in step 2, rank 1 ends, or sleeps, in bucket 0 between them."""

    seconds: float = 0.0

    traits = Traits(rounds=2)

    def exchange(self, bucket):
        mean = yield AllReduce(bucket.gradient)
        if bucket.rank == 1 and bucket.step == 2:
            time.sleep(self.seconds)
            os._exit(9)
        mean = yield AllReduce(mean)
        return Result(mean)


def _until_death(rank: int, world_size: int, kind: str, scheme: Any, dies_in_backward: bool) -> Any:
    model = KINDS[kind](mlp(), bucket_cap_mb=0.001)
    hook = commhooks.register(model, scheme)
    for step in range(2):
        _backward(model, step, rank)
    if rank == 1 and dies_in_backward:
        next(model.parameters()).register_hook(lambda grad: os._exit(9))
    begin = time.monotonic()
    error = outcome(_backward, model, 2, rank)
    seconds = time.monotonic() - begin
    begin = time.monotonic()
    hook.close()
    return error, seconds, time.monotonic() - begin


@pytest.mark.parametrize("kind", ["core", "torch"])
@pytest.mark.parametrize("scheme", ["none", "powersgd", "fp16", "batched_powersgd"])
def test_a_peer_that_dies_in_backward_is_an_error_that_names_the_place(scheme, kind):
    results = run_ranks(_until_death, 3, kind, scheme, True, pg_timeout=5, may_die=[1])
    assert results.pop(1) == Died(9)
    for error, seconds, closing in results:
        assert error is not None
        assert "failed in step 2, bucket" in error[1]
        assert "round" in error[1]
        assert "A peer died" in error[1]
        assert seconds < 8
        assert closing < 6


# Not at once: the other rank may still have to read what the first round sent it.
def _ends_before_the_first_step(rank: int, world_size: int, kind: str) -> tuple[str, str] | None:
    model = KINDS[kind](mlp())
    commhooks.register(model, "int8")
    if rank == 1:
        os._exit(1)
    return outcome(_backward, model, 0, rank)


@pytest.mark.parametrize("kind", KINDS)
def test_a_peer_that_ends_before_its_first_step_is_missed_at_once(kind: str) -> None:
    # The timeout of the group is far longer than that of the test.
    error, _ = run_ranks(
        _ends_before_the_first_step, 2, kind, timeout=30, pg_timeout=600, may_die=[1]
    )
    assert "not every rank came, or one has ended" in error[1]


@pytest.mark.parametrize("kind", ["torch", "core"])
@pytest.mark.parametrize("sleeps", [0.5, 8.0], ids=["dies", "hangs"])
def test_a_peer_that_is_lost_between_two_rounds_is_an_error_in_round_one(sleeps, kind):
    scheme = DiesBetween(sleeps)
    results = run_ranks(_until_death, 2, kind, scheme, False, pg_timeout=3, may_die=[1])
    (error, seconds, _), died = results
    assert died == Died(9)
    assert "CollectiveError: all_reduce failed in step 2, bucket 0, round 1" in error[1]
    assert seconds < 6


# ---- hooks that would silently not run


@on_ranks(2)
def test_a_copied_ddp_raises_until_it_is_registered_again(rank):
    for copied in (copy.deepcopy, partial(through_file, weights_only=False)):
        model = ddp(mlp())
        hook = commhooks.register(model, "powersgd", rank=1)
        _backward(model, 0, rank)
        other = copied(model)
        with pytest.raises(commhooks.errors.HookNotAttachedError, match="unpickled or copied"):
            _backward(other, 1, rank)
        _backward(model, 1, rank)
        commhooks.register(other, "powersgd", rank=1).load_state_dict(hook.state_dict())
        other.load_state_dict(model.state_dict())
        for replica in (model, other):
            _backward(replica, 2, rank)
        assert torch.equal(gradients(model), gradients(other))


@on_ranks(2)
def test_a_loss_through_the_inner_module_is_an_error(rank):
    model = ddp(mlp())
    commhooks.register(model, "powersgd", rank=1)
    with pytest.raises(
        commhooks.errors.HookNotAttachedError,
        match="without a forward pass of DistributedDataParallel",
    ):
        model.module(batch(0, rank, 8, 16)).square().mean().backward()


@on_ranks(2)
def test_parameters_that_change_in_the_middle_of_training_are_an_error_on_every_rank(rank):
    """After a step, ranks would go on with their own gradients otherwise."""
    reasons = {"assign": "another object", "double": "torch.float64", "beside": "came after this"}
    for kind, scheme in ((DistributedDataParallel, "int8"), (CoreDDP, ""), (CoreDDP, "powersgd")):
        for how, reason in reasons.items():
            model = kind(mlp())
            if scheme:
                commhooks.register(model, scheme)
            _backward(model, 0, rank)
            model.zero_grad()
            if how == "assign":
                state = {name: value.clone() for name, value in model.state_dict().items()}
                model.load_state_dict(state, assign=True)
            elif how == "double":
                model.double()
            called: Any = model.module if how == "beside" else model
            dtype = torch.float64 if how == "double" else torch.float32
            x = batch(1, rank, 8, 16).to(dtype)
            error = outcome(lambda call, x: call(x).square().mean().backward(), called, x)
            assert error is not None, how
            assert reason in error[1]
