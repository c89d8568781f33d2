"""A mesh of three dimensions: a scheme between nodes, FSDP2 within them, tensor parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import commhooks
from commhooks.errors import CheckpointError
from tests.fsdp.test_fsdp2 import backward, model_of, sharded
from tests.tools.harness import run_ranks
from tests.tools.training import everyone, same

PLAN: dict[str, Any] = {"0": ColwiseParallel(), "2": RowwiseParallel()}
NAMES = ("replicate", "shard", "tp")
QUIET = (".*TypedStorage", ".*returned a view tensor")


def _built(mesh: Any, over: Any) -> nn.Module:
    # 66 rows and 7: the second shard is shorter than the first.
    return sharded(parallelize_module(model_of((33, 66, 7)), mesh["tp"], PLAN), over)


def _hook_on(mesh: Any, name: str, **options: Any) -> tuple[nn.Module, commhooks.HookState]:
    model = _built(mesh, mesh["shard"])
    return model, commhooks.register(model, name, replicate_group=mesh["replicate"], **options)


def _local(model: nn.Module) -> dict[str, Tensor]:
    """Returns this rank's pieces of the gradients, and drops them."""
    results = {}
    for name, parameter in model.named_parameters():
        grad: Any = parameter.grad
        results[name] = grad.to_local().clone()
        parameter.grad = None
    return results


def _kept(hook: commhooks.HookState) -> dict[str, Tensor]:
    return {name: value.clone() for key, name, value in hook.engine.memory.items()}


def _run(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=NAMES)
    replica, shard, column = (mesh[name].get_local_rank() for name in NAMES)
    place = 2 * replica + shard  # tensor parallel ranks have the same inputs
    native = _built(mesh, mesh["replicate", "shard"])

    # Without a scheme: the bits of FSDP2, which averages over nodes itself.
    exact, hook = _hook_on(mesh, "none")
    for model in (native, exact):
        backward(model, 0, place)
    assert same(_local(native), _local(exact))
    hook.close()

    # With feedback: over steps, what is sent and what is kept add up to the gradients.
    ours, hook = _hook_on(mesh, "int4", block=64)
    unsent: dict[str, Tensor] = {}
    for step in range(3):
        for model, sign in ((native, 1), (ours, -1)):
            backward(model, step, place)
            for name, grad in _local(model).items():
                unsent[name] = unsent.get(name, 0) + sign * grad
    kept = _kept(hook)
    assert not unsent.pop("2.bias").any()  # columns have it in common: it travels exactly
    assert set(kept) == {f"{name}#{shard}" for name in unsent}
    for name, value in unsent.items():
        mean = kept[f"{name}#{shard}"].clone()
        dist.all_reduce(mean, group=mesh["replicate"].get_group())
        assert float(mean.norm()) > 0
        torch.testing.assert_close(mean[: len(value)] / 2, value, rtol=1e-4, atol=1e-4)

    # Saved by rank, by file and gathered over nodes and shards; of the other column is refused.
    local, gathered = hook.state_dict(), hook.state_dict(gather=True)
    assert gathered["world_size"] == 2
    assert gathered[f"rank{column}"]["memory"]["residual"]["0.weight"].shape == (33, 33)
    every, wholes = everyone(local), everyone(gathered)
    dcp.save({"hook": hook}, checkpoint_id=folder)
    backward(ours, 3, place)
    wanted = _local(ours)
    for state in (local, gathered, every, folder):
        again, other = _hook_on(mesh, "int4", block=64)
        if state is folder:
            commhooks.load_dcp(other, folder)
        else:
            for foreign_state in (every[rank ^ 1], wholes[rank ^ 1]):
                with pytest.raises(CheckpointError, match="of another part of the model"):
                    other.load_state_dict(foreign_state)
            other.load_state_dict(state)
        loaded = _kept(other)
        # A file has a place for every parameter: of what nothing is kept it says zero.
        assert not loaded.pop(f"2.bias#{shard}", torch.zeros(())).any()
        assert same(loaded, kept)
        backward(again, 3, place)
        assert same(_local(again), wanted)
    return {"states": every, "wholes": wholes[:2]}


def _without_nodes(rank: int, world_size: int, saved: dict[str, Any], folder: str) -> None:
    """Loads it where a scheme is FSDP2's reduce-scatter over 2 ranks, beside as many columns."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for how in ("states", "wholes", "files"):
        model = _built(mesh, mesh["dp"])
        hook = commhooks.register(model, "int4", block=64)
        if how == "files":
            commhooks.load_dcp(hook, folder)
        else:
            hook.load_state_dict(saved[how])
        whole = saved["wholes"][mesh["tp"].get_local_rank()]
        parts = [value for key, value in whole.items() if key.startswith("rank")]
        results = hook.state_dict()[f"rank{rank}"]["memory"]["residual"]
        wanted = parts[mesh["dp"].get_local_rank()]["memory"]["residual"]
        for name in ("0.weight", "0.bias", "2.weight"):
            torch.testing.assert_close(results[name], wanted[name])
        backward(model, 4, mesh["dp"].get_local_rank())
        assert hook.step == 4


@pytest.mark.slow
def test_a_scheme_between_nodes_runs_beside_shards_and_columns(tmp_path: Any) -> None:
    folder = str(tmp_path)
    saved = run_ranks(_run, 8, folder, timeout=240, ignore_warnings=QUIET)[0]
    run_ranks(_without_nodes, 4, saved, folder, timeout=120, ignore_warnings=QUIET)
