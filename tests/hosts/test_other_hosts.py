"""What one host saves another loads: through files, by rank and gathered, on other ranks, too."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import commhooks
import ddp_core
from commhooks.errors import CheckpointError
from tests.fsdp.test_fsdp2 import backward, mean_residual, model_of, sharded
from tests.tools.harness import run_ranks

QUIET = (".*TypedStorage", ".*FSDP", ".*deprecated")


def _hook_on(host: str) -> tuple[nn.Module, commhooks.HookState]:
    model: nn.Module = model_of()
    if host == "ddp":
        model = DistributedDataParallel(model)
    elif host == "core":
        model = ddp_core.DistributedDataParallel(model)
    elif host == "fsdp2":
        model = sharded(model)
    else:
        model = FullyShardedDataParallel(
            model,
            device_id=torch.device("cpu"),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            use_orig_params=True,
        )
    return model, commhooks.register(model, "int4", block=64)


def _save(rank: int, world_size: int, host: str, folder: str) -> tuple[Any, Any]:
    model, hook = _hook_on(host)
    for step in range(2):
        backward(model, step, rank)
    dcp.save({"hook": hook}, checkpoint_id=folder)
    return hook.state_dict(), hook.state_dict(gather=True)


@lru_cache
def saved_on(host: str, ranks: int, folder: Path) -> tuple[str, list[Any], Any]:
    """Returns the folder of a checkpoint, the states of all ranks, and the gathered state."""
    name = str(folder / f"{host}{ranks}")
    states, wholes = zip(*run_ranks(_save, ranks, host, name, ignore_warnings=QUIET), strict=True)
    return name, list(states), wholes[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def _load(rank: int, world_size: int, host: str, how: str, saved: Any) -> Any:
    model, hook = _hook_on(host)
    if how == "files":
        commhooks.load_dcp(hook, saved)
    else:
        hook.load_state_dict(saved)
    again = hook.state_dict(gather=True)
    backward(model, 2, rank)
    assert hook.step == 3
    return again


CASES = [
    ("ddp", 3, "fsdp2", 2, "files"),
    ("fsdp2", 3, "ddp", 2, "files"),
    ("fsdp2", 2, "core", 3, "files"),
    ("fsdp1", 3, "ddp", 2, "files"),
    ("fsdp1", 3, "fsdp2", 2, "files"),
    ("ddp", 2, "fsdp1", 2, "files"),
    ("fsdp2", 3, "ddp", 2, "by rank"),
    ("fsdp2", 3, "ddp", 3, "by rank"),
    ("ddp", 2, "fsdp1", 3, "gathered"),
    ("fsdp1", 3, "ddp", 2, "gathered"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "before", "second", "after", "how"), CASES)
def test_residuals_arrive_on_another_host(
    first: str, before: int, second: str, after: int, how: str, folder: Path
) -> None:
    name, states, whole = saved_on(first, before, folder)
    saved = {"files": name, "by rank": states, "gathered": whole}[how]
    loaded = run_ranks(_load, after, second, how, saved, ignore_warnings=QUIET)
    found, wanted = mean_residual(loaded[0]), mean_residual(whole)
    shapes = {one: value.shape for one, value in model_of().named_parameters()}
    assert sorted(wanted) == sorted(found) == sorted(shapes)
    for one, value in wanted.items():
        assert found[one].shape == shapes[one]
        assert float(value.norm()) > 0
        torch.testing.assert_close(found[one], value, rtol=1e-6, atol=1e-7)


def _own_state(rank: int, world_size: int, host: str, states: list[Any]) -> dict[str, Tensor]:
    _, hook = _hook_on(host)
    hook.load_state_dict(states[rank])
    residual = hook.state_dict()[f"rank{dist.get_rank()}"]["memory"]["residual"]
    return {name: value for name, value in residual.items() if "#" not in name}


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [("fsdp2", "ddp"), ("ddp", "fsdp2")])
def test_a_rank_takes_its_own_state_of_another_host(first: str, second: str, folder: Path) -> None:
    _, states, _ = saved_on(first, 3, folder)
    for rank, found in enumerate(run_ranks(_own_state, 3, second, states, ignore_warnings=QUIET)):
        wanted = states[rank][f"rank{rank}"]["memory"]["residual"]
        assert found.keys() == {name for name in wanted if "#" not in name}
        assert all(torch.equal(value, wanted[name]) for name, value in found.items())


def _torchs_load(rank: int, world_size: int, host: str, folder: str) -> str:
    _, hook = _hook_on(host)
    with pytest.raises((CheckpointError, CheckpointException)) as raised:
        dcp.load({"hook": hook}, checkpoint_id=folder)
    assert hook.step == 0
    return str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second", "text"),
    [("fsdp2", "ddp", "call commhooks.load_dcp"), ("ddp", "fsdp2", "Missing key")],
)
def test_torchs_own_load_misses_the_padding_of_another_host(
    first: str, second: str, text: str, folder: Path
) -> None:
    name, _, _ = saved_on(first, 3, folder)
    for message in run_ranks(_torchs_load, 3, second, name, ignore_warnings=QUIET):
        assert text in message
