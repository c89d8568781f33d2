"""Sharded optimizers: states that are saved, steps that do not count, gradients, and refusals."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commhooks
from commhooks.errors import CheckpointError, Error, MismatchError, RegistrationError
from commhooks.zero import ZeroOptimizer
from tests.hosts.zero_training import (
    agree,
    backward,
    both_with,
    compressed,
    differ_by,
    inputs_of,
    model_of,
    overflow_once,
    same,
    take_steps,
    values,
    wrapped,
)
from tests.tools.harness import on_ranks, run_ranks
from tests.tools.models import Breaks
from tests.tools.training import everyone

# ---- save and resume


@on_ranks(2)
def test_a_resumed_run_continues_bit_for_bit(rank: int) -> None:
    for gathered in (False, True):
        model, zero = compressed(in_backward=gathered)
        zero.hook.switch("int8", block=2048)  # which would cut other shards
        take_steps(model, zero, rank, 0, 3)
        saved = copy.deepcopy((model.state_dict(), zero.state_dict(gather=gathered)))
        take_steps(model, zero, rank, 3, 3)
        zero.param_groups[0]["lr"] = 1.0
        other, resumed = compressed(in_backward=gathered)
        resumed.hook.switch("int8", block=2048)
        other.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        assert resumed.param_groups[0]["lr"] == 1e-2
        take_steps(other, resumed, rank, 3, 3)
        assert same(model, other)
        other.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])  # once more: of the state before nothing is left
        assert len(resumed.state) == len(resumed._shards.pieces())
        take_steps(other, resumed, rank, 3, 3)
        assert same(model, other)


@on_ranks(2)
def test_a_piece_of_one_entry_is_gathered_with_the_others() -> None:
    for sizes in ((63, 65), (65, 63)):
        module = nn.Module()
        module.weights = nn.ParameterList([torch.ones(size) for size in sizes])
        module.forward = lambda module=module: torch.cat([*module.weights]).square().sum()
        model = wrapped(module)
        zero = ZeroOptimizer(model, torch.optim.AdamW, lr=1e-2)
        model().backward()
        zero.step()
        state = zero.state_dict(gather=True)
        for piece in state["pieces"].values():
            assert sorted(piece["entries"]) == ["exact", "state.exp_avg", "state.exp_avg_sq"]
        zero.load_state_dict(state)


def _saved(rank: int, world_size: int) -> tuple[Any, Any]:
    model, zero = compressed()
    take_steps(model, zero, rank, 0, 3)
    only = zero.state_dict(gather=True, dst=1)
    assert bool(only) == (rank == 1)
    return model.state_dict(), zero.state_dict(gather=True)


def _loaded(rank: int, world_size: int, parts: Any) -> Any:
    model, zero = compressed()
    model.load_state_dict(parts[0])
    zero.load_state_dict(parts[1])
    again = zero.state_dict(gather=True)
    take_steps(model, zero, rank, 3, 2)
    agree(model)
    return again


def same_pieces(left: Any, right: Any) -> None:
    """Asserts that two states have the same entries of every parameter."""
    assert left.keys() == right.keys()
    for name, piece in left.items():
        assert piece["entries"].keys() == right[name]["entries"].keys()
        for key, value in piece["entries"].items():
            assert torch.equal(value, right[name]["entries"][key])
        assert piece["rest"] == right[name]["rest"]


@pytest.mark.parametrize(("before", "afters"), [(2, (3,)), (3, (2, 1))])
def test_a_gathered_state_loads_on_another_number_of_ranks(
    before: int, afters: tuple[int, ...]
) -> None:
    parts = run_ranks(_saved, before)[0]
    for after in afters:
        for again in run_ranks(_loaded, after, parts):
            same_pieces(parts[1]["pieces"], again["pieces"])


@on_ranks(2)
def test_states_that_do_not_fit_are_refused(rank: int) -> None:
    model, zero = compressed()
    take_steps(model, zero, rank, 0, 1)
    before = values(model)
    state, whole = zero.state_dict(), zero.state_dict(gather=True)
    torchs = torch.optim.AdamW(model_of().parameters()).state_dict()
    foreign = dict(whole, pieces={"another.weight": whole["pieces"]["0.weight"]})
    other = dict(whole, groups=[*whole["groups"], *whole["groups"]])
    for wrong, why in (
        (torchs, "plain optimizer"),
        (foreign, "does not fit"),
        (other, "same groups"),
        (dict(whole, version=99), "update commhooks"),
        (3, "plain optimizer"),
    ):
        with pytest.raises(CheckpointError, match=why):
            zero.load_state_dict(wrong)  # type: ignore[arg-type]
    foreign_state = everyone(state)[1 - rank]
    with pytest.raises(CheckpointError):
        zero.load_state_dict(foreign_state)
    assert all(map(torch.equal, before, values(model)))


# ---- steps that do not count


@on_ranks(2)
def test_a_step_that_overflows_on_one_rank_changes_nothing_on_any(rank: int) -> None:
    for in_backward, first in ((False, 2), (True, 2), (True, 0)):
        model, zero = compressed(in_backward=in_backward)
        take_steps(model, zero, rank, 0, first)
        before, kept = values(model), copy.deepcopy(zero.state_dict())
        handle = overflow_once(model.module, rank)
        take_steps(model, zero, rank, 2, 1)
        handle.remove()
        assert all(map(torch.equal, before, values(model))), (in_backward, first)
        same_pieces(zero.state_dict()["pieces"], kept["pieces"])
        assert zero.skipped_steps == zero.hook.skipped_steps == 1
        take_steps(model, zero, rank, 3, 1)
        agree(model)
        assert not same(model, model_of())
        assert all(bool(value.isfinite().all()) for value in values(model))


@on_ranks(2)
def test_zero_grad_drops_what_was_accumulated(rank: int) -> None:
    both = both_with("adamw")
    for model, optimizer in both:
        for step in range(3):
            with model.no_sync():
                model(inputs_of(9 + step, rank)).square().mean().backward()
            optimizer.zero_grad()  # a batch that the program has thought better of
            take_steps(model, optimizer, rank, step, 1)
    assert same(both[0][0], both[1][0])


@on_ranks(2)
def test_a_gradient_scaler_sees_the_verdict_of_all_ranks(rank: int) -> None:
    model = wrapped(model_of())
    zero = ZeroOptimizer(model, torch.optim.AdamW, lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        loss = model(inputs_of(step, rank)).square().mean()
        handle = overflow_once(model.module, rank if step == 1 else 0)
        scaler.scale(loss).backward()
        handle.remove()
        scaler.unscale_(zero)
        zero.clip_grad_norm_(1.0)
        scaler.step(zero)
        scaler.update()
        zero.zero_grad()
    agree(model)
    assert scaler.get_scale() == 512.0


@on_ranks(3)
def test_a_gradient_scaler_works_on_ranks_without_shards(rank: int) -> None:
    """Trains fewer entries than a shard has, so that the last ranks have none."""
    torch.manual_seed(0)
    model = wrapped(nn.Linear(3, 2))
    zero = ZeroOptimizer(model, torch.optim.AdamW, lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        loss = model(torch.ones(2, 3)).sum() * (math.inf if step == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(zero)
        scaler.update()
        zero.zero_grad()
    agree(model)
    again = zero.state_dict(gather=True)
    zero.load_state_dict(again)
    assert len(again["pieces"]) == 2
    assert scaler.get_scale() == 512.0
    assert len(zero.state) == (0 if rank else 2)


@on_ranks(2)
def test_a_backward_pass_that_raised_leaves_nothing_behind(rank: int) -> None:
    for in_backward in (False, True):
        plain, ours = (compressed(in_backward=in_backward) for _ in range(2))
        for model, zero in (plain, ours):
            take_steps(model, zero, rank, 0, 2)
            if model is ours[0]:
                # The last layers' buckets are launched before.
                handle = model.module[0].register_forward_hook(lambda *a: Breaks.apply(a[2], True))
                with pytest.raises(ArithmeticError):
                    backward(model, 2, rank)
                handle.remove()
                zero.zero_grad()
            take_steps(model, zero, rank, 2, 2)
        agree(ours[0])
        assert same(plain[0], ours[0]), in_backward


# ---- what is done to gradients and parameters besides


@on_ranks(2)
def test_parameters_that_are_loaded_or_clipped_in_data_hold(rank: int) -> None:
    """Parameters are loaded, or clipped in place, between two steps."""
    other = {f"module.{name}": value * 3 for name, value in model_of().state_dict().items()}
    for gather, most in (("none", 0), ("int8", 1e-3)):
        plain, ours = both_with("sgd", gather=gather)
        for model, optimizer in (plain, ours):
            take_steps(model, optimizer, rank, 0, 1)
            model.load_state_dict(other)
            take_steps(model, optimizer, rank, 1, 1)
        agree(ours[0])
        differ_by(plain[0], ours[0], most)
        for model, optimizer in (plain, ours):
            for step in range(3):
                for parameter in model.parameters():
                    parameter.data.clamp_(-0.05, 0.05)
                take_steps(model, optimizer, rank, step, 1)
        agree(ours[0])
        differ_by(plain[0], ours[0], most)


@on_ranks(2)
def test_gradients_that_the_model_drops_are_dropped(rank: int) -> None:
    """``model.zero_grad()``, also after an overflow, and gradients that are dropped one by one."""
    for in_backward, gather in ((False, "none"), (True, "none"), (True, "int8")):
        plain, ours = both_with("adamw", in_backward=in_backward, gather=gather)
        for model, optimizer in (plain, ours):
            for step in range(5):
                handle = overflow_once(model.module, rank if step == 1 else 0)
                if step == 3 and not in_backward:
                    with model.no_sync():
                        backward(model, 50, rank)
                    backward(model, 51, rank)  # accumulates two averages
                backward(model, step, rank)
                handle.remove()
                if step in (2, 4):
                    model.module[0].weight.grad = None
                if model is ours[0] or step != 1:
                    optimizer.step()
                model.zero_grad()
        assert ours[1].skipped_steps == 1
        agree(ours[0])
        differ_by(plain[0], ours[0], 1e-6 if gather == "none" else 2e-3)


class _Counts(torch.optim.SGD):
    """Divides steps by a count of its calls, as optimizers with schedules of their own do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(group["calls"])
        return super().step(closure)


@on_ranks(2)
def test_gradients_of_one_rank_are_no_step(rank: int) -> None:
    with pytest.raises(RegistrationError, match=r"calls of step\(\)"):
        ZeroOptimizer(wrapped(model_of()), _Counts, lr=1e-2)
    model = wrapped(model_of())
    zero = ZeroOptimizer(model, torch.optim.SGD, lr=1e-2)
    backward(model, 0, rank)
    with model.no_sync():
        backward(model, 1, rank)
    with pytest.raises(RegistrationError, match="was not averaged"):
        zero.step()
    zero.zero_grad()
    with model.hold():
        backward(model, 2, rank)
    with pytest.raises(RegistrationError, match="hold"):
        zero.step()
    model.reduce()
    zero.step()
    zero.zero_grad()
    with pytest.raises(RegistrationError, match="keeps its shards on these ranks"):
        zero.hook.change_group(dist.new_group([0, 1]))
    take_steps(model, zero, rank, 3, 1)
    agree(model)


# ---- refusals


@on_ranks(2)
def test_what_cannot_be_combined_is_refused(rank: int) -> None:
    def refused(why: str, *args: Any, options: Any = None, **settings: Any) -> None:
        model = wrapped(model_of(), **(options or {}))
        with pytest.raises((Error, ValueError), match=why):
            ZeroOptimizer(model, *(args or (torch.optim.AdamW,)), **settings)
        take_steps(model, torch.optim.SGD(model.parameters()), rank, 0, 1)

    refused(r"averages whole buckets.* or PerParameter$", scheme="powersgd")
    refused("does not pack", gather="powersgd")
    refused("would grow", gather=commhooks.make("int4", rounding="stochastic", rotate=False))
    refused("matrix", torch.optim.Adafactor)
    refused("closure", torch.optim.LBFGS)
    refused("Invalid learning rate", lr=-1.0)
    refused("find_unused", in_backward=True, options={"find_unused_parameters": True})
    refused("in two groups", params=model_of().parameters())
    with pytest.raises(RegistrationError, match="writes the mean of all"):
        ZeroOptimizer(nn.parallel.DistributedDataParallel(model_of()), torch.optim.AdamW)
    with pytest.raises(MismatchError, match="lr"):
        ZeroOptimizer(wrapped(model_of()), torch.optim.AdamW, lr=0.1 * (rank + 1))
    hooked = wrapped(model_of())
    commhooks.register(hooked, "int8")
    with pytest.raises(RegistrationError, match="has a hook already"):
        ZeroOptimizer(hooked, torch.optim.AdamW)
    sparse = wrapped(nn.Embedding(9, 4, sparse=True))
    with pytest.raises(RegistrationError, match="sparse gradients"):
        ZeroOptimizer(sparse, torch.optim.AdamW)


@on_ranks(2)
def test_misuse_is_an_error(rank: int) -> None:
    model = wrapped(model_of())
    zero = ZeroOptimizer(model, torch.optim.AdamW, in_backward=True, lr=1e-2)
    zero.step()  # before any backward pass: as other optimizers, nothing
    backward(model, 0, rank)
    for call in (
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: zero.clip_grad_norm_(1.0),
        lambda: zero.state_dict(),
        lambda: zero.add_param_group({"params": []}),
        lambda: backward(model, 1, rank),
    ):
        with pytest.raises(RegistrationError, match="ZeroOptimizer"):
            call()  # type: ignore[no-untyped-call]
    weight = model.module[0].weight
    with torch.no_grad():
        weight.mul_(0.5)
    before = values(model)
    with pytest.raises(RegistrationError, match=r"0\.weight written since backward"):
        zero.step()
    zero.zero_grad()
    assert all(map(torch.equal, before, values(model)))
    backward(model, 0, rank)
    zero.step()
    assert not weight.equal(before[0])
    with pytest.raises(RegistrationError, match="this step was made"):
        zero.step()
    zero.zero_grad()
    zero.hook.switch("int8")
    with pytest.raises(RegistrationError, match="averages whole buckets"):
        zero.hook.switch("powersgd")
    take_steps(model, zero, rank, 1, 1)
    with model.no_sync():
        backward(model, 2, rank)
    with pytest.raises(RegistrationError, match="no_sync"):
        zero.step()
    zero.zero_grad()
    with pytest.raises(RuntimeError, match=r"join: .*ZeroOptimizer"), model.join():
        backward(model, 3, rank)


@on_ranks(2)
def test_a_deleted_optimizer_is_freed_and_missed(rank: int) -> None:
    model = wrapped(model_of())
    zero = ZeroOptimizer(model, torch.optim.AdamW, scheme="int8", gather="int8", lr=1e-2)
    take_steps(model, zero, rank, 0, 2)
    refs = [weakref.ref(model), weakref.ref(zero), weakref.ref(zero.hook)]
    gc.disable()
    hook = zero.hook
    del zero
    assert refs[1]() is None
    backward_raises = pytest.raises(RegistrationError, match="it was deleted")
    with backward_raises:
        backward(model, 2, rank)
    hook.close()
    del hook, model, backward_raises
    gc.enable()
    gc.collect()
    assert [ref() for ref in refs] == [None, None, None]
