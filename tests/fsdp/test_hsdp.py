"""Schemes between nodes of FSDP2 (HSDP): the verdict of a step over the mesh, and saved states."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import commhooks
from commhooks.errors import MismatchError, RegistrationError
from commhooks.wrappers import _cast as _cast
from tests.fsdp.test_fsdp2 import backward, model_of, sharded, take_gradients
from tests.tools.harness import on_ranks

INT4 = {"block": 64}


def mesh_of(replicas: int, shards: int) -> Any:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def residuals(hook: commhooks.HookState) -> dict[str, Tensor]:
    (part,) = [value for key, value in hook.state_dict().items() if key.startswith("rank")]
    return copy.deepcopy(part["memory"]["residual"])


# ---- the verdict


@on_ranks(4)
@mock.patch.object(_cast, "_warned_of_overflow", True)
def test_a_step_that_overflows_between_nodes_changes_no_residual_within_them() -> None:
    """The means within nodes fit 16 bits, their payload between nodes does not."""
    mesh = mesh_of(2, 2)
    model = sharded(model_of((257, 6)), mesh["shard"])
    inside = commhooks.register(model, "int4", **INT4)
    between = commhooks.register(model, "fp16", replicate_group=mesh["replicate"])
    for step, scale in enumerate((1.0, 1e6)):
        before = residuals(inside)
        weight = torch.ones(6)
        weight[-1] = scale
        (model(torch.rand(8, 257) + 1) * weight).sum().backward()
        take_gradients(model)
        same = [torch.equal(value, before[name]) for name, value in residuals(inside).items()]
        assert all(same) == (step == 1)
    # What the hook between nodes averages has the draws of the other in it.
    assert inside.engine.seed != between.engine.seed


@on_ranks(4)
def test_what_a_loss_scaler_skips_the_hook_skips_on_every_rank(rank: int) -> None:
    mesh = mesh_of(2, 2)
    model = sharded(model_of((257, 6)), mesh["shard"])
    hook = commhooks.register(model, "int4", replicate_group=mesh["replicate"], **INT4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100, backoff_factor=2.0**-90)
    for step in range(3):
        optimizer.zero_grad()
        # The last rows are of the second shard, and as large as float32 allows.
        weight = torch.ones(6)
        weight[-1] = 2.0**28
        loss = (model(torch.ones(8, 257) + step) * weight).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**10
        assert hook.skipped_steps == 1


@on_ranks(4)
def test_shards_with_other_options_raise_an_error(rank: int) -> None:
    mesh = mesh_of(2, 2)
    model = sharded(model_of((257, 6)), mesh["shard"])
    block = 64 if mesh["shard"].get_local_rank() == 0 else 128
    with pytest.raises(MismatchError, match="scheme and options differ between"):
        commhooks.register(model, "int4", replicate_group=mesh["replicate"], block=block)
    if rank == 3:  # its replica finds out, and the two others hear of it
        block = 256
    with pytest.raises(MismatchError, match=r"scheme and options|keeps a rank"):
        commhooks.register(
            model, "int4", replicate_group=mesh["replicate"], block=64 if rank < 3 else 256
        )


@on_ranks(2)
def test_replicas_of_one_rank_that_fsdp2_averages_are_an_error() -> None:
    model = sharded(model_of((257, 6)), mesh_of(2, 1))
    with pytest.raises(RegistrationError, match=r"averages over the replicas itself"):
        commhooks.register(model, "int8")


# ---- units: FSDP2 divides what it hands over, and memory is of the gradient on every host


UNITS: dict[str, tuple[dict[str, torch.dtype], float | None]] = {
    "float32": ({}, None),
    "float64, divided before": ({"reduce_dtype": torch.float64}, None),
    "a factor": ({}, 16.0),
    "float64, a factor": ({"reduce_dtype": torch.float64}, 16.0),
}


def _units(rank: int, world_size: int, place: str) -> None:
    mesh, cases = mesh_of(2, world_size // 2), {}
    for case, (policy, factor) in UNITS.items():
        model = model_of()
        within = mesh["shard"] if place == "between" else init_device_mesh("cpu", (world_size,))
        sharded(model, within, mp_policy=MixedPrecisionPolicy(**policy))
        for module in model.modules() if factor else ():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(factor)
                module.set_force_sum_reduction_for_comms(world_size > 2)  # Gloo has no other
        options = {"replicate_group": mesh["replicate"]} if place == "between" else {}
        hook = commhooks.register(model, "topk", ratio=0.1, **options)
        for step in range(2):
            backward(model, step, rank)
            applied = take_gradients(model)
        kept = {name: value.float() for name, value in residuals(hook).items()}
        # What the factor makes of a mean: it stands for the number of ranks.
        scale = factor / world_size if factor else 1.0
        cases[case] = [kept, {name: scale * value for name, value in applied.items()}]
    if (place, world_size) == ("between", 2):
        # On one shard FSDP2 divides by the factor twice, before and after its hook.
        cases["float64, a factor"].pop()
    for case, both in cases.items():
        for values, wanted in zip(both, cases["float32"], strict=False):
            for name, value in values.items():
                torch.testing.assert_close(
                    value, wanted[name], rtol=1e-4, atol=1e-5, msg=f"{case}: {name}"
                )


@pytest.mark.parametrize("place", ["inside", "between"])
@on_ranks(2)
def test_memory_is_in_units_of_the_gradient(rank: int, world_size: int, place: str) -> None:
    _units(rank, world_size, place)


@on_ranks(4)
def test_memory_between_nodes_of_several_shards_is_too(rank: int, world_size: int) -> None:
    _units(rank, world_size, "between")
