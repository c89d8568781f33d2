"""Errors and warnings name the scheme as users type it, its costs, and what to type instead."""

import json
import logging
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks import ErrorFeedback, HookState, PerParameter, Rule, Schedule, make
from commhooks.errors import CheckpointError, OptionError, UnknownSchemeError
from commhooks.research.conformance import LAWS
from commhooks.schemes import Blockwise, PowerSGD, SignSGD, TopK
from commhooks.wrappers import Coalesced, DelayedStart, PeriodicDense
from commhooks.wrappers._make import as_typed, short_repr
from ddp_core.exchange._errors import raised_in
from tests.unit.one_rank import layers, run_steps

# ---- a scheme as it is typed

TYPED: list[tuple[commhooks.Scheme, str]] = [
    (make("powersgd"), "powersgd"),
    (ErrorFeedback(PowerSGD(rank=2)), "powersgd, rank=2"),
    (make("powersgd", rank=2, start_step=9), "powersgd, rank=2, start_step=9"),
    (
        make("powersgd", wire_dtype="fp16", coalesce=True),
        "powersgd, coalesce=True, wire_dtype='fp16'",
    ),
    (make("bf16", start_step=10), "bf16, start_step=10"),
    (make("int4", rounding="stochastic"), "int4, rounding='stochastic'"),
    (make("fp8", format="mx_e4m3"), "fp8, format='mx_e4m3'"),
    (make("int8", error_feedback=True), "int8, error_feedback=True"),
    (TopK(ratio=0.1), "topk, ratio=0.1, error_feedback=False"),
    (Blockwise("int2"), "Blockwise(format='int2')"),
    (PeriodicDense(make("onebit"), every=50), "PeriodicDense(onebit, every=50)"),
    (
        PeriodicDense(make("onebit", block=64), every=50),
        "PeriodicDense(ErrorFeedback(Blockwise(format='sign', block=64)), every=50)",
    ),
    (DelayedStart(make("topk"), 5, make("int8")), "DelayedStart(topk, start_step=5, before=int8)"),
]


@pytest.mark.parametrize(("scheme", "text"), TYPED, ids=[text for _, text in TYPED])
def test_a_scheme_is_printed_as_it_is_typed(scheme: commhooks.Scheme, text: str) -> None:
    assert short_repr(scheme) == text


@pytest.mark.parametrize(
    "text", ["", "(", "(" * 900, "x" * 2000, "PowerSGD(rank=2", "int8(block=1)"]
)
def test_a_text_that_is_no_description_is_shown_as_it_is(text: str) -> None:
    assert as_typed(text) == text


@pytest.mark.usefixtures("one_rank")
def test_summary_and_errors_name_the_scheme_as_typed() -> None:
    model = DistributedDataParallel(layers())
    hook = commhooks.register(model, "powersgd", rank=1, start_step=1)
    run_steps(model, steps=2)
    assert hook.summary().startswith("powersgd, rank=1, start_step=1 on 1 rank, steps 0 to 1")
    other = HookState("int4", layers())
    with pytest.raises(
        CheckpointError, match="saved by 'powersgd, rank=1, start_step=1', this hook runs 'int4'"
    ):
        other.load_state_dict(hook.state_dict())


# ---- names and options of other libraries


@pytest.mark.parametrize("name", ["fp32", "FLOAT32", "off", "dense", "disabled", "uncompressed"])
def test_names_for_no_compression_lead_to_none(name: str) -> None:
    with pytest.raises(UnknownSchemeError, match=rf"no scheme '{name}'; 'none' is the float32 all"):
        make(name)


@pytest.mark.parametrize(("name", "bits", "other"), [("int8", 4, "int4"), ("int4", "8", "int8")])
def test_a_number_of_bits_leads_to_the_scheme_of_that_many(
    name: str, bits: Any, other: str
) -> None:
    with pytest.raises(OptionError, match=rf"no option 'bits': '{other}' is a scheme of its own"):
        make(name, bits=bits)


# ---- calls that lack something


def test_switch_without_a_scheme_asks_for_it() -> None:
    hook = HookState("powersgd", layers(), rank=1)
    with pytest.raises(TypeError, match=r"give the scheme again, as in switch\('powersgd', rank=2"):
        hook.switch(rank=2)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'scheme'"):
        hook.switch()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("call", "advice"),
    [
        (lambda hook: commhooks.make("powersgd:rank=2"), r'as in "powersgd", rank=2'),
        (lambda hook: commhooks.make("topk", ratio=10), r"10 % are ratio=0\.1"),
        (lambda hook: commhooks.make("powersgd", start_step=0.1), "number of steps, such as 1000"),
        (lambda hook: commhooks.make("powersgd", start_step=...), "number of steps, such as 1000"),
        (lambda hook: commhooks.make(PowerSGDState), "torch's PowerSGDState, whose settings are"),
        (lambda hook: commhooks.register("int8", hook), "the model comes first"),
        (lambda hook: commhooks.register(DistributedDataParallel, "int8"), "got the class Distr"),
        (lambda hook: hook.load_state_dict("hook.pt"), r"torch\.load\(path\)"),
        (lambda hook: hook.load_state_dict(None), "has hook.state_dict.* been saved"),
        (lambda hook: hook.load_state_dict(hook), "call its state_dict"),
        (lambda hook: hook.load_state_dict([]), "give those of all ranks"),
        (lambda hook: hook.load_state_dict(hook.state_dict(), strict="no"), "True or False"),
    ],
)
def test_a_wrong_argument_is_answered_with_the_right_one(
    call: Callable[[HookState], object], advice: str
) -> None:
    hook = commhooks.register(DistributedDataParallel(layers()), "int8")
    with pytest.raises((TypeError, ValueError, RuntimeError), match=advice):
        call(hook)


@pytest.mark.usefixtures("one_rank")
def test_a_state_is_loaded_after_register() -> None:
    model = DistributedDataParallel(layers())
    state = commhooks.register(model, "topk", ratio=0.1).state_dict()
    hook = HookState("topk", ratio=0.1)
    with pytest.raises(CheckpointError, match=r"this hook has no model yet.*: register first"):
        hook.load_state_dict(state)


@pytest.mark.usefixtures("one_rank")
def test_a_switch_between_forward_and_backward_counts_for_this_step() -> None:
    model = DistributedDataParallel(layers())
    hook = commhooks.register(model, "none")
    loss = model(torch.ones(2, 8)).sum()
    hook.switch("int8")
    loss.backward()
    assert hook.summary().startswith("int8 on 1 rank, step 0: ")


# ---- costs and dangers

DANGERS: list[tuple[str, Callable[[], Any], str]] = [
    ("object", lambda: TopK(ratio=0.01), r"TopK is biased .* use ErrorFeedback\(TopK\(...\)\)"),
    ("delayed", lambda: DelayedStart(PowerSGD(rank=2), 5), "PowerSGD is biased"),
    (
        "rule",
        lambda: PerParameter([Rule(make("topk"), max_dim=1)], Coalesced(Blockwise("int4"))),
        "Blockwise is biased",
    ),
    ("later", lambda: Schedule([(0, make("none")), (5, TopK())]), "TopK is biased"),
    ("ratio", lambda: ErrorFeedback(TopK(ratio=1)), r"TopK\(ratio=1\) would send more than"),
]


@pytest.mark.parametrize(("scheme", "words"), [d[1:] for d in DANGERS], ids=[d[0] for d in DANGERS])
def test_a_danger_warns_once_when_the_scheme_gets_a_model(
    scheme: Callable[[], Any], words: str
) -> None:
    with pytest.warns(RuntimeWarning, match=words) as caught:
        HookState(scheme(), nn.Linear(4, 4))
    assert [Path(warning.filename).name for warning in caught] == ["test_advice.py"]
    hook = HookState("none", nn.Linear(4, 4))
    with pytest.warns(RuntimeWarning, match=words):
        hook.switch(scheme())


def test_what_is_meant_or_harmless_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        HookState(TopK(ratio=0.01), nn.Linear(4, 4), error_feedback=False)
        HookState(TopK(ratio=0.01), nn.Linear(4, 4), error_feedback=True)
        HookState(make("topk", error_feedback=False), nn.Linear(4, 4))
        HookState(Coalesced(make("int4", error_feedback=False)), nn.Linear(4, 4))
        HookState(ErrorFeedback(PowerSGD()), nn.Linear(4, 4))
        HookState(SignSGD(), nn.Linear(4, 4))  # returns an update, which has no error
        HookState("topk", nn.Linear(4, 4))


@pytest.mark.parametrize("name", ["topk", "random_k"])
def test_the_cost_of_sending_few_entries_is_said_once_where_logging_is_not_set_up(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging, "lastResort", logging.StreamHandler(sys.stderr))
    for local_rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        for scheme in ("int8", "powersgd", name):
            HookState(scheme, nn.Linear(4, 4))
    printed = capfd.readouterr().err
    assert printed.count("(ratio=0.01) sends each entry every 100 steps on average") == 1


# ---- checks of a scheme


def test_every_check_names_a_heading_of_the_guide() -> None:
    guide = Path(__file__).parents[2] / "docs" / "guides" / "new-scheme.md"
    headings = set(re.findall(r"^## (.*)$", guide.read_text(encoding="utf-8"), re.MULTILINE))
    assert {law.guide for law in LAWS.values()} <= headings


def test_a_class_of_a_user_with_a_name_of_ours_is_printed_as_it_is() -> None:
    for text in ("Cast(none)", "DelayedStart(scheme=Dense())"):
        assert as_typed(text) == text


def _decode(kind: str) -> object:
    calls: dict[str, Callable[[], object]] = {
        "numpy": lambda: np.zeros((2, 3)).reshape(7),
        "torch": lambda: torch.zeros(2).view(3),
        "json": lambda: json.loads("{"),
    }
    return calls[kind]()


@pytest.mark.parametrize("kind", ["numpy", "torch", "json"])
def test_the_line_of_an_error_is_that_of_the_user(kind: str) -> None:
    with pytest.raises((ValueError, RuntimeError)) as raised:
        _decode(kind)
    assert re.fullmatch(r"test_advice\.py:\d+ in <lambda>", raised_in(raised.value))
