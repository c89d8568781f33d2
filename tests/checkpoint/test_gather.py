"""One state of all ranks: gathered, of groups, through files, on other numbers of ranks."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

import commhooks
from commhooks.hook import _saving as _checkpoint_gather
from tests.tools.harness import on_ranks, run_ranks
from tests.tools.training import batch, ddp, equal_bits, mlp, outcome, parameters, residuals

DCP_REMARKS = (".*",)  # about its planner and process group


def trained(this: int, scheme: str, **options: Any) -> tuple[Any, Any]:
    model = ddp(mlp())
    hook = commhooks.register(model, scheme, **options)
    train(model, this, range(3))
    return model, hook


def train(model: Any, rank: int, steps: range) -> None:
    for step in steps:
        model.zero_grad()
        inputs = batch(step, rank, 8, 16)
        (model(inputs) - inputs.roll(1, 1)).square().mean().backward()


def through_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return bool(left == right)


def _gathered(rank: int, world_size: int, directory: str) -> Any:
    model, hook = trained(rank, "powersgd", rank=2)
    whole, local = hook.state_dict(gather=True), hook.state_dict()
    _checkpoint_gather._MESSAGE = 100  # as if tensors were large
    cut = hook.state_dict(gather=True)
    only = hook.state_dict(gather=True, dst=1)
    facts = [
        same(whole, cut),
        all(same(whole[field], local[field]) for field in local),
        [field for field in whole if field.startswith("rank")] == ["rank0", "rank1", "rank2"],
        same(only, whole if rank == 1 else {}),
    ]
    if rank == 1:
        torch.save(only, Path(directory, "hook.pt"))
    dist.barrier()
    loaded = torch.load(Path(directory, "hook.pt"))
    _, again = trained(rank, "powersgd", rank=2)
    again.load_state_dict(loaded)
    facts += [torch.equal(residuals(again, model), residuals(hook, model)), again.step == hook.step]
    # Of a scheme that keeps nothing, anybody's state is everybody's.
    _, int8 = trained(rank, "int8")
    states = [int8.state_dict()]
    dist.broadcast_object_list(states, src=0)
    int8.engine.step = 77
    int8.load_state_dict(states[0])
    facts.append(int8.step == 3)
    return facts, residuals(hook, model)


def _fewer(rank: int, world_size: int, directory: str) -> Any:
    model = ddp(mlp())
    hook = commhooks.register(model, "powersgd", rank=2)
    hook.load_state_dict(torch.load(Path(directory, "hook.pt")))
    loaded = residuals(hook, model)
    train(model, rank, range(3, 5))
    return loaded, torch.cat([parameter.grad.view(-1) for parameter in model.parameters()])


def test_one_file_of_all_ranks_serves_every_rank_and_any_number(tmp_path):
    results = run_ranks(_gathered, 3, str(tmp_path))
    assert [facts for facts, _ in results] == [[True] * 7] * 3
    before = torch.stack([held for _, held in results]).mean(0)
    assert before.abs().max() > 0
    for ranks in (1, 2):
        loaded = run_ranks(_fewer, ranks, str(tmp_path))
        after = torch.stack([held for held, _ in loaded]).mean(0)
        # Scaled and added up in float32: two roundings a rank.
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-9)
        assert equal_bits([gradients for _, gradients in loaded])


@on_ranks(2)
def test_a_rank_that_cannot_be_gathered_is_an_error_on_all(rank: int) -> None:
    _, hook = trained(rank, "topk", ratio=0.1)
    results = [outcome(hook.state_dict, dst=0), outcome(hook.state_dict, gather=True, dst=7)]
    hook.engine.step += rank
    results.append(outcome(hook.state_dict, gather=True))
    hook.engine.step -= rank
    if rank == 1:
        hook.engine.begin_bucket(0)  # as in the middle of a step
    results.append(outcome(hook.state_dict, gather=True))
    hook.engine.abort()
    results.append(outcome(hook.state_dict, gather=True))
    alone, who, step, middle, fine = results
    assert alone[0] == who[0] == "ValueError"
    assert step[0] == "MismatchError"
    assert "step differs" in step[1]
    assert middle[0] == "MismatchError"
    assert "a step is under way" in middle[1]
    assert fine is None


# ---- groups of ranks


def _groups(rank: int, world_size: int, directory: str) -> Any:
    """Ranks (0, 2) and (1, 3) each have a model of their own, as shards of a larger one."""
    groups = [dist.new_group([first, first + 2]) for first in range(2)]
    group = groups[rank % 2]

    def build() -> tuple[Any, Any]:
        model = torch.nn.parallel.DistributedDataParallel(mlp(), process_group=group)
        return model, commhooks.register(model, "fp16", error_feedback=True)

    model, hook = build()
    train(model, rank, range(3))
    held = residuals(hook, model)
    dcp.save({"hook": hook}, checkpoint_id=directory)
    local = hook.state_dict()
    keys = [field for field in local if field.startswith("rank")]
    whole = hook.state_dict(gather=True)
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, local)
    facts = [keys == [f"rank{rank}"]]
    merged = {field: value for state in everyone for field, value in state.items()}
    for state in (local, whole, merged, everyone):
        other, again = build()
        again.load_state_dict(state)
        facts.append(torch.equal(residuals(again, other), held))
    other, again = build()
    dcp.load({"hook": again}, checkpoint_id=directory)
    facts.append(torch.equal(residuals(again, other), held))
    for turn in range(2):  # the ranks of one group at a time
        if rank % 2 == turn:
            commhooks.load_dcp(again, directory)
        dist.barrier()
    facts.append(torch.equal(residuals(again, other), held))
    # The state of a rank of another group: its rank within the group counts.
    theirs = everyone[rank ^ 1]
    again.load_state_dict(theirs)
    part = theirs[f"rank{rank ^ 1}"]["memory"]["residual"]
    facts.append(all(torch.equal(again.residual(name), part[name]) for name in part))
    return facts


def test_groups_of_ranks_keep_apart(tmp_path):
    assert run_ranks(_groups, 4, str(tmp_path), ignore_warnings=DCP_REMARKS) == [[True] * 8] * 4


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


def test_a_distributed_checkpoint_loads_on_any_number_of_ranks(tmp_path):
    before = run_ranks(_dcp_save, 2, str(tmp_path), ignore_warnings=DCP_REMARKS)
    mean = torch.stack(before).mean(0)
    for ranks in (1, 2, 3):
        results = run_ranks(_dcp_load, ranks, str(tmp_path), 2, ignore_warnings=DCP_REMARKS)
        for after in zip(*(held for held, *_ in results), strict=True):
            torch.testing.assert_close(torch.stack(after).mean(0), mean, rtol=1e-5, atol=1e-9)
            assert ranks != 2 or all(map(torch.equal, after, before))
        for _, (nothing, *plain), fresh, step, _ in results:
            assert nothing[0] == "CheckpointError"
            assert "nothing was saved under 'model', but under ['hook']" in nothing[1]
            # Plainly on as many ranks only; on fewer it says so, and changes nothing.
            assert ranks != 2 or plain == [None]
            assert ranks != 1 or "commhooks.load_dcp" in plain[0][1]
            assert fresh
            assert step == 5
