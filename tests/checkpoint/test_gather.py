"""A state dict that holds all ranks' state loads on other groups and numbers of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.errors import CheckpointError, MismatchError, RegistrationError
from commhooks.hook import _saving
from ddp_core import DistributedDataParallel as CoreDDP
from tests.tools.harness import on_ranks, run_ranks
from tests.tools.training import (
    assert_sums_close,
    ddp,
    everyone,
    mlp,
    outcome,
    parameters,
    residuals,
    same,
    sealed,
    train,
)

DCP_REMARKS = (".*",)  # about its planner and process group


def trained(this: int, scheme: str, **options: Any) -> tuple[Any, Any]:
    model = ddp(mlp())
    hook = commhooks.register(model, scheme, **options)
    train(model, this, range(3))
    return model, hook


@on_ranks(3)
def test_one_file_of_all_ranks_serves_every_rank(rank: int, tmp_path: Path) -> None:
    model, hook = trained(rank, "powersgd", rank=2)
    whole, local = hook.state_dict(gather=True), hook.state_dict()
    with mock.patch.object(_saving, "_MESSAGE", 100):  # as if tensors were large
        assert same(whole, hook.state_dict(gather=True))
        only = hook.state_dict(gather=True, dst=1)
    assert same(only, whole if rank == 1 else {})
    assert all(same(whole[field], local[field]) for field in local)
    assert [field for field in whole if field.startswith("rank")] == ["rank0", "rank1", "rank2"]
    if rank == 1:
        torch.save(only, tmp_path / "hook.pt")
    dist.barrier()
    _, again = trained(rank, "powersgd", rank=2)
    again.load_state_dict(torch.load(tmp_path / "hook.pt"))
    assert torch.equal(residuals(again, model), residuals(hook, model))
    assert again.step == hook.step
    pair = dist.new_group([0, 1])
    if rank < 2:
        fewer = commhooks.register(ddp(mlp(), process_group=pair), "powersgd", rank=2)
        if rank == 0:  # which would have what rank 2 held
            with pytest.raises(CheckpointError, match="saved on 3 ranks, loaded on 2"):
                fewer.load_state_dict(local)
    # Of a scheme that keeps nothing, anybody's state is everybody's.
    _, int8 = trained(rank, "int8")
    states = [int8.state_dict()]
    dist.broadcast_object_list(states, src=0)
    int8.engine.step = 77
    int8.load_state_dict(states[0])
    assert int8.step == 3


@on_ranks(2)
def test_a_rank_that_cannot_be_gathered_is_an_error_on_all(rank: int) -> None:
    _, hook = trained(rank, "topk", ratio=0.1)
    for options in ({"dst": 0}, {"gather": True, "dst": 7}):
        with pytest.raises(ValueError, match="dst"):
            hook.state_dict(**options)
    hook.engine.step += rank
    with pytest.raises(MismatchError, match="step differs"):
        hook.state_dict(gather=True)
    hook.engine.step -= rank
    if rank == 1:
        hook.engine.begin_bucket(0)  # as in the middle of a step
    with pytest.raises(MismatchError, match="a step is under way"):
        hook.state_dict(gather=True)
    hook.engine.abort()
    hook.state_dict(gather=True)


# ---- groups of ranks


@on_ranks(4, ignore_warnings=DCP_REMARKS)
def test_groups_of_ranks_keep_apart(rank: int, tmp_path: Path) -> None:
    """Ranks (0, 2) and (1, 3) each have a model of their own, as shards of a larger one."""
    groups = [dist.new_group([first, first + 2]) for first in range(2)]
    group = groups[rank % 2]

    def build() -> tuple[Any, Any]:
        model = torch.nn.parallel.DistributedDataParallel(mlp(), process_group=group)
        return model, commhooks.register(model, "fp16", error_feedback=True)

    model, hook = build()
    train(model, rank, range(3))
    held = residuals(hook, model)
    dcp.save({"hook": hook}, checkpoint_id=tmp_path)
    local, whole = hook.state_dict(), hook.state_dict(gather=True)
    assert [field for field in local if field.startswith("rank")] == [f"rank{rank}"]
    every = everyone(local)
    merged = {field: value for state in every for field, value in state.items()}
    for state in (local, whole, merged, every):
        other, again = build()
        again.load_state_dict(state)
        assert torch.equal(residuals(again, other), held)
    other, again = build()
    dcp.load({"hook": again}, checkpoint_id=tmp_path)
    assert torch.equal(residuals(again, other), held)
    for turn in range(2):  # the ranks of one group at a time
        if rank % 2 == turn:
            commhooks.load_dcp(again, str(tmp_path))
        dist.barrier()
    assert torch.equal(residuals(again, other), held)
    # The state of a rank of another group: its rank within the group counts.
    foreign_state = every[rank ^ 1]
    again.load_state_dict(foreign_state)
    part = foreign_state[f"rank{rank ^ 1}"]["memory"]["residual"]
    assert all(torch.equal(again.residual(name), part[name]) for name in part)


# ---- torch.distributed.checkpoint


def _outer(this: int) -> Any:
    """A DiLoCo with an exchange under way."""
    model = mlp()
    outer = commhooks.DiLoCo(model, "topk", every=4, delay=2)
    for step in range(5):
        for parameter in model.parameters():
            parameter.data += (this + step + 1) * 1e-3
        outer.step()
    return outer


def _dcp_save(rank: int, world_size: int, directory: str) -> Tensor:
    model, hook = trained(rank, "powersgd", rank=2)
    dcp.save({"outer": _outer(rank)}, checkpoint_id=f"{directory}/outer")
    dcp.save({"hook": hook}, checkpoint_id=f"{directory}/plain")
    gloo = dist.new_group(backend="gloo")
    pending = dcp.async_save({"hook": hook}, checkpoint_id=f"{directory}/async", process_group=gloo)
    held = residuals(hook, model)
    train(model, rank, range(3, 5))  # goes on meanwhile
    pending.result()
    return held


def _dcp_load(rank: int, world_size: int, directory: str, saved_ranks: int) -> Any:
    model = ddp(mlp())
    hook = commhooks.register(model, "powersgd", rank=2)
    results = [outcome(commhooks.load_dcp, hook, f"{directory}/plain", key="model")]
    if world_size <= saved_ranks:  # on more ranks torch misses the keys of the new ones
        results.append(outcome(dcp.load, {"hook": hook}, checkpoint_id=f"{directory}/plain"))
    fresh = (hook.step == 0) == (world_size != saved_ranks)
    held = []
    for name in ("plain", "async"):
        hook.load_state_dict({**hook.state_dict()})
        commhooks.load_dcp(hook, f"{directory}/{name}")
        held.append(residuals(hook, model))
    outer = commhooks.DiLoCo(mlp(), "topk", every=4, delay=2)
    commhooks.load_dcp(outer, f"{directory}/outer", key="outer")
    fresh &= outer.steps == 5 and [value.steps_left for value in outer._pending] == [1]
    train(model, rank, range(3, 5))
    return held, results, fresh, hook.step, parameters(model)


def test_sums_are_compared_by_the_rounding_of_each_entry() -> None:
    parts = [torch.tensor([1.0, 1e-3]), torch.tensor([-1.0, 1e-3])]
    total = parts[0] + parts[1]
    assert_sums_close(total + torch.tensor([5e-7, 0.0]), total, parts)
    for wrong in ([0.0, 5e-7], [1e-5, 0.0]):
        with pytest.raises(AssertionError):
            assert_sums_close(total + torch.tensor(wrong), total, parts)


def test_a_distributed_checkpoint_loads_on_any_number_of_ranks(tmp_path):
    before = run_ranks(_dcp_save, 2, str(tmp_path), ignore_warnings=DCP_REMARKS)
    mean = torch.stack(before).mean(0)
    for ranks in (1, 2, 3):
        results = run_ranks(_dcp_load, ranks, str(tmp_path), 2, ignore_warnings=DCP_REMARKS)
        for after in zip(*(held for held, *_ in results), strict=True):
            assert_sums_close(torch.stack(after).mean(0), mean, before)
            assert ranks != 2 or all(map(torch.equal, after, before))
        for _, (nothing, *plain), fresh, step, _ in results:
            assert nothing[0] == "CheckpointError"
            assert "nothing was saved under 'model', but under ['hook']" in nothing[1]
            # Plainly on as many ranks only; on fewer it says so, and changes nothing.
            assert ranks != 2 or plain == [None]
            assert ranks != 1 or "commhooks.load_dcp" in plain[0][1]
            assert fresh
            assert step == 5


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16))


# On ``ddp_core`` forward passes send something: buffers, a layout; or a step has no early bucket.
MODELS: dict[str, Callable[[], DistributedDataParallel]] = {
    "torch": lambda: ddp(mlp()),
    "core": lambda: CoreDDP(mlp()),
    "buffers": lambda: CoreDDP(batch_norm()),
    "static": lambda: CoreDDP(mlp(), static_graph=True),
    "layout": lambda: CoreDDP(mlp()),
}


@pytest.mark.parametrize("loads", [0, 1])
@pytest.mark.parametrize("kind", MODELS)
@on_ranks(2)
def test_a_state_that_only_some_ranks_load_is_an_error_in_the_next_step(
    rank: int, kind: str, loads: int
) -> None:
    options: dict[str, Any] = {"ratio": 0.1} | ({"layout": "scheme"} if kind == "layout" else {})
    model, again = MODELS[kind](), MODELS[kind]()
    hook = commhooks.register(model, "topk", **options)
    train(model, rank, range(3))
    state = hook.state_dict(gather=True)
    other = commhooks.register(again, "topk", **options)
    if rank == loads:
        other.load_state_dict(state)
    with pytest.raises(MismatchError, match=r"step differs .* did only some ranks load"):
        train(again, rank, range(1))


@pytest.mark.parametrize("loads", [0, 1])
@on_ranks(2)
def test_a_switch_meets_ranks_of_which_some_have_loaded(rank: int, loads: int) -> None:
    _, hook = trained(rank, "topk", ratio=0.1)
    state = hook.state_dict(gather=True)
    again = commhooks.register(ddp(mlp()), "topk", ratio=0.1)
    if rank == loads:
        again.load_state_dict(state)
    with pytest.raises(MismatchError, match=r"switch: step differs .* did only some ranks load"):
        again.switch("none")


@pytest.mark.parametrize("usual", [{}, {"coalesce": True}, {"wire_dtype": "fp16"}])
@on_ranks(2)
def test_a_run_goes_on_without_the_uncompressed_steps_that_are_over(
    rank: int, usual: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"ratio": 0.1, **usual}
    _, hook = trained(rank, "topk", start_step=2, **options)
    state = hook.state_dict(gather=True)
    model = ddp(mlp())
    again = commhooks.register(model, "topk", **options)
    again.load_state_dict(state)
    assert again.step == 3
    assert torch.equal(residuals(again, model), residuals(hook, model))
    _, early = trained(rank, "topk", start_step=1000, **options)
    with pytest.raises(CheckpointError, match=r"saved by .topk, .*start_step=1000"):
        again.load_state_dict(early.state_dict(gather=True))
    hook.close()
    with pytest.raises(RegistrationError, match=r"closed .* new DistributedDataParallel"):
        hook.load_state_dict(state)


@on_ranks(2)
def test_what_is_lost_is_missed_also_without_the_uncompressed_steps(rank: int) -> None:
    _, hook = trained(rank, "powersgd", rank=2, start_step=2)
    state = hook.state_dict(gather=True)
    for field in ("rank0", "rank1"):
        factors = next(values for key, values in state[field]["memory"].items() if "sgd" in key)
        del factors[next(iter(factors))]
    again = commhooks.register(ddp(mlp()), "powersgd", rank=2)
    with pytest.raises(CheckpointError, match="incomplete"):
        again.load_state_dict(sealed(state))
