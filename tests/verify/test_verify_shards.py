"""``verify`` on FSDP2, between its nodes, and on FSDP1."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import commhooks
from commhooks import Verification
from commhooks.core import Bucket, Scheme
from commhooks.core._bucket import SchemeExchange
from commhooks.core._dense import Dense
from commhooks.errors import VerificationError
from commhooks.wrappers import AveragedFeedback, Guard
from commhooks.wrappers._base import Wrapper
from tests.fsdp.test_fsdp1 import QUIET, unit
from tests.fsdp.test_fsdp2 import backward, equal, model_of, sharded, take_gradients
from tests.tools.harness import on_ranks
from tests.tools.training import everyone, row_of
from tests.verify.test_verify import findings

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
        return unit("FULL_SHARD"), {}
    if host == "fsdp2":
        return sharded(model_of()), {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return sharded(model_of(), mesh["shard"]), {"replicate_group": mesh["replicate"]}


def _not_accused(rank: int, host: str, names: Iterable[str]) -> None:
    schemes = {name: INSIDE[name] for name in names}
    if host == "hsdp":
        schemes["powersgd"] = "powersgd"
    for name, scheme in schemes.items():
        verified, unverified = _model(host), _model(host)
        verify = Verification(2, "raise")
        hook = commhooks.register(verified[0], scheme, verify=verify, **verified[1])
        commhooks.register(unverified[0], scheme, **unverified[1])
        for step in range(5):
            backward(verified[0], step, rank)
            backward(unverified[0], step, rank)
            if host != "fsdp1":
                equal(take_gradients(verified[0]), take_gradients(unverified[0]))
        frame = verify.report()
        assert set(frame["step"]) == {0, 2, 4}
        assert len(frame) == 3 * 6
        assert verify.steps == 3
        assert not verify.findings, name
        hook.close()


@pytest.mark.slow
@on_ranks(3, timeout=120)
def test_no_scheme_is_accused_and_training_is_the_same_bit_for_bit(rank: int) -> None:
    _not_accused(rank, "fsdp2", INSIDE)


@pytest.mark.slow
@pytest.mark.parametrize("host", ["fsdp1", "hsdp"])
@on_ranks(4, ignore_warnings=QUIET, timeout=120)
def test_no_scheme_is_accused_on_other_hosts(rank: int, host: str) -> None:
    _not_accused(rank, host, ("int8", "int4 with feedback", "guard"))


@pytest.mark.parametrize(
    ("scheme", "reduced", "most"),
    [("int8", None, 0.15), ("int8", torch.bfloat16, 0.3), ("topk", None, 0.3)],
)
@on_ranks(3)
def test_error_cosine_and_norm_are_those_of_whole_parameters(
    rank: int, scheme: str, reduced: torch.dtype | None, most: float
) -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=reduced)
    exact, ours = sharded(model_of()), sharded(model_of(), mp_policy=policy)
    hook = commhooks.register(ours, scheme, verify=1)
    backward(exact, 0, rank)
    backward(ours, 0, rank)
    wanted, averages = take_gradients(exact), take_gradients(ours)
    frame = hook.verification.report().set_index("parameter")
    assert sorted(frame.index) == sorted(wanted)
    assert dict(frame["bucket"]) == {name: int(name[0]) // 2 for name in wanted}
    for name, value in wanted.items():
        row, (error, cosine, norm) = frame.loc[name], row_of(averages[name], value)
        assert abs(row["error"] / error - 1) < most
        # What the error has to do with these is small where the error is.
        assert abs(row["cosine"] - cosine) / error < most
        assert abs(row["norm"] / norm - 1) / error < most


@on_ranks(2)
def test_residuals_are_part_of_what_shards_have_to_average(rank: int) -> None:
    """After one is flushed, and where they are larger than gradients."""
    model = sharded(model_of())
    hook = commhooks.register(model, "topk", verify=1)
    for step in range(8):
        if step == 3:
            hook.switch("int8")
        if step == 5:
            hook.switch(commhooks.make("int4", block=64))
        backward(model, step, rank, 0.001 ** max(0, step - 5))
    hook.verification.report()
    assert not hook.verification.findings


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


def _run_four_steps(model: nn.Module, hook: Any, rank: int) -> list[str]:
    """Four steps; returns what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            backward(model, step, rank)
            take_gradients(model)
        hook.verification.report()
    texts = [str(each.message) for each in caught]
    return [text for text in texts if "commhooks:" in text]


@on_ranks(3)
def test_a_shard_that_is_decoded_wrongly_is_named(rank: int) -> None:
    for scheme in (WrongShard(Dense()), commhooks.wrappers.ErrorFeedback(WrongShard(INT4))):
        model = sharded(model_of())
        hook = commhooks.register(model, scheme, verify=2)
        texts = _run_four_steps(model, hook, rank)
        # Modules are buckets, in the order of the model; the last one is reduced first.
        assert findings(hook) == [(2, 2, "4.weight", "error", (1,))]
        if rank == 0:
            assert "step 2, rank 1, bucket 2, parameter '4.weight'" in texts[-1]


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


@on_ranks(4)
def test_with_raise_all_ranks_of_the_mesh_raise_before_the_next_step(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for inside, judged in ((False, False), (True, False), (False, True)):
        model = sharded(model_of(), mesh["shard"])
        # On the ranks of one shard, or of one node, only; the other two have to hear of it.
        place: dict[str, Any] = {} if inside else {"replicate_group": mesh["replicate"]}
        if inside:
            commhooks.register(model, "none", replicate_group=mesh["replicate"])
        scheme = SpoiledOn(Dense(), inside)
        verify = Verification(2, "raise")
        commhooks.register(model, scheme, verify=verify, **place)
        SPOILS.append(mesh.get_local_rank("replicate" if inside else "shard") == 1)
        for step in range(3):
            backward(model, step, rank)
        if judged:  # before, on each rank for itself
            verify.latest(wait=True)
        with pytest.raises(VerificationError) as caught:
            backward(model, 3, rank)
        texts = everyone(str(caught.value))
        assert texts == [texts[0]] * 4
        assert f"step 2, rank {0 if inside else 1}, bucket" in texts[0]


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


def _poisoned(rank: int) -> nn.Sequential:
    model = model_of((33, 65, 7))
    model[1] = _Shift(rank == 1)
    return model


@on_ranks(3)
def test_a_gradient_that_is_not_finite_is_named_with_its_rank(rank: int) -> None:
    model = sharded(_poisoned(rank))
    hook = commhooks.register(model, "int8", verify=Verification(1, "raise"))
    texts = _run_four_steps(model, hook, rank)
    assert [finding[0] for finding in findings(hook)] == [0, 1, 2, 3]
    assert {finding[2:] for finding in findings(hook)} == {("1.by", "not finite", (1,))}
    assert len(texts) == int(rank in (0, 1))


@on_ranks(4)
def test_between_nodes_it_is_named_with_its_shard_and_node(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(_poisoned(rank), mesh["shard"])
    verify = Verification(1, "raise")
    hook = commhooks.register(model, "int8", verify=verify, replicate_group=mesh["replicate"])
    _run_four_steps(model, hook, rank)
    expected = (f"1.by#{rank % 2}", "not finite", (0,))
    assert [finding[2:] for finding in findings(hook)] == [expected] * 4
