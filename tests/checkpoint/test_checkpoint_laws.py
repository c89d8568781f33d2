"""States that no run has saved are refused whole, and leave hook, optimizer and memory alone."""

from __future__ import annotations

import copy
import io
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

import commhooks
from commhooks.local._diloco import VERSION as OUTER_VERSION
from commhooks.local._diloco import add_checksum as add_outer_checksum
from tests.tools.harness import on_ranks
from tests.tools.training import ddp, outcome, same, sealed


def trained(name: str, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = ddp(nn.Linear(64, 64))
    hook = commhooks.register(model, name, **options)
    for _ in range(3):
        model.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
    return model, hook


def memory(state: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    return state["rank0"]["memory"]


def rows(count: int) -> Any:
    return lambda state: memory(state)["powersgd.q"].update(weight=torch.ones(count, 64))


def of(dtype: torch.dtype) -> Any:
    return lambda state: memory(state)["powersgd.q"].update(
        weight=memory(state)["powersgd.q"]["weight"].to(dtype)
    )


def filled(key: str, value: float) -> Any:
    return lambda state: memory(state)[key]["bias"].fill_(value)


def changed(name: str, value: Tensor) -> Any:
    return lambda state: memory(state)["residual"].update({name: value})


HOOK: dict[str, tuple[str, Any]] = {
    "memory is gone": ("topk", lambda s: s["rank0"].update(memory={})),
    "a residual is gone": ("topk", lambda s: memory(s)["residual"].pop("bias")),
    "residuals are gone": ("powersgd", lambda s: memory(s).pop("residual")),
    "factors are gone": ("powersgd", lambda s: memory(s).pop("powersgd.q")),
    "momentum is gone": ("dgc", lambda s: memory(s).pop("dgc.momentum")),
    "scales are NaN": ("sdp4bit", lambda s: memory(s)["averaged_error"]["weight"].fill_(255)),
    "a residual is NaN": ("topk", filled("residual", torch.nan)),
    "a total is infinite": ("onebit_adam", filled("onebit_adam.momentum", torch.inf)),
    "factors of no rank": ("powersgd", rows(0)),
    "factors of 500 rows": ("powersgd", rows(500)),
    "factors are whole": ("powersgd", of(torch.int64)),
    "factors are flags": ("powersgd", of(torch.bool)),
    "a residual of bytes": ("topk", changed("bias", torch.zeros(64).byte())),
    "a parameter that is not": ("topk", changed("x", torch.zeros(64))),
    "a key that is not": ("topk", lambda s: memory(s).update(x={"bias": torch.zeros(64)})),
    "a key of another scheme": ("int8", lambda s: memory(s).update(residual={"x": torch.zeros(1)})),
}  # fmt: skip


@on_ranks(1)
def test_a_state_that_breaks_a_law_is_refused_and_nothing_changes() -> None:
    wrong = []
    for label, (name, change) in HOOK.items():
        options = {"local_size": 1} if name == "sdp4bit" else {}
        _, hook = trained(name, **options)
        before = hook.state_dict()
        state = copy.deepcopy(before)
        state["step"] = 7
        for strict in (True, False):
            hook.load_state_dict(sealed(copy.deepcopy(state)), strict=strict)
            hook.load_state_dict(before)
        change(state)
        error = outcome(hook.load_state_dict, sealed(state))
        if error is None or error[0] != "CheckpointError" or len(error[1]) > 600:
            wrong.append(f"{label}: {error}")
        if not same(hook.state_dict(), before):
            wrong.append(f"{label}: changed")
    assert wrong == []


OUTER: dict[str, Any] = {
    "outer is NaN": lambda s: s["outer"]["0.weight"].fill_(torch.nan),
    "momentum is infinite": lambda s: s["momentum"]["0.weight"].fill_(torch.inf),
    "outer is broadcast": lambda s: s["outer"].update({"0.weight": torch.ones(1)}),
    "outer of another shape": lambda s: (
        s["hook"].update(step=5),
        sealed(s["hook"]),
        s["outer"].update({"1.weight": torch.ones(5, 5)}),
    ),
    "outer is whole": lambda s: s["outer"].update({"0.bias": torch.ones(16).long()}),
    "outer is sparse": lambda s: s["outer"].update({"0.bias": torch.ones(16).to_sparse()}),
    "outer is no tensor": lambda s: s["outer"].update({"0.bias": 3}),
    "a parameter is gone": lambda s: s["outer"].pop("0.bias"),
    "steps in words": lambda s: s.update(steps="7"),
    "negative steps": lambda s: s.update(steps=-5),
    "steps that are true": lambda s: s.update(outer_steps=True),
    "an arriving mean of a wrong size": lambda s: s["arriving"][0].update(mean=torch.ones(3)),
    "an arriving mean that is none": lambda s: s["arriving"][0].update(mean=None),
    "an arriving fragment that is not": lambda s: s["arriving"][0].update(fragment=9),
    "an arriving fragment in words": lambda s: s["arriving"][0].update(fragment="0"),
    "a fragment twice": lambda s: s["arriving"].append(s["arriving"][0]),
    "steps left in words": lambda s: s["arriving"][0].update(left="1"),
    "too many steps left": lambda s: s["arriving"][0].update(left=100),
    "what arrives is no list": lambda s: s.update(arriving={}),
    "what arrives is nothing": lambda s: s["arriving"].append(None),
    "a damaged hook": lambda s: s["hook"].update(step=6),
    "no hook": lambda s: s.update(hook=None),
    **{
        f"no {field}": lambda s, value=field: s.pop(value)
        for field in ("hook", "arriving", "steps", "outer")
    },
}
UNSEALED: dict[str, Any] = {
    "a changed value": lambda s: s["outer"]["0.weight"].add_(1),
    "a changed step": lambda s: s.update(steps=1),
    "a changed count": lambda s: s["arriving"][0].update(left=1),
    "a changed mean": lambda s: s["arriving"][0]["mean"].add_(1),
    "no checksum": lambda s: s.pop("checksum"),
    "an older version": lambda s: s.update(version=1),
    "a newer version": lambda s: s.update(version=OUTER_VERSION + 1),
    "a version that is true": lambda s: s.update(version=True),
}


def _outer() -> commhooks.DiLoCo:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    outer = commhooks.DiLoCo(model, "topk", every=8, delay=3, lr=0.5)
    for parameter in model.parameters():
        parameter.data += 0.1
    for _ in range(9):
        outer.step()
    return outer


@on_ranks(1)
def test_a_damaged_diloco_state_is_refused_and_nothing_changes() -> None:
    outer, wrong = _outer(), []
    before = outer.state_dict()
    if not before["arriving"]:
        wrong.append("nothing arrives")
    for label, change in {**OUTER, **UNSEALED}.items():
        state = copy.deepcopy(before)
        change(state)
        if label in OUTER:
            with suppress(AttributeError, KeyError, TypeError, RuntimeError):
                state = add_outer_checksum(state)  # where a checksum can be of it
        error = outcome(outer.load_state_dict, state)
        if error is None or error[0] != "CheckpointError":
            wrong.append(f"{label}: {error}")
        if not same(outer.state_dict(), before):
            wrong.append(f"{label}: changed")
    first = {key: value for key, value in before.items() if key not in ("version", "checksum")}
    for good in (before, first):
        again = _outer()
        again.steps = 99
        again.load_state_dict(good)
        if not same(again.state_dict(), before):
            wrong.append("a good state was not taken up")
    assert wrong == []


# ---- pickled states


@on_ranks(2)
def test_a_pickled_hook_state_goes_on_on_its_own_rank_only(rank: int) -> None:
    model, hook = trained("powersgd", rank=2)
    file = io.BytesIO()
    torch.save({"state": hook}, file)
    file.seek(0)
    loaded = torch.load(file)  # weights_only, torch's default
    again = ddp(nn.Linear(64, 64))
    again.load_state_dict(model.state_dict())
    again.register_comm_hook(loaded["state"], commhooks.comm_hook)
    for value in (model, again):
        value.zero_grad()
        torch.manual_seed(rank)
        value(torch.randn(4, 64)).square().mean().backward()
    equal = torch.equal(model.module.weight.grad, again.module.weight.grad)
    states: list[Any] = [copy.deepcopy(hook)]
    torch.distributed.broadcast_object_list(states, src=0)
    fresh = ddp(nn.Linear(64, 64))
    fresh.register_comm_hook(states[0], commhooks.comm_hook)
    error = outcome(fresh(torch.randn(4, 64)).square().mean().backward)
    assert equal
    assert loaded["state"].scheme == hook.scheme
    assert "rank 0 of 2" in error[1]
