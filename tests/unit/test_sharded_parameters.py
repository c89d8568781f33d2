"""Parameters in pieces: what is saved by parameter, and what no scheme may round beside them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commhooks.checkpoint._placement import ShardSpec
from commhooks.core._names import padding_name
from commhooks.core._scheme import Scheme
from commhooks.hook._engine import replicated_parameters
from commhooks.hook._parameters import Parameter
from commhooks.hook._sharded import FlatParameters, ShardedParameter, ShardedParameters
from commhooks.wrappers import (
    EF21,
    Cast,
    Coalesced,
    DelayedStart,
    Guard,
    PeriodicDense,
    PerParameter,
    Rule,
    Schedule,
)
from commhooks.wrappers._make import make


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("before", [1, 2, 3, 4, 7])
def test_padding_stays_with_as_many_ranks_and_is_left_out_on_others(
    before: int, ranks: int
) -> None:
    parameter = ShardedParameter("weight", torch.Size([5, 2]), torch.float32, 0, True)
    saving, loading = (ShardedParameters([parameter], number) for number in (before, ranks))
    size = -(-5 // before)
    whole = torch.arange(1.0, 2 * size * before + 1).view(-1, 2)
    names = ["weight"] if before == 1 else [f"weight#{rank}" for rank in range(before)]
    saved = saving.to_checkpoint_layout(dict(zip(names, whole.split(size), strict=True)))
    kept = torch.cat(list(loading.to_bucket_layout(saved).values()))
    assert torch.equal(kept[:5], whole[:5])
    if before == ranks:
        assert torch.equal(kept, whole)
    elif len(kept) != len(whole):
        assert not kept[5:].any()


@pytest.mark.parametrize("ranks", [2, 3])
def test_padding_of_a_unit_stays_with_as_many_ranks_only(ranks: int) -> None:
    def unit(padding: int) -> FlatParameters:
        pieces = [("bias", 5), (padding_name("end"), padding)]
        return FlatParameters(
            [[(Parameter(name, torch.Size([n]), torch.float32, (0,)), True) for name, n in pieces]]
        )

    saved = unit(1).to_checkpoint_layout(
        {"bias": torch.ones(5), padding_name("end"): torch.ones(1)}
    )
    kept = unit(-5 % ranks).to_bucket_layout(saved)
    assert torch.equal(kept["bias"], torch.ones(5))
    assert torch.equal(kept[padding_name("end")], torch.ones(1))  # of 2 and 3 ranks alike
    assert torch.equal(unit(3).to_bucket_layout(saved)[padding_name("end")], torch.zeros(3))


PARAMETERS: Any = SimpleNamespace(
    cuts={"weight": ShardSpec("piece 0 of 2 along dimension 0", frozenset([(0, 1)]))},
    shapes={"weight": torch.Size([4, 3]), "norm": torch.Size([3])},
)
TOPK = make("topk")  # with feedback, which makes it exact over steps


@pytest.mark.parametrize(
    "scheme",
    [
        *(TOPK, Guard(TOPK), Cast(TOPK), Coalesced(TOPK), Schedule(((0, make("none")), (9, TOPK)))),
        EF21(make("topk", error_feedback=False)),
        PerParameter([Rule(TOPK, name="w*")], default=make("onebit")),
        *(make("bf16", stochastic=True), DelayedStart(TOPK, 3), PeriodicDense(TOPK, 3)),
        Guard(make("bf16")),  # it judges whole buckets
    ],
    ids=lambda scheme: type(scheme).__name__,
)
def test_what_is_rounded_inside_any_wrapper_leaves_out_what_is_not_cut(scheme: Scheme) -> None:
    assert replicated_parameters(scheme, PARAMETERS) == {"norm"}


@pytest.mark.parametrize("name", ["none", "bf16", "fp16", "gossip", "noop"])
def test_what_rounds_each_entry_alone_leaves_nothing_out(name: str) -> None:
    rules = PerParameter([Rule(make("none"), max_dim=1)], default=make(name))
    bare = make(name)
    wrapped = (
        (DelayedStart(bare, 3), PeriodicDense(bare, 3)) if bare.traits.returns == "mean" else ()
    )
    for scheme in (bare, rules, *wrapped):
        assert not replicated_parameters(scheme, PARAMETERS)


@pytest.mark.parametrize("name", ["signsgd", "onebit_adam", "demo", "dgc"])
def test_updates_are_no_rounded_means(name: str) -> None:
    assert replicated_parameters(make(name), PARAMETERS) == {"norm"}


def test_a_parameter_is_shared_along_each_dimension_that_does_not_cut_it() -> None:
    first, other = (0, 1), (0, 2)
    cuts = {
        "both": ShardSpec("", frozenset([first, other])),
        "first": ShardSpec("", frozenset([first])),
        "second#1": ShardSpec("", frozenset([other])),
    }
    names = [*cuts, "neither", "end#padding"]
    cuts["second"] = cuts.pop("second#1")
    parameters: Any = SimpleNamespace(cuts=cuts, shapes=dict.fromkeys(names))
    assert replicated_parameters(TOPK, parameters) == {"first", "second#1", "neither"}
    del cuts["both"], cuts["second"]
    parameters.shapes = {"first": None}
    assert not replicated_parameters(TOPK, parameters)
