"""A hook's state saved in DDP or FSDP loads in the other, on any mesh and number of ranks."""

from __future__ import annotations

import warnings
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.nn.parallel import DistributedDataParallel

import commhooks
import ddp_core
from commhooks.errors import CheckpointError
from commhooks.fsdp import replicate
from commhooks.wrappers import AveragedFeedback
from tests.fsdp.test_fsdp1 import unit
from tests.fsdp.test_fsdp2 import backward, equal, mean_residual, model_of, sharded, take_gradients
from tests.fsdp.test_hsdp import mesh_of
from tests.shelf import BUILT_IN
from tests.tools.harness import on_ranks, run_ranks
from tests.tools.training import everyone

QUIET = (".*FSDP", ".*deprecated", ".*TypedStorage")
WRAPS: dict[str, Any] = {
    "torch": DistributedDataParallel,
    "core": ddp_core.DistributedDataParallel,
    "fsdp1": partial(unit, "FULL_SHARD"),
    "fsdp2": sharded,
}
OPTIONS: dict[str, dict[str, Any]] = {"int4": {"block": 64}, "onebit_adam": {"freeze_step": 1}}


def hook_on(host: str, name: str = "int4") -> tuple[nn.Module, commhooks.HookState]:
    """Returns a model and its hook on one of ``WRAPS``, "replicate" or "2x3" (replicas, shards)."""
    model: nn.Module = model_of()
    options = OPTIONS.get(name, {})
    if host == "replicate":
        return model, replicate(model, name, **options)
    if host in WRAPS:
        model = WRAPS[host](model)
        return model, commhooks.register(model, name, **options)
    mesh = mesh_of(*map(int, host.split("x")))
    model = sharded(model, mesh["shard"])
    return model, commhooks.register(model, name, replicate_group=mesh["replicate"], **options)


def last_gradients(model: nn.Module, rank: int, steps: range) -> dict[str, Tensor]:
    """Returns the gradients of the last step."""
    for step in steps:
        model.zero_grad()
        backward(model, step, rank)
    return take_gradients(model)


class Saved(NamedTuple):
    """State dicts after three steps on a host, and a folder of a distributed checkpoint."""

    files: str
    by_rank: list[Any]
    gathered: dict[str, Any]


def _save(rank: int, world_size: int, host: str, name: str, folder: str) -> tuple[Any, Any]:
    model, hook = hook_on(host, name)
    for step in range(3):
        backward(model, step, rank)
    dcp.save({"hook": hook}, checkpoint_id=folder)
    return hook.state_dict(), hook.state_dict(gather=True)


@lru_cache
def saved_on(host: str, ranks: int, folder: Path, name: str = "int4") -> Saved:
    files = str(folder / f"{host}-{ranks}-{name}")
    states = run_ranks(_save, ranks, host, name, files, ignore_warnings=QUIET)
    by_rank, gathered = zip(*states, strict=True)
    return Saved(files, list(by_rank), gathered[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def _load(rank: int, world_size: int, host: str, name: str, saved: Any) -> dict[str, Any]:
    model, hook = hook_on(host, name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if isinstance(saved, str):
            commhooks.load_dcp(hook, saved)
        else:
            hook.load_state_dict(saved)
    about = [str(warning.message) for warning in caught if "is dropped" in str(warning.message)]
    assert len(about) == int(name == "powersgd" and hook.engine.rank == 0)
    assert all("powersgd.q" in text for text in about)
    again = hook.state_dict(gather=True)
    backward(model, 3, rank)
    assert hook.step == 4
    return again


def _check_equal(
    wanted: dict[str, Tensor], kept: dict[str, Tensor], rtol: float = 1e-6, atol: float = 1e-7
) -> None:
    shapes = {name: value.shape for name, value in model_of().named_parameters()}
    assert sorted(wanted) == sorted(kept) == sorted(shapes)
    for name, value in wanted.items():
        assert value.shape == shapes[name]
        assert float(value.norm()) > 0
        torch.testing.assert_close(kept[name], value, rtol=rtol, atol=atol)


@pytest.mark.parametrize("how", ["gathered", "files", "by_rank"])
@pytest.mark.parametrize(
    ("first", "before", "second", "after"),
    [
        *(("torch", 2, "fsdp2", 2), ("torch", 3, "fsdp2", 2), ("torch", 2, "fsdp2", 3)),
        ("torch", 3, "core", 1),
        *(("fsdp2", 2, "torch", 2), ("fsdp2", 3, "torch", 2), ("fsdp2", 2, "core", 3)),
        ("fsdp2", 3, "fsdp2", 2),  # with padding of other sizes
        *(("torch", 3, "fsdp1", 3), ("torch", 2, "fsdp1", 3), ("fsdp1", 3, "torch", 3)),
        *(("fsdp1", 3, "torch", 2), ("fsdp1", 3, "fsdp2", 2), ("fsdp1", 3, "fsdp1", 2)),
        *(("2x2", 4, "2x3", 6), ("2x2", 4, "2x1", 2), ("3x1", 3, "2x2", 4)),
        *(("2x2", 4, "torch", 3), ("2x2", 4, "fsdp2", 2), ("2x2", 4, "replicate", 2)),
        *(("2x3", 6, "2x2", 4), ("torch", 3, "2x2", 4), ("fsdp2", 3, "2x2", 4)),
    ],
)
def test_residuals_arrive_on_another_host(
    first: str, before: int, second: str, after: int, how: str, folder: Path
) -> None:
    saved = saved_on(first, before, folder)
    loaded = run_ranks(_load, after, second, "int4", getattr(saved, how), ignore_warnings=QUIET)[0]
    assert saved.gathered["world_size"] == (int(first[0]) if "x" in first else before)
    near = {"rtol": 1e-5, "atol": 1e-6} if "x" in first + second else {}
    _check_equal(mean_residual(saved.gathered), mean_residual(loaded), **near)
    if before == after:  # each rank has its own
        for rank in range(before):
            present, kept = (
                state[f"rank{rank}"]["memory"]["residual"] for state in (saved.gathered, loaded)
            )
            assert all(
                torch.equal(value, kept[name]) for name, value in present.items() if "#" not in name
            )


def test_momenta_are_carried_over_as_residuals_are(folder: Path) -> None:
    saved = saved_on("2x2", 4, folder, "onebit_adam").gathered
    loaded = run_ranks(_load, 2, "torch", "onebit_adam", saved)[0]
    wanted, kept = (mean_residual(state, "onebit_adam.momentum") for state in (saved, loaded))
    _check_equal(wanted, kept, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("first", "before", "second", "after"),
    [("2x2", 4, "torch", 2), ("torch", 2, "2x2", 4), ("2x3", 6, "2x2", 4)],
)
def test_factors_of_other_pieces_begin_anew_with_a_warning_and_residuals_stay(
    first: str, before: int, second: str, after: int, folder: Path
) -> None:
    saved = saved_on(first, before, folder, "powersgd").gathered
    kept = mean_residual(run_ranks(_load, after, second, "powersgd", saved)[0])
    wanted = {name: value for name, value in mean_residual(saved).items() if value.any()}
    assert "0.weight" in wanted
    for name, value in wanted.items():
        torch.testing.assert_close(kept[name], value, rtol=1e-5, atol=1e-6)


def _own_state(rank: int, world_size: int, host: str, saved: Saved, text: str) -> None:
    """A rank takes its own state of another host; torch's own load misses that host's padding."""
    _, hook = hook_on(host)
    with pytest.raises((CheckpointError, CheckpointException), match=text):
        dcp.load({"hook": hook}, checkpoint_id=saved.files)
    assert hook.step == 0
    hook.load_state_dict(saved.by_rank[rank])
    loaded, wanted = (
        {name: value for name, value in memory["residual"].items() if "#" not in name}
        for memory in (
            state[f"rank{rank}"]["memory"] for state in (hook.state_dict(), saved.by_rank[rank])
        )
    )
    equal(loaded, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second", "text"),
    [("fsdp2", "torch", "call commhooks.load_dcp"), ("torch", "fsdp2", "Missing key")],
)
def test_a_rank_takes_its_own_state_of_another_host_and_torchs_load_misses_padding(
    first: str, second: str, text: str, folder: Path
) -> None:
    saved = saved_on(first, 3, folder)
    run_ranks(_own_state, 3, second, saved, text, ignore_warnings=QUIET)


@on_ranks(4)
def test_a_mesh_is_saved_in_pieces_and_all_shards_are_needed(rank: int) -> None:
    model, hook = hook_on("2x2")
    last_gradients(model, rank, range(2))
    whole, states = mean_residual(hook.state_dict(gather=True)), everyone(hook.state_dict())
    parts = [state[f"rank{place}"]["memory"]["residual"] for place, state in enumerate(states)]
    for name, shape in ((name, value.shape) for name, value in model_of().named_parameters()):
        replicas = [
            torch.cat([parts[2 * replica + shard][f"{name}#{shard}"] for shard in range(2)])
            for replica in range(2)
        ]
        torch.testing.assert_close(whole[name], sum(replicas)[: shape[0]] / 2)
    _, other = hook_on("torch")
    with pytest.raises(CheckpointError, match="do not make up its shape"):
        other.load_state_dict(states[::2])


@on_ranks(4)
def test_one_rank_gets_the_state_of_the_mesh(rank: int) -> None:
    model, hook = hook_on("2x2")
    last_gradients(model, rank, range(1))
    with pytest.raises(ValueError, match="is a rank of the hook's 2"):
        hook.state_dict(gather=True, dst=2)
    state = hook.state_dict(gather=True, dst=1)
    assert bool(state) == (rank == 2)
    if rank == 2:
        assert state["world_size"] == 2
        assert {"rank0", "rank2"} <= state.keys()


def _resumes(rank: int, host: str, names: list[str]) -> None:
    for name in names:
        whole, hook = hook_on(host, name)
        last_gradients(whole, rank, range(2))
        states = [hook.state_dict(gather=gather) for gather in (False, True)]
        wanted = last_gradients(whole, rank, range(2, 4))
        for state in states:
            half, other = hook_on(host, name)
            other.load_state_dict(state)
            equal(last_gradients(half, rank, range(2, 4)), wanted)
            other.close()
        hook.close()


@pytest.mark.parametrize(
    ("host", "names"),
    [("2x2", ["int4", "powersgd", "onebit_adam"]), ("fsdp2", ["int4"])],
)
@on_ranks(4)
def test_a_run_on_the_same_mesh_continues_bit_for_bit(
    rank: int, host: str, names: list[str]
) -> None:
    _resumes(rank, host, names)


@pytest.mark.slow
@on_ranks(4, timeout=300)
def test_a_run_with_any_scheme_continues_bit_for_bit_on_the_same_mesh(rank: int) -> None:
    _resumes(rank, "2x2", [name for name in BUILT_IN if name not in ("gossip", "noop")])


@on_ranks(2, ignore_warnings=(".*averaged_error.*is dropped",))
def test_memory_in_8_bits_begins_anew_on_another_host(rank: int) -> None:
    scheme = AveragedFeedback(commhooks.make("int4", block=64, error_feedback=False))
    plain, model = model_of(), sharded(model_of())
    first, second = DistributedDataParallel(plain), commhooks.register(model, scheme)
    hook = commhooks.register(first, scheme)
    last_gradients(first, rank, range(2))
    kept = sum(value.numel() for _, _, value in hook.engine.memory.items())
    assert kept < 1.3 * sum(value.numel() for value in plain.parameters())
    second.load_state_dict(hook.state_dict(gather=True))
    last_gradients(model, rank, range(2, 4))
    assert second.step == 4
