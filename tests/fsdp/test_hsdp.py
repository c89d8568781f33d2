"""Schemes between nodes of FSDP2 (HSDP): the verdict of a step over the mesh, and saved states."""

from __future__ import annotations

import copy
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.errors import CheckpointError, MismatchError, RegistrationError
from commhooks.fsdp import replicate
from commhooks.wrappers import _cast as _cast
from tests.fsdp.test_fsdp2 import backward, equal, gradients, model_of, sharded
from tests.shelf import BUILT_IN
from tests.tools.harness import on_ranks, run_ranks

INT4 = {"block": 64}


def mesh_of(replicas: int, shards: int) -> Any:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def residuals(hook: commhooks.HookState) -> dict[str, Tensor]:
    (part,) = [value for key, value in hook.state_dict().items() if key.startswith("rank")]
    return copy.deepcopy(part["memory"]["residual"])


# ---- the verdict


def _hooks_on(kind: str, mesh: Any, model: nn.Module) -> tuple[nn.Module, list[Any]]:
    if kind == "native":
        model = sharded(model, mesh)
        return model, [commhooks.register(model, "int4", **INT4)]
    model = sharded(model, mesh["shard"])
    hooks = []
    for level in kind.split(" and "):
        place = {} if level == "inside" else {"replicate_group": mesh["replicate"]}
        hooks.append(commhooks.register(model, "int4", **INT4, **place))
    return model, hooks


KINDS = ("between", "between and inside", "inside and between", "native")


@on_ranks(4)
def test_a_step_that_overflows_in_one_shard_changes_no_residual_on_any_rank(rank: int) -> None:
    for kind in KINDS:
        for bad in (0, 3) if kind == "between" else (3,):
            _spoil(rank, kind, bad)


def _spoil(rank: int, kind: str, bad: int) -> None:
    # One layer, whose last row belongs to the last shard: the other shard is finite.
    model, hooks = _hooks_on(kind, mesh_of(2, 2), model_of((257, 6)))

    def train(step: int, scale: float) -> None:
        generator = torch.Generator().manual_seed(10 * step + rank)
        weight = torch.ones(6)
        weight[-1] = scale
        (model(torch.rand(8, 257, generator=generator)) * weight).sum().backward()

    train(0, 1.0)
    gradients(model)
    before = [residuals(hook) for hook in hooks]
    assert all(any(value.any() for value in kept_before.values()) for kept_before in before)
    train(1, float("inf") if rank == bad else 1.0)
    averages = gradients(model)
    assert not bool(averages["0.weight"][-1].isfinite().any())
    assert bool(averages["0.weight"][0].isfinite().all())
    for hook, kept in zip(hooks, before, strict=True):
        assert (hook.step, hook.skipped_steps) == (2, 1), (kind, hook)
        for name, value in residuals(hook).items():
            assert torch.equal(value, kept[name]), (kind, hook, name)
    train(2, 1.0)
    assert all(bool(value.isfinite().all()) for value in gradients(model).values())
    assert all((hook.step, hook.skipped_steps) == (3, 1) for hook in hooks)


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
        gradients(model)
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
def test_shards_with_other_options_are_told(rank: int) -> None:
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
def test_replicas_of_one_rank_that_fsdp2_averages_are_told_how_to_be_sharded() -> None:
    model = sharded(model_of((257, 6)), mesh_of(2, 1))
    with pytest.raises(RegistrationError, match=r"averages over the replicas itself"):
        commhooks.register(model, "int8")


# ---- saved states


def _hook_on(host: str, name: str = "int4", **options: Any) -> tuple[nn.Module, Any]:
    """Returns a model on "ddp", "fsdp2", "replicate", or "RxS" (replicas, shards)."""
    options = INT4 if name == "int4" else options
    if host == "ddp":
        model: nn.Module = DistributedDataParallel(model_of())
        return model, commhooks.register(model, name, **options)
    if host == "replicate":
        model = model_of()
        return model, replicate(model, name, **options)
    if host == "fsdp2":
        model = sharded(model_of())
        return model, commhooks.register(model, name, **options)
    mesh = mesh_of(*map(int, host.split("x")))
    model = sharded(model_of(), mesh["shard"])
    return model, commhooks.register(model, name, replicate_group=mesh["replicate"], **options)


def _trained(model: nn.Module, rank: int, first: int, steps: int) -> dict[str, Tensor]:
    for step in range(first, first + steps):
        backward(model, step, rank)
    return gradients(model)


def _save(rank: int, world_size: int, host: str, name: str, gather: bool) -> dict[str, Any]:
    model, hook = _hook_on(host, name)
    _trained(model, rank, 0, 3)
    return hook.state_dict(gather=gather)


def _load(rank: int, world_size: int, host: str, name: str, state: Any) -> dict[str, Any]:
    model, hook = _hook_on(host, name)
    hook.load_state_dict(state)
    again = hook.state_dict(gather=True)
    _trained(model, rank, 3, 1)
    assert hook.step == 4
    return again


@lru_cache(maxsize=8)
def saved_on(host: str, ranks: int, name: str = "int4", gather: bool = True) -> list[Any]:
    """Returns what each rank has saved after three steps."""
    return run_ranks(_save, ranks, host, name, gather)


SLOW = pytest.mark.slow


def _mean(state: dict[str, Any], key: str = "residual") -> dict[str, Tensor]:
    parts = [state[field]["memory"][key] for field in state if field.startswith("rank")]
    names = [name for name in parts[0] if not name.endswith("#padding")]
    return {name: sum(part[name] for part in parts) / len(parts) for name in names}


def _check_equal(wanted: dict[str, Tensor], kept: dict[str, Tensor]) -> None:
    shapes = {name: value.shape for name, value in model_of().named_parameters()}
    assert sorted(wanted) == sorted(kept) == sorted(shapes)
    for name, value in wanted.items():
        assert value.shape == shapes[name]
        assert float(value.norm()) > 0
        torch.testing.assert_close(kept[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("first", "before", "second", "ranks"),
    [
        ("2x2", 4, "2x3", 6),
        ("2x2", 4, "ddp", 3),
        ("2x2", 4, "fsdp2", 2),
        ("3x1", 3, "2x2", 4),
        pytest.param("2x2", 4, "3x2", 6, marks=SLOW),
        pytest.param("2x2", 4, "replicate", 2, marks=SLOW),
        pytest.param("2x3", 6, "2x2", 4, marks=SLOW),
    ],
)
def test_a_gathered_state_has_whole_parameters_and_loads_on_any_mesh_or_host(
    first: str, before: int, second: str, ranks: int
) -> None:
    saved = saved_on(first, before)[0]
    assert saved["world_size"] == int(first[0])
    loaded = run_ranks(_load, ranks, second, "int4", saved)[0]
    _check_equal(_mean(saved), _mean(loaded))


@pytest.mark.parametrize(("first", "ranks"), [("ddp", 3), ("fsdp2", 3)])
def test_a_mesh_loads_what_other_hosts_have_saved(first: str, ranks: int) -> None:
    saved = saved_on(first, ranks)[0]
    loaded = run_ranks(_load, 4, "2x2", "int4", saved)[0]
    _check_equal(_mean(saved), _mean(loaded))


@pytest.mark.parametrize(
    ("second", "ranks"), [pytest.param("2x3", 6, marks=SLOW), ("ddp", 2), ("fsdp2", 2)]
)
def test_the_states_of_all_ranks_are_put_together(second: str, ranks: int) -> None:
    states = saved_on("2x2", 4, gather=False)
    loaded = run_ranks(_load, ranks, second, "int4", states)[0]
    wanted = {}
    for replica in range(2):
        parts = [states[2 * replica + shard] for shard in range(2)]
        states_of_shards = [part[f"rank{2 * replica + shard}"] for shard, part in enumerate(parts)]
        for name, shape in ((n, v.shape) for n, v in model_of().named_parameters()):
            pieces = [
                state["memory"]["residual"][f"{name}#{s}"]
                for s, state in enumerate(states_of_shards)
            ]
            whole = torch.cat(pieces)[: shape[0]]
            wanted[name] = wanted.get(name, 0) + whole / 2
    _check_equal(wanted, _mean(loaded))


def _half(rank: int, world_size: int, states: list[Any]) -> None:
    _, hook = _hook_on("ddp")
    with pytest.raises(CheckpointError, match="do not make up its shape"):
        hook.load_state_dict(states[::2])


def test_states_of_one_shard_are_not_enough() -> None:
    run_ranks(_half, 2, saved_on("2x2", 4, gather=False))


def _resumes(rank: int, names: list[str]) -> None:
    for name in names:
        whole, hook = _hook_on("2x2", name)
        _trained(whole, rank, 0, 2)
        states = [hook.state_dict(gather=gather) for gather in (False, True)]
        wanted = _trained(whole, rank, 2, 2)
        for state in states:
            half, other = _hook_on("2x2", name)
            other.load_state_dict(state)
            equal(_trained(half, rank, 2, 2), wanted)
            other.close()
        hook.close()


@on_ranks(4)
def test_a_run_on_the_same_mesh_continues_bit_for_bit(rank: int) -> None:
    _resumes(rank, ["int4", "powersgd", "onebit_adam"])


@pytest.mark.slow
@on_ranks(4, timeout=300)
def test_a_run_with_any_scheme_continues_bit_for_bit_on_the_same_mesh(rank: int) -> None:
    _resumes(rank, [name for name in BUILT_IN if name not in ("gossip", "noop")])


def _anew(rank: int, world_size: int, host: str, state: Any) -> dict[str, Any]:
    model, hook = _hook_on(host, "powersgd")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hook.load_state_dict(state)
    about = [str(warning.message) for warning in caught if "is dropped" in str(warning.message)]
    assert len(about) == int(hook.engine.rank == 0)
    assert all("powersgd.q" in text for text in about)
    again = hook.state_dict(gather=True)
    _trained(model, rank, 3, 1)
    return again


@pytest.mark.parametrize(
    ("first", "before", "second", "after"),
    [
        ("2x2", 4, "ddp", 2),
        ("ddp", 2, "2x2", 4),
        pytest.param("2x3", 6, "2x2", 4, marks=SLOW),
    ],
)
def test_factors_of_other_pieces_begin_anew_with_a_warning_and_residuals_stay(
    first: str, before: int, second: str, after: int
) -> None:
    saved = saved_on(first, before, "powersgd")[0]
    loaded = run_ranks(_anew, after, second, saved)[0]
    wanted = {name: value for name, value in _mean(saved).items() if value.any()}
    kept = _mean(loaded)
    assert "0.weight" in wanted
    for name, value in wanted.items():
        torch.testing.assert_close(kept[name], value, rtol=1e-5, atol=1e-6)


def _momentum(rank: int, world_size: int, host: str, state: Any) -> dict[str, Any]:
    model, hook = _hook_on(host, "onebit_adam", freeze_step=1)
    if state is not None:
        hook.load_state_dict(state)
    else:
        _trained(model, rank, 0, 3)
    return hook.state_dict(gather=True)


def test_momenta_are_carried_over_as_residuals_are() -> None:
    saved = run_ranks(_momentum, 4, "2x2", None)[0]
    loaded = run_ranks(_momentum, 2, "ddp", saved)[0]
    _check_equal(_mean(saved, "onebit_adam.momentum"), _mean(loaded, "onebit_adam.momentum"))


@on_ranks(4)
def test_one_rank_gets_the_state_of_the_mesh(rank: int) -> None:
    model, hook = _hook_on("2x2")
    _trained(model, rank, 0, 1)
    with pytest.raises(ValueError, match="is a rank of the hook's 2"):
        hook.state_dict(gather=True, dst=2)
    state = hook.state_dict(gather=True, dst=1)
    assert bool(state) == (rank == 2)
    if rank == 2:
        assert state["world_size"] == 2
        assert {"rank0", "rank2"} <= state.keys()


def _with_dcp(rank: int, world_size: int, host: str, folder: str, load: bool) -> Any:
    model, hook = _hook_on(host)
    if load:
        commhooks.load_dcp(hook, folder)
    else:
        _trained(model, rank, 0, 2)
        dcp.save({"hook": hook}, checkpoint_id=folder)
    return hook.state_dict(gather=True)


@pytest.mark.parametrize(
    ("second", "ranks"),
    [
        ("2x1", 2),
        ("fsdp2", 2),
        pytest.param("2x2", 4, marks=SLOW),
        pytest.param("ddp", 3, marks=SLOW),
    ],
)
def test_a_distributed_checkpoint_loads_on_another_mesh(
    second: str, ranks: int, tmp_path: Path
) -> None:
    quiet = (".*TypedStorage",)
    folder = str(tmp_path)
    saved = run_ranks(_with_dcp, 4, "2x2", folder, False, ignore_warnings=quiet)[0]
    loaded = run_ranks(_with_dcp, ranks, second, folder, True, ignore_warnings=quiet)[0]
    _check_equal(_mean(saved), _mean(loaded))


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
            applied = gradients(model)
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
