"""The saved form of a hook's state: what is refused, what moves to other ranks, what is lost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from commhooks import (
    DGC,
    EF21,
    AveragedFeedback,
    Blockwise,
    Cast,
    CheckpointError,
    Coalesced,
    DelayedStart,
    DeMo,
    Dense,
    ErrorFeedback,
    FlushResidual,
    IntSGD,
    PerParameter,
    PowerSGD,
    Rule,
    Scheme,
    Simulation,
    TopK,
    flatten_state,
    make,
    unflatten_state,
)
from commhooks._checkpoint import FORMAT, VERSION, check_memory, memory_for_rank, structure
from commhooks._scheme import walk

SHAPES = {"weight": torch.Size([6, 5]), "bias": torch.Size([6])}
SCHEME = ErrorFeedback(PowerSGD(rank=1, min_compression_rate=0))
PER_RANK = SCHEME.per_rank


def residual(rank: int) -> dict[str, Tensor]:
    return {name: torch.full(shape, float(rank + 1)) for name, shape in SHAPES.items()}


def saved(rank: int = 0, world_size: int = 1) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "scheme": repr(SCHEME),
        "structure": structure(SCHEME),
        "step": 7,
        "seed": 3,
        "world_size": world_size,
        f"rank{rank}": {
            "rank": rank,
            "memory": {"residual": residual(rank), "powersgd.q": {"weight": torch.ones(1, 5)}},
        },
    }


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return bool(left == right)


# ---- what is refused


def dropped(field: str) -> Callable[[dict[str, Any]], Any]:
    return lambda state: {key: value for key, value in state.items() if key != field}


def replaced(field: str, value: object) -> Callable[[dict[str, Any]], Any]:
    return lambda state: {**state, field: value}


DAMAGED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a model's state": (lambda _: {"layer.weight": torch.ones(2)}, "not a hook state"),
    "another format": (replaced("format", "torch"), "not a hook state"),
    "nothing": (lambda _: None, "NoneType"),
    "a number": (lambda _: 5, "int"),
    "a list of numbers": (lambda _: [1, 2], "int"),
    "an empty list": (lambda _: [], "empty"),
    "newer": (replaced("version", VERSION + 1), "update commhooks"),
    "a version that never was": (replaced("version", 0), "version 0"),
    "a version in words": (replaced("version", "one"), "version 'one'"),
    "no step": (dropped("step"), "lacks .*step"),
    "no structure": (dropped("structure"), "lacks .*structure"),
    "a step that is no number": (replaced("step", "7"), "'step' is a whole number"),
    "a negative step": (replaced("step", -1), "'step' is a whole number"),
    "no ranks": (replaced("world_size", 0), "'world_size' is a whole number"),
    "no rank's memory": (dropped("rank0"), "no rank's memory"),
    "a rank without memory": (replaced("rank0", {"rank": 0}), "lacks its memory"),
    "a memory that is none": (replaced("rank0", {"rank": 0, "memory": None}), "lacks its memory"),
    "a rank that is none": (replaced("rank0", "gone"), "lacks its memory"),
    "another rank's part": (replaced("rank0", {"rank": 1, "memory": {}}), "mixed up"),
    "numbers for tensors": (
        replaced("rank0", {"rank": 0, "memory": {"residual": {"bias": 3}}}),
        "does not hold tensors",
    ),
    "two checkpoints": (lambda state: [state, {**state, "step": 8}], "not of one checkpoint"),
}


@pytest.mark.parametrize("which", DAMAGED)
def test_a_damaged_or_foreign_state_is_refused_and_left_alone(which: str) -> None:
    damage, message = DAMAGED[which]
    given = damage(saved())
    before = copy.deepcopy(given)
    with pytest.raises(CheckpointError, match=message):
        memory_for_rank(given, 0, 1, PER_RANK)
    if isinstance(given, dict):
        assert same(given, before)


def test_every_rank_needs_its_own_file() -> None:
    with pytest.raises(CheckpointError, match="this is rank 1, the state given is of rank 0"):
        memory_for_rank(saved(0, 2), 1, 2, PER_RANK)


def test_another_world_size_needs_all_files() -> None:
    with pytest.raises(CheckpointError, match=r"missing: ranks \[1, 2\]"):
        memory_for_rank([saved(0, 3), saved(0, 3)], 0, 2, PER_RANK)


def test_ranks_of_unlike_models_are_not_added_up() -> None:
    other = saved(1, 2)
    other["rank1"]["memory"]["residual"]["bias"] = torch.ones(2)
    with pytest.raises(CheckpointError, match="bias"):
        memory_for_rank([saved(0, 2), other], 0, 1, PER_RANK)


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ({"residual": {"other": torch.ones(6)}}, "does not have.*other"),
        ({"residual": {"bias": torch.ones(7)}}, r"\(7,\).*\(6,\)"),
        ({"residual": {"bias": torch.ones(6, dtype=torch.int64)}}, "floating point"),
        ({"residual": {"bias": torch.full((6,), torch.nan)}}, "not finite"),
        ({"residual": {"bias": torch.full((6,), torch.inf)}}, "not finite"),
        ({"unheard.of": {"bias": torch.ones(6)}}, "does not keep"),
        ({"powersgd.q": {"weight": torch.ones(1, 9)}}, "powersgd.q"),
        ({"powersgd.q": {"bias": torch.ones(1, 6)}}, "matrix"),
    ],
)
def test_memory_that_does_not_fit_is_refused(
    memory: dict[str, dict[str, Tensor]], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        check_memory(memory, SCHEME, SHAPES)


def test_memory_that_fits_is_taken() -> None:
    _, memory = memory_for_rank(saved(), 0, 1, PER_RANK)
    check_memory(memory, SCHEME, SHAPES)


def test_what_a_rule_or_an_early_scheme_keeps_is_known() -> None:
    memory = {"residual": {"bias": torch.ones(6)}}
    check_memory(memory, PerParameter([Rule(SCHEME, name="bias")], Dense()), SHAPES)
    check_memory(memory, DelayedStart(Dense(), 3, before=SCHEME), SHAPES)
    check_memory(memory, FlushResidual(Dense()), SHAPES)


# ---- which scheme it is of


def test_settings_do_not_make_another_structure_and_nesting_does() -> None:
    assert structure(PowerSGD(rank=1)) == structure(PowerSGD(rank=2))
    assert structure(FlushResidual(Dense())) == structure(Dense())
    different = [
        Dense(),
        PowerSGD(),
        ErrorFeedback(PowerSGD()),
        Cast(ErrorFeedback(PowerSGD())),
        Coalesced(PowerSGD()),
        PerParameter([], PowerSGD()),
        PerParameter([Rule(ErrorFeedback(PowerSGD()))], PowerSGD()),
        PerParameter([Rule(Dense())], PowerSGD()),
    ]
    assert len({structure(scheme) for scheme in different}) == len(different)


# ---- ranks


def test_the_same_ranks_get_their_own_back() -> None:
    for rank in range(3):
        for state in (saved(rank, 3), [saved(i, 3) for i in range(3)]):
            common, memory = memory_for_rank(state, rank, 3, PER_RANK)
            assert common["step"] == 7
            assert same(memory["residual"], residual(rank))


@pytest.mark.parametrize(("old", "new"), [(4, 2), (3, 2), (2, 4), (4, 1), (1, 3)])
def test_another_world_size_keeps_the_sum_of_residuals(old: int, new: int) -> None:
    states = [saved(rank, old) for rank in range(old)]
    before = copy.deepcopy(states)
    memories = [memory_for_rank(states, rank, new, PER_RANK)[1] for rank in range(new)]
    for name, shape in SHAPES.items():
        zero = torch.zeros(shape)
        total = sum((memory["residual"].get(name, zero) for memory in memories), zero)
        expected = sum((residual(rank)[name] for rank in range(old)), zero)
        assert torch.equal(total, expected)
    for memory in memories:  # the same on all ranks, so not added up
        assert torch.equal(memory["powersgd.q"]["weight"], torch.ones(1, 5))
    assert all(same(state, kept) for state, kept in zip(states, before, strict=True))


def test_one_merged_state_of_all_ranks_serves_every_rank() -> None:
    merged = {**saved(0, 2), "rank1": saved(1, 2)["rank1"]}
    assert same(memory_for_rank(merged, 1, 2, PER_RANK)[1]["residual"], residual(1))
    total = memory_for_rank(merged, 0, 1, PER_RANK)[1]["residual"]["bias"]
    assert torch.equal(total, torch.full((6,), 3.0))


# ---- flat form


def test_flat_form_gives_the_state_back() -> None:
    state = saved()
    state["rank0"]["memory"]["empty"] = {}
    state["rank0"]["memory"]["residual"]["a/b/c"] = torch.ones(2)
    tensors, metadata = flatten_state(state)
    assert all(isinstance(value, str) for value in metadata.values())
    assert same(unflatten_state(tensors, metadata), state)


@pytest.mark.parametrize(
    ("tensors", "metadata"),
    [
        ({}, {}),
        ({}, None),
        ({}, {"commhooks": "{"}),
        ({}, {"commhooks": "[1]"}),
        ({}, {"commhooks": '{"rank0": {}}'}),
        ({"rank0": torch.ones(1)}, {"commhooks": "{}"}),
        ({"rank0/residual/bias": torch.ones(1)}, {"commhooks": "{}"}),
        ({"a/b/c": torch.ones(1)}, {"commhooks": '{"a": 3}'}),
    ],
)
def test_damaged_flat_form_is_refused(tensors: Any, metadata: Any) -> None:
    with pytest.raises(CheckpointError, match="unflatten_state"):
        unflatten_state(tensors, metadata)


def test_safetensors_and_weights_only_loading_take_it(tmp_path: Any) -> None:
    state = saved()
    torch.save(state, tmp_path / "hook.pt")
    assert same(torch.load(tmp_path / "hook.pt"), state)
    safetensors = pytest.importorskip("safetensors.torch")
    tensors, metadata = flatten_state(state)
    safetensors.save_file(tensors, tmp_path / "hook.safetensors", metadata)
    with __import__("safetensors").safe_open(tmp_path / "hook.safetensors", "pt") as file:
        loaded = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        assert same(unflatten_state(loaded, file.metadata()), state)


# ---- what becomes of memory that differs between ranks on another number of them


@pytest.mark.parametrize(("old", "new"), [(4, 2), (2, 3), (3, 1), (1, 4)])
@pytest.mark.parametrize(
    ("scheme", "key", "law"),
    [
        (ErrorFeedback(TopK(0.1)), "residual", "sum"),
        (make("onebit_adam", freeze_step=1), "residual", "sum"),
        (DGC(0.1), "dgc.momentum", "sum"),
        (DGC(0.1), "dgc.unsent", "sum"),
        (EF21(TopK(0.1)), "ef21.own", "mean"),
        (DeMo(4), "demo.momentum", "mean"),
        (AveragedFeedback(Blockwise("int4")), "averaged_error", "drop"),
        (make("onebit_adam", freeze_step=1), "onebit_adam.momentum", "same"),
        (IntSGD(), "intsgd.norm", "same"),
        (EF21(TopK(0.1)), "ef21.total", "same"),
    ],
)
def test_memory_on_another_number_of_ranks(
    scheme: Scheme, key: str, law: str, old: int, new: int
) -> None:
    shape = (300,)
    ranks = Simulation(scheme, {"p": shape}, world_size=old)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        ranks.step([torch.randn(shape, generator=generator) for _ in range(old)])
    per_rank = {k: rule for one in walk(scheme) for k, rule in one.per_rank.items()}
    states = []
    for rank, engine in enumerate(ranks.engines):
        memory: dict[str, dict[str, Tensor]] = {}
        for stored, name, value in engine.memory.items():
            memory.setdefault(stored, {})[name] = value.clone()
        states.append(saved(rank, old) | {f"rank{rank}": {"rank": rank, "memory": memory}})
    before = [state[f"rank{rank}"]["memory"][key]["p"] for rank, state in enumerate(states)]
    after = [memory_for_rank(states, rank, new, per_rank)[1] for rank in range(new)]
    if law == "drop":
        assert all(key not in memory for memory in after)
        return
    values = [memory[key].get("p", torch.zeros(shape)) for memory in after]
    if law == "sum":
        torch.testing.assert_close(torch.stack(values).sum(0), torch.stack(before).sum(0))
    elif law == "mean":
        for value in values:
            torch.testing.assert_close(value, torch.stack(before).mean(0))
    else:
        assert all(torch.equal(one, before[0]) for one in (*before, *values))
    if scheme == EF21(TopK(0.1)) and key == "ef21.own":  # what was applied is still their mean
        total = after[0]["ef21.total"]["p"]
        torch.testing.assert_close(torch.stack(values).mean(0), total)
