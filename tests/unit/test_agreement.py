"""What a scheme must not round beside tensor parallelism."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commhooks.core.scheme import Scheme
from commhooks.hook.agreement import not_to_round
from commhooks.wrappers import EF21, Cast, Coalesced, Guard, PerParameter, Rule, Schedule
from commhooks.wrappers.make import make

PARAMETERS = SimpleNamespace(
    placement={"weight": "piece 0 of 2 along dimension 0"},
    shapes={"weight": torch.Size([4, 3]), "norm": torch.Size([3])},
)
BINDING: Any = SimpleNamespace(parameters=PARAMETERS)
TOPK = make("topk")  # with feedback, which makes it exact over steps


@pytest.mark.parametrize(
    "scheme",
    [
        *(TOPK, Guard(TOPK), Cast(TOPK), Coalesced(TOPK), Schedule(((0, make("none")), (9, TOPK)))),
        EF21(make("topk", error_feedback=False)),
        PerParameter([Rule(TOPK, name="w*")], default=make("onebit")),
        make("bf16", stochastic=True),
    ],
    ids=lambda scheme: type(scheme).__name__,
)
def test_what_is_rounded_inside_any_wrapper_leaves_out_what_is_not_cut(scheme: Scheme) -> None:
    assert not_to_round(scheme, BINDING) == {"norm"}


@pytest.mark.parametrize("name", ["none", "bf16", "fp16", "gossip", "noop"])
def test_what_rounds_each_entry_alone_leaves_nothing_out(name: str) -> None:
    rules = PerParameter([Rule(make("none"), max_dim=1)], default=make(name))
    for scheme in (make(name), rules):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not not_to_round(scheme, BINDING)


@pytest.mark.parametrize("name", ["signsgd", "onebit_adam", "demo", "dgc"])
def test_what_returns_no_mean_is_told(name: str) -> None:
    with pytest.warns(RuntimeWarning, match=r"rounds the gradients of norm \(1 parameters"):
        assert not not_to_round(make(name), BINDING)
