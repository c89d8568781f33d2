"""Wrong use, dead peers and overflows: a clear error on every rank, never a hang or a drift."""

from __future__ import annotations

import copy
import io
import math
import os
import subprocess
import sys
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
import ddp_core
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
    equal_bits,
    gradients,
    mlp,
    outcome,
    parameters,
    residuals,
)


def _backward(model: nn.Module, step: int, rank: int) -> None:
    model.zero_grad()
    model(batch(step, rank, 8, 16)).square().mean().backward()


# ---- ranks that do not agree


def _register_differently(rank: int, world_size: int, how: str) -> Any:
    odd = rank == world_size - 1
    layers = OrderedDict([("first" if odd and how == "parameters" else "zeroth", nn.Linear(8, 8))])
    model = ddp(nn.Sequential(layers))
    options: dict[str, Any] = {"rank": 2 if odd and how == "options" else 1}
    scheme = "batched_powersgd" if odd and how == "scheme" else "powersgd"
    seed = 1 if odd and how == "seed" else 0
    begin = time.monotonic()
    error = outcome(commhooks.register, model, scheme, seed=seed, **options)
    again = outcome(commhooks.register, model, "none")
    return error, time.monotonic() - begin, again


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("how", "field", "value"),
    [
        ("scheme", "scheme and options", "BatchedPowerSGD"),
        ("options", "scheme and options", "rank=2"),
        ("parameters", "parameters", "first.weight"),
        ("seed", "seed", "1"),
    ],
)
def test_a_mismatch_names_rank_and_field_on_every_rank(how, field, value, world_size):
    for error, seconds, again in run_ranks(_register_differently, world_size, how):
        name, text = error
        assert name == "MismatchError"
        assert field in text
        assert value in text
        assert f"rank {world_size - 1}" in text
        assert seconds < 10
        # Nothing was registered: the ranks can agree on another scheme, if names are alike.
        assert again is None or how == "parameters"


def _switch_differently(rank: int, world_size: int) -> Any:
    model = ddp(mlp())
    hook = commhooks.register(model, "powersgd")
    _backward(model, 0, rank)
    error = outcome(hook.switch, "fp16" if rank else "none")
    _backward(model, 1, rank)
    return error, gradients(model), repr(hook)


def test_a_mismatching_switch_is_an_error_and_the_old_scheme_goes_on():
    results = run_ranks(_switch_differently, 2)
    for error, _, text in results:
        assert error[0] == "MismatchError"
        assert "HookState.switch" in error[1]
        assert "powersgd" in text
    assert equal_bits([grads for _, grads, _ in results])


def _one_does_not_register(rank: int, world_size: int) -> Any:
    model = ddp(mlp())
    if rank == 1:
        time.sleep(4)
        return None
    return outcome(commhooks.register, model, "powersgd")


def test_a_rank_that_does_not_register_is_an_error_in_time():
    error, _ = run_ranks(_one_does_not_register, 2, pg_timeout=2)
    assert error[0] == "MissingRankError"
    assert "rank 1 did not within 2 s" in error[1]


# ---- wrong arguments


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("powersdg", "'powersgd'"), ("fp_16", "'fp16'"), ("BF16", "'bf16'"), ("non", "'none'")],
)
def test_an_unknown_scheme_suggests_the_nearest(name, nearest):
    with pytest.raises(commhooks.errors.UnknownSchemeError, match=f"did you mean {nearest}"):
        commhooks.make(name)


def test_a_wrong_option_suggests_the_nearest():
    with pytest.raises(commhooks.errors.OptionError, match="no option 'rnk'; did you mean 'rank'"):
        commhooks.make("powersgd", rnk=2)


@pytest.mark.parametrize("rank", [0, -1, 1.5, True, "4"])
def test_a_wrong_option_value_is_an_error(rank):
    with pytest.raises(ValueError, match="rank"):
        commhooks.make("powersgd", rank=rank)


def test_without_a_process_group_register_says_so():
    with pytest.raises(commhooks.errors.RegistrationError, match="init_process_group"):
        commhooks.register(mlp(), "none")


def _not_ddp(rank: int, world_size: int) -> Any:
    two = nn.Sequential(ddp(mlp()), ddp(mlp()))
    return [outcome(commhooks.register, model, "none") for model in (mlp(), two, "model")]


def test_a_model_without_one_ddp_is_an_error():
    ((plain, two, text),) = run_ranks(_not_ddp, 1)
    assert [error[0] for error in (plain, two, text)] == ["RegistrationError"] * 3
    assert "not wrapped in DistributedDataParallel" in plain[1]
    assert "holds 2 DistributedDataParallel" in two[1]
    assert "got str" in text[1]


def _twice(rank: int, world_size: int) -> Any:
    model, foreign = ddp(mlp()), ddp(mlp())
    commhooks.register(model, "powersgd")
    foreign.register_comm_hook(None, _foreign_hook)
    errors = [outcome(commhooks.register, one, "none") for one in (model, foreign)]
    _backward(model, 0, rank)
    return errors


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


def test_a_second_hook_is_an_error_that_names_the_first():
    for own, foreign in run_ranks(_twice, 2):
        assert own[0] == foreign[0] == "RegistrationError"
        assert "hook.switch" in own[1]
        assert "_foreign_hook" in foreign[1]


def _two_models(rank: int, world_size: int) -> Any:
    first, second = ddp(mlp()), ddp(mlp(depth=2))
    state = HookState("powersgd", first)
    for model in (first, second):
        model.register_comm_hook(state, commhooks.comm_hook)
    _backward(first, 0, rank)
    return outcome(_backward, second, 0, rank)


def test_one_state_for_two_models_is_an_error():
    for error in run_ranks(_two_models, 2):
        assert "one HookState serves one model" in error[1]


# ---- switching


def _in_the_middle(rank: int, world_size: int) -> Any:
    model = ddp(mlp())
    hook = commhooks.register(model, "powersgd")
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
    return errors, outcome(hook.switch, "none")


def test_switch_save_and_load_in_the_middle_of_a_step_are_errors():
    for errors, between in run_ranks(_in_the_middle, 2):
        assert [error[0] for error in errors] == ["RegistrationError"] * 3
        assert all("under way" in error[1] for error in errors)
        assert between is None


def _switch_back_and_forth(rank: int, world_size: int, config: str, pause: str) -> Any:
    scheme, options = STATEFUL[config]
    model, local = ddp(mlp()), mlp()
    hook = commhooks.register(model, scheme, **options)
    applied, wanted, held = torch.zeros(()), torch.zeros(()), []
    for step in range(12):
        if step in (4, 10):
            hook.switch(pause)
        if step == 7:
            hook.switch(scheme, **options)
        _backward(model, step, rank)
        _backward(local, step, rank)
        applied, wanted = applied + gradients(model), wanted + averaged(gradients(local))
        held.append(float(residuals(hook, model).abs().max()))
    return applied, wanted, held


@pytest.mark.parametrize("config", sorted(set(STATEFUL) - OTHERS))
def test_the_residual_is_flushed_by_the_first_step_after_a_switch(config):
    results = run_ranks(_switch_back_and_forth, 2, config, "none")
    assert equal_bits([applied for applied, _, _ in results])
    for applied, wanted, held in results:
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


def _until_death(rank: int, world_size: int, scheme: Any, dies_in_backward: bool) -> Any:
    model = ddp(mlp())
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


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("scheme", ["none", "fp16", "powersgd", "batched_powersgd"])
def test_a_peer_that_dies_in_backward_is_an_error_that_names_the_place(scheme, world_size):
    results = run_ranks(_until_death, world_size, scheme, True, pg_timeout=5, may_die=[1])
    assert results.pop(1) == Died(9)
    for error, seconds, closing in results:
        assert error is not None
        assert "failed in step 2, bucket" in error[1]
        assert "round" in error[1]
        assert "A peer died" in error[1]
        assert seconds < 8
        assert closing < 6


# Not at once: the other rank may still have to read what the first round sent it.
@pytest.mark.parametrize("sleeps", [0.5, 8.0], ids=["dies", "hangs"])
def test_a_peer_that_is_lost_between_two_rounds_is_an_error_in_round_one(sleeps):
    results = run_ranks(_until_death, 2, DiesBetween(sleeps), False, pg_timeout=3, may_die=[1])
    (error, seconds, _), died = results
    assert died == Died(9)
    assert "CollectiveError: all_reduce failed in step 2, bucket 0, round 1" in error[1]
    assert seconds < 6


# ---- hooks that would silently not run


def _copied(rank: int, world_size: int, how: str) -> Any:
    model = ddp(mlp())
    hook = commhooks.register(model, "powersgd")
    _backward(model, 0, rank)
    if how == "deepcopy":
        other = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    error = outcome(_backward, other, 1, rank)
    _backward(model, 1, rank)
    again = commhooks.register(other, "powersgd")
    again.load_state_dict(hook.state_dict())
    for one in (model, other):
        with torch.no_grad():
            for parameter, mine in zip(one.parameters(), model.parameters(), strict=True):
                parameter.copy_(mine)
        _backward(one, 2, rank)
    return error, torch.equal(gradients(model), gradients(other))


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copied_ddp_raises_until_it_is_registered_again(how):
    for error, same in run_ranks(_copied, 2, how):
        assert error[0] == "HookNotAttachedError"
        assert "unpickled or copied" in error[1]
        assert same


def _inner_loss(rank: int, world_size: int) -> Any:
    model = ddp(mlp())
    commhooks.register(model, "powersgd")
    return outcome(model.module(batch(0, rank, 8, 16)).square().mean().backward)


def test_a_loss_through_the_inner_module_is_an_error():
    for error in run_ranks(_inner_loss, 2):
        assert error[0] == "HookNotAttachedError"
        assert "without a forward pass of DistributedDataParallel" in error[1]


def _changed_in_training(rank: int, world_size: int) -> list[Any]:
    errors = []
    for kind, scheme in ((DistributedDataParallel, "int8"), (CoreDDP, ""), (CoreDDP, "powersgd")):
        for how in ("assign", "double", "beside"):
            model = kind(mlp())
            if scheme:
                commhooks.register(model, scheme)
            x = batch(rank, 0, 8, 16)
            model(x).square().mean().backward()
            model.zero_grad()
            if how == "assign":
                state = {name: value.clone() for name, value in model.state_dict().items()}
                model.load_state_dict(state, assign=True)
            elif how == "double":
                model.double()
                x = x.double()
            one: Any = model.module if how == "beside" else model
            errors.append((how, outcome(lambda x, one: one(x).square().mean().backward(), x, one)))
    return errors


def test_parameters_that_change_in_the_middle_of_training_are_an_error_on_every_rank():
    """After a step, ranks would go on with their own gradients otherwise."""
    reasons = {"assign": "another object", "double": "torch.float64", "beside": "came after this"}
    for errors in run_ranks(_changed_in_training, 2):
        for how, error in errors:
            assert error is not None, how
            assert reasons[how] in error[1]


def _registered_late(rank: int, world_size: int) -> Any:
    model = ddp(mlp())
    _backward(model, 0, rank)
    commhooks.register(model, "powersgd")
    with torch.no_grad():
        model(batch(1, rank, 8, 16))
    return outcome(lambda: model(batch(2, rank, 8, 16)).square().mean().backward())


def test_a_hook_registered_after_some_steps_trains():
    assert run_ranks(_registered_late, 2) == [None, None]


def test_the_python_reducers_tuple_is_a_clear_error():
    with pytest.raises(commhooks.errors.HookNotAttachedError, match="python_reducer"):
        HookState("none").start((torch.ones(2), torch.ones(2)))


# ---- overflow


def _memory(hook: HookState, rank: int) -> dict[str, Tensor]:
    state = hook.state_dict()[f"rank{rank}"]["memory"]
    return {f"{key}/{name}": value for key in state for name, value in state[key].items()}


def _scaled(rank: int, world_size: int, config: str, bad: bool) -> Any:
    """Trains with a loss scaler; with ``bad``, one more step after six, infinite on one rank."""
    scheme, options = STATEFUL[config]
    model = ddp(mlp())
    hook = commhooks.register(model, scheme, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1000)

    def step(number: int) -> None:
        optimizer.zero_grad()
        x = batch(number, rank, 8, 16)
        scaler.scale((model(x) - x.roll(1, 1)).square().mean()).backward()

    def apply() -> None:
        scaler.step(optimizer)
        scaler.update()

    for number in range(6):
        step(number)
        apply()
    checks: dict[str, Any] = {}
    if bad:
        before, weights = _memory(hook, rank), parameters(model)
        victim = list(model.parameters())[2]
        spoil = victim.register_hook(lambda g: g.index_fill(0, torch.tensor([3]), torch.inf))
        step(99) if rank == 1 else _without(spoil, step, 99)
        spoil.remove()
        checks["finite"] = bool(gradients(model).isfinite().all())
        apply()
        after = _memory(hook, rank)
        checks["memory kept"] = before.keys() == after.keys() and all(
            torch.equal(before[key], after[key]) for key in before
        )
        checks["weights kept"] = torch.equal(weights, parameters(model))
        checks["skipped"] = hook.skipped_steps
    else:
        scaler.update(8.0)  # as the bad step makes it: the residual is in units of the scale
        hook.engine.step += 1  # a bad step counts, and draws are keyed by the count
    for number in range(6, 10):
        step(number)
        apply()
    return checks, parameters(model), residuals(hook, model)


def _without(handle: Any, step: Any, number: int) -> None:
    handle.remove()
    step(number)


@pytest.mark.parametrize("config", STATEFUL)
def test_an_infinite_gradient_on_one_rank_is_skipped_by_all_and_leaves_no_trace(config):
    quiet = ("a float16 payload",)
    bad = run_ranks(_scaled, 2, config, True, ignore_warnings=quiet)
    good = run_ranks(_scaled, 2, config, False)
    for (checks, weights, held), (_, want, want_held) in zip(bad, good, strict=True):
        assert checks == {
            "finite": False,
            "memory kept": True,
            "weights kept": True,
            "skipped": 1,
        }
        assert torch.equal(weights, want)
        assert torch.equal(held, want_held)


@on_ranks(2)
def test_an_infinite_step_counts_where_a_scheme_keeps_nothing(rank: int) -> None:
    for wrap in (DistributedDataParallel, ddp_core.DistributedDataParallel):
        for scheme in ("none", "bf16", "int8"):
            model = wrap(mlp())
            hook = commhooks.register(model, scheme)
            for number in range(3):
                loss = model(batch(number, rank, 8, 16)).square().mean()
                (loss * (math.inf if (number, rank) == (1, 1) else 1.0)).backward()
                model.zero_grad()
            assert hook.skipped_steps == hook.metrics()["skipped_steps"] == 1, scheme


# ---- import


_IMPORT_SCRIPT = """
import sys
import torch, torch.nn.parallel
before = set(sys.modules)
import commhooks
print(*sorted(set(sys.modules) - before))
print(torch.cuda.is_initialized())
"""


@pytest.fixture(scope="module")
def imported():
    path = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT_SCRIPT],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    modules, cuda = done.stdout.splitlines()
    return modules.split(), cuda, done.stderr


def test_import_takes_nothing_heavy(imported):
    modules, cuda, errors = imported
    roots = {name.split(".")[0] for name in modules}
    assert not roots & {"cupy", "pandas", "matplotlib", "tensorboard", "safetensors"}
    assert cuda == "False"
    assert errors == ""


def test_import_is_quick(imported):
    """By what it loads: its time depends on what else the machine does."""
    # Torch's flop counter takes triton, where torch was built for GPUs.
    expected = ("commhooks", "ddp_core", "triton")
    others = [name for name in imported[0] if name.split(".")[0] not in expected]
    assert len(others) < 20, others
