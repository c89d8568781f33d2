"""``verify`` on FSDP2, between its nodes, and on FSDP1."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import commhooks
from commhooks import Verification
from commhooks.core import Bucket, Scheme
from commhooks.core._bucket import SchemeExchange
from commhooks.core._dense import Dense
from commhooks.errors import VerificationError
from commhooks.wrappers import AveragedFeedback, Guard
from commhooks.wrappers._base import Wrapper
from tests.fsdp.test_fsdp1 import QUIET, _unit
from tests.fsdp.test_fsdp2 import backward, gradients, model_of, sharded
from tests.tools.harness import run_ranks
from tests.tools.training import row_of

INT4 = commhooks.make("int4", block=64, error_feedback=False)
INSIDE: dict[str, Any] = {
    "none": "none",
    "bf16": "bf16",
    "int8": "int8",
    "int4 with feedback": commhooks.make("int4", block=64),
    "int4, 8-bit feedback": AveragedFeedback(INT4),
    "guard": Guard(Dense(), every=2),
    "onebit": commhooks.make("onebit", block=64),
    "topk": "topk",
    "eden": "eden",
}


def _model(host: str) -> tuple[nn.Module, dict[str, Any]]:
    if host == "fsdp1":
        return _unit("FULL_SHARD"), {}
    if host == "fsdp2":
        return sharded(model_of()), {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return sharded(model_of(), mesh["shard"]), {"replicate_group": mesh["replicate"]}


def _accused(rank: int, world_size: int, host: str, few: bool) -> list[str]:
    found = []
    schemes = INSIDE
    if few:
        schemes = {name: INSIDE[name] for name in ("int8", "int4 with feedback", "guard")}
    if host == "hsdp":
        schemes = {**schemes, "powersgd": "powersgd"}
    for name, scheme in schemes.items():
        verified, unverified = _model(host), _model(host)
        hook = commhooks.register(
            verified[0],
            scheme,
            verify=Verification(2, "raise"),
            **verified[1],
        )
        commhooks.register(unverified[0], scheme, **unverified[1])
        for step in range(5):
            backward(verified[0], step, rank)
            backward(unverified[0], step, rank)
            if host != "fsdp1":
                one, other = gradients(verified[0]), gradients(unverified[0])
                assert all(torch.equal(one[key], value) for key, value in other.items())
        assert hook.verification is not None
        frame = hook.verification.report()
        assert set(frame["step"]) == {0, 2, 4}
        assert len(frame) == 3 * 6
        assert hook.verification.steps == 3
        found += [f"{name}: {one}" for one in hook.verification.findings]
        hook.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "ranks", "few"),
    [
        ("fsdp2", 3, False),
        ("fsdp1", 2, True),
        ("hsdp", 4, True),
    ],
)
def test_no_scheme_is_accused_and_training_is_the_same_bit_for_bit(
    host: str, ranks: int, few: bool
) -> None:
    quiet = QUIET if host == "fsdp1" else ()
    assert run_ranks(_accused, ranks, host, few, ignore_warnings=quiet, timeout=120)[0] == []


def _numbers(rank: int, world_size: int, scheme: str, reduced: torch.dtype | None) -> list[float]:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(reduce_dtype=reduced)
    exact, ours = sharded(model_of()), sharded(model_of(), mp_policy=policy)
    hook = commhooks.register(ours, scheme, verify=1)
    backward(exact, 0, rank)
    backward(ours, 0, rank)
    wanted, found = gradients(exact), gradients(ours)
    assert hook.verification is not None
    frame = hook.verification.report().set_index("parameter")
    assert sorted(frame.index) == sorted(wanted)
    assert dict(frame["bucket"]) == {name: int(name[0]) // 2 for name in wanted}
    away = []
    for name, value in wanted.items():
        row, (error, cosine, norm) = frame.loc[name], row_of(found[name], value)
        away += [
            abs(row["error"] / error - 1),
            # What the error has to do with these is small where the error is.
            abs(row["cosine"] - cosine) / error,
            abs(row["norm"] / norm - 1) / error,
        ]
    return away


@pytest.mark.parametrize(
    ("scheme", "reduced", "most"),
    [("int8", None, 0.15), ("int8", torch.bfloat16, 0.3), ("topk", None, 0.3)],
)
def test_error_cosine_and_norm_are_those_of_whole_parameters(
    scheme: str, reduced: torch.dtype | None, most: float
) -> None:
    assert max(run_ranks(_numbers, 3, scheme, reduced)[0]) < most


def _accused_after(rank: int, world_size: int) -> list[str]:
    """Findings after a residual is flushed, and where residuals are larger than gradients."""
    model = sharded(model_of())
    hook = commhooks.register(model, "topk", verify=1)
    for step in range(8):
        if step == 3:
            hook.switch("int8")
        if step == 5:
            hook.switch(commhooks.make("int4", block=64))
        backward(model, step, rank, 0.001 ** max(0, step - 5))
    assert hook.verification is not None
    hook.verification.report()
    return [str(one) for one in hook.verification.findings]


def test_residuals_are_part_of_what_shards_have_to_average() -> None:
    assert run_ranks(_accused_after, 2)[0] == []


def _lagging(rank: int, world_size: int) -> list[Any]:
    """Rows of steps whose gradients shrink, so that feedback sends many times the dense mean."""
    ours, plain = sharded(model_of((96, 96, 96))), sharded(model_of((96, 96, 96)))
    hook = commhooks.register(ours, "topk", ratio=0.01, verify=1)
    rows = {}
    for step in range(24):
        for model in (ours, plain):
            torch.manual_seed(10 * step + rank)
            model.zero_grad()
            (model(torch.randn(4, 96)).square().mean() * (1.0 if step < 15 else 0.1)).backward()
        found, means = gradients(ours), gradients(plain)
        rows |= {(step, name): row_of(found[name], mean) for name, mean in means.items()}
    assert hook.verification is not None
    frame = hook.verification.report()
    weights = frame[frame["parameter"].str.contains("weight")]
    exact = [rows[key] for key in zip(weights["step"], weights["parameter"], strict=True)]
    return [weights[["error", "cosine", "norm"]].to_numpy(), np.array(exact)]


def test_errors_many_times_the_dense_mean_are_told_as_well() -> None:
    ((sketch, exact), _) = run_ranks(_lagging, 2)
    assert float(exact[:, 0].max()) > 3
    # Pieces of half a matrix have sketches of 61 numbers.
    off = np.abs(sketch / exact - 1)
    assert float(off[:, [0, 2]].max()) < 4 * 2**0.5 * (2 * 2 * 61) ** -0.5
    assert float(np.nanmax(np.abs(sketch[:, 1] - exact[:, 1]))) < 0.25


@dataclass(frozen=True)
class WrongShard(Wrapper):
    """Spoils what one rank decodes of its shard of one parameter, in step 2 and later."""

    scheme: Scheme
    parameter: str = "4.weight"
    on: int = 1

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        result = yield from self.scheme.exchange(bucket)
        names, layout = bucket.layout.names, bucket.layout
        name = f"{self.parameter}#{self.on}"
        if bucket.step >= 2 and bucket.rank == self.on and name in names:
            begin = layout.offsets[names.index(name)] - bucket.shards[bucket.rank][0]
            result.mean[begin : begin + 65].mul_(2.0)
        return result


def _train(model: nn.Module, hook: Any, rank: int) -> tuple[list[Any], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            backward(model, step, rank)
            gradients(model)
        hook.verification.report()
    texts = [str(one.message) for one in caught if "commhooks:" in str(one.message)]
    return [one[:5] for one in hook.verification.findings], texts


def _planted(rank: int, world_size: int, inside: Scheme) -> tuple[list[Any], list[str]]:
    model = sharded(model_of())
    hook = commhooks.register(model, inside, verify=2)
    return _train(model, hook, rank)


@pytest.mark.parametrize(
    "scheme",
    [WrongShard(Dense()), commhooks.wrappers.ErrorFeedback(WrongShard(INT4))],
    ids=["dense", "feedback"],
)
def test_a_shard_that_is_decoded_wrongly_is_named(scheme: Scheme) -> None:
    ranks = run_ranks(_planted, 3, scheme)
    found, texts = ranks[0]
    # Modules are buckets, in the order of the model; the last one is reduced first.
    assert found == [(2, 2, "4.weight", "error", (1,))]
    assert all(one[0] == found for one in ranks)
    assert "step 2, rank 1, bucket 2, parameter '4.weight'" in texts[-1]


def _raises(rank: int, world_size: int, inside: bool) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(model_of(), mesh["shard"])
    # On the ranks of one shard, or of one node, only; the other two have to hear of it.
    place: dict[str, Any] = {} if inside else {"replicate_group": mesh["replicate"]}
    if inside:
        commhooks.register(model, "none", replicate_group=mesh["replicate"])
    unusable = mesh.get_local_rank("replicate" if inside else "shard") == 1
    scheme = SpoiledOn(Dense(), inside)
    commhooks.register(model, scheme, verify=Verification(2, "raise"), **place)
    SPOILS.append(unusable)
    try:
        for step in range(4):
            backward(model, step, rank)
    except VerificationError as error:
        return str(error)
    return ""


SPOILS: list[bool] = []  # of this process


@dataclass(frozen=True)
class SpoiledOn(Wrapper):
    """Spoils the mean of rank 0 in some groups of ranks, in step 2; equal on all of them."""

    scheme: Scheme
    inside: bool

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        result = yield from self.scheme.exchange(bucket)
        if SPOILS[-1] and bucket.step == 2 and bucket.rank == 0:
            result.mean.mul_(1.5)
        return result


@pytest.mark.parametrize("inside", [False, True])
def test_with_raise_all_ranks_of_the_mesh_raise_before_the_next_step(inside: bool) -> None:
    texts = run_ranks(_raises, 4, inside)
    named = "step 2, rank 0, bucket" if inside else "step 2, rank 1, bucket"
    assert all(named in text for text in texts)
    assert len(set(texts)) == 1


class _Poison(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * torch.nan


class _Shift(nn.Module):
    """Adds a parameter, whose gradient alone is not finite on one rank."""

    def __init__(self, poisoned: bool) -> None:
        super().__init__()
        self.by, self.poisoned = nn.Parameter(torch.zeros(65)), poisoned

    def forward(self, x: Tensor) -> Tensor:
        return x + (_Poison.apply(self.by) if self.poisoned else self.by)


def _nan(rank: int, world_size: int, host: str) -> tuple[list[Any], list[str]]:
    model, place = model_of((33, 65, 7)), {}
    model[1] = _Shift(rank == 1)
    mesh = None
    if host == "hsdp":
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        mesh, place = both["shard"], {"replicate_group": both["replicate"]}
    sharded(model, mesh)
    hook = commhooks.register(model, "int8", verify=Verification(1, "raise"), **place)
    return _train(model, hook, rank)


def test_a_gradient_that_is_not_finite_is_named_with_its_rank() -> None:
    for rank, (found, texts) in enumerate(run_ranks(_nan, 3, "fsdp2")):
        assert [one[0] for one in found] == [0, 1, 2, 3]
        assert all(one[2:] == ("1.by", "not finite", (1,)) for one in found)
        assert len(texts) == int(rank in (0, 1))


def test_between_nodes_it_is_named_with_its_shard_and_node() -> None:
    for rank, (found, _) in enumerate(run_ranks(_nan, 4, "hsdp")):
        assert all(one[2:] == (f"1.by#{rank % 2}", "not finite", (0,)) for one in found)
        assert len(found) == 4
