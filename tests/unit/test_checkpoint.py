"""The saved form of a hook's state: what is refused, what moves to other ranks, what is lost."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import commhooks
from commhooks import ErrorFeedback, PerParameter, Rule, Scheme, Simulation, make
from commhooks.checkpoint import flatten_state, unflatten_state
from commhooks.checkpoint._format import (
    CHECKSUM_FIELDS,
    FORMAT,
    VERSION,
    checksum,
    read,
    read_memory,
)
from commhooks.checkpoint._memory import check_complete, check_memory
from commhooks.checkpoint._ranks import (
    memory_for_rank,
    needed_ranks,
    resizes_of,
    structure,
    with_local_shards,
)
from commhooks.core._scheme import slots_of
from commhooks.core._slot import StepInfo
from commhooks.errors import CheckpointError
from commhooks.research.baselines import IntSGD
from commhooks.schemes import DGC, Blockwise, DeMo, Dense, PowerSGD, TopK
from commhooks.wrappers import (
    EF21,
    AveragedFeedback,
    Cast,
    Coalesced,
    DelayedStart,
    FlushResidual,
    Guard,
)
from tests.tools.training import same, sealed

SHAPES = {"weight": torch.Size([6, 5]), "bias": torch.Size([6])}
SCHEME = ErrorFeedback(PowerSGD(rank=1, min_compression_rate=0))
PER_RANK = resizes_of(SCHEME)
NOW = StepInfo()
DECLARED: dict[str, dict[str, Tensor]] = {}
for _name, _shape in SHAPES.items():
    for _slot in slots_of(SCHEME):
        if (_kept := _slot.shape(_shape)) is not None:
            _first = _slot.initial(_name, torch.Size(_kept), NOW)
            assert _first is not None
            DECLARED.setdefault(_slot.key, {})[_name] = _first


def residual(rank: int) -> dict[str, Tensor]:
    return {name: torch.full(shape, float(rank + 1)) for name, shape in SHAPES.items()}


def saved(rank: int = 0, world_size: int = 1, first: int = 0, stride: int = 1) -> dict[str, Any]:
    """The state of a rank of a group, whose ranks within the job are ``first``, and so on."""
    global_rank = first + stride * rank
    memory = {"residual": residual(rank), "powersgd.q": {"weight": torch.ones(1, 5)}}
    part = {"rank": rank, "global_rank": global_rank, "leader": first, "memory": memory}
    part["arrival"] = ["bias", "weight"]
    return sealed(
        {
            "format": FORMAT,
            "version": VERSION,
            "commhooks": "0",
            "torch": "2",
            "scheme": repr(SCHEME),
            "structure": structure(SCHEME),
            "step": 7,
            "seed": 3,
            "world_size": world_size,
            "layout": [["weight"], ["bias"]],
            "bucket_bytes": [4096],
            "plan": "",
            f"rank{global_rank}": part,
        }
    )


def of_version_one(state: dict[str, Any]) -> dict[str, Any]:
    """As the first release saved it: ranks of the group as keys, no checksum, no layout."""
    old = {field: state[field] for field in state if not field.startswith("rank")}
    del old["layout"], old["bucket_bytes"], old["plan"]
    for field, part in state.items():
        if field.startswith("rank"):
            old[f"rank{part['rank']}"] = {"rank": part["rank"], "memory": part["memory"]}
    return {**old, "version": 1}


def merged(*states: dict[str, Any]) -> dict[str, Any]:
    return {field: value for state in states for field, value in state.items()}


# ---- what is refused


def dropped(field: str) -> Callable[[dict[str, Any]], Any]:
    return lambda state: {key: value for key, value in state.items() if key != field}


def replaced(field: str, value: object) -> Callable[[dict[str, Any]], Any]:
    return lambda state: {**state, field: value}


def in_part(field: str, value: object) -> Callable[[dict[str, Any]], Any]:
    return lambda state: {**state, "rank0": {**state["rank0"], field: value}}


def in_memory(value: object) -> Callable[[dict[str, Any]], Any]:
    return in_part("memory", {"residual": {"bias": value}})


def without(field: str) -> Callable[[dict[str, Any]], Any]:
    return lambda state: {
        **state,
        "rank0": {name: state["rank0"][name] for name in state["rank0"] if name != field},
    }


# Fields of a state and of a rank's part, with values that are refused, and the words.
FIELDS: dict[str, tuple[tuple[Any, ...], str]] = {
    "format": (("torch",), "not a hook state"),
    "version": ((0, "one", True), "version (0|'one'|True)"),
    "step": (("7", -1, True, 2**80, 2**63 - 1), "'step' is a whole number"),
    "seed": ((2**64, 0.5), "'seed' is a whole number"),
    "bucket_bytes": ((["9"], 4096), "'bucket_bytes' is a list"),
    "world_size": ((0, torch.ones(()), 2**40), "'world_size' is a whole number"),
    "scheme": ((3,), "'scheme' is text"),
    "layout": ((None, ["weight"], [[1]]), "'layout' is a list"),
    "rank0": (("gone",), "'rank0' is 'gone'"),
}
PART_FIELDS: dict[str, tuple[tuple[Any, ...], str]] = {
    "global_rank": ((1, False), "mixed up"),
    "rank": ((1, -1), "of rank (1 of a group of 1|-1)"),
    "leader": ((5,), "led by rank 5"),
    "arrival": (("weight", [0, 1]), "'arrival' of 'rank0' is a list"),
    "placement": (("all", [[]], [["", 0]]), "'placement' of 'rank0' is a list"),
    "checksum": ((None, "0" * 64), "checksum of 'rank0' is wrong"),
    "memory": (({5: {}}, {"q": {5: torch.ones(1)}}), "hold tensors by parameter name"),
}
DAMAGED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    **{
        f"{field} {str(value)[:20]}": (damage(field, value), words)
        for damage, table in ((replaced, FIELDS), (in_part, PART_FIELDS))
        for field, (values, words) in table.items()
        for value in values
    },
    "a model's state": (lambda _: {"layer.weight": torch.ones(2)}, "not a hook state"),
    "a whole checkpoint": (lambda state: {"model": {}, "hook": state}, r"state\['hook'\]$"),
    "nothing": (lambda _: None, "NoneType"),
    "a number": (lambda _: 5, "int"),
    "a list of numbers": (lambda _: [1, 2], "int"),
    "an empty list": (lambda _: [], "empty"),
    "newer": (replaced("version", VERSION + 1), "update commhooks"),
    "no step": (dropped("step"), "lacks .*step"),
    "no structure": (dropped("structure"), "lacks .*structure"),
    "another rank's": (lambda state: {}, "is empty: of state_dict.* only that rank has it"),
    "a name twice in the layout": (replaced("layout", [["bias"], ["bias"]]), "no name twice"),
    "no rank's memory": (dropped("rank0"), "no rank's part"),
    "a rank without memory": (replaced("rank0", {"rank": 0}), "lacks memory"),
    "a memory that is none": (replaced("rank0", {"rank": 0, "memory": None}), "lacks its values"),
    "a rank without place": (without("leader"), "lacks leader"),
    "a checksum that was left out": (without("checksum"), "lacks checksum"),
    "another arrival": (in_part("arrival", ["weight", "bias"]), "checksum of 'rank0' is wrong"),
    "no arrival": (in_part("arrival", []), "checksum of 'rank0' is wrong"),
    "a placement": (in_part("placement", [["p", "bias"]]), "checksum of 'rank0' is wrong"),
    "no memory": (in_part("memory", {}), "checksum of 'rank0' is wrong"),
    "a checksum in version 1": (replaced("version", 1), "checksum of 'rank0' is wrong"),
    "numbers for tensors": (in_memory(3), "does not hold tensors"),
    "a sparse tensor": (in_memory(torch.zeros(6).to_sparse()), "layout is torch.sparse_coo"),
    "a tensor without values": (in_memory(torch.zeros(6, device="meta")), "meta device"),
    "a complex tensor": (in_memory(torch.zeros(6, dtype=torch.complex64)), "torch.complex64"),
    "a tensor that claims entries": (in_memory(torch.zeros(1).expand(10**12)), "share memory"),
    "two checkpoints": (lambda state: [state, {**state, "step": 8}], "not of one checkpoint"),
    "two layouts": (lambda state: [state, {**state, "layout": []}], "not of one checkpoint"),
}


@pytest.mark.parametrize("which", DAMAGED)
def test_a_damaged_or_foreign_state_is_refused_and_left_alone(which: str) -> None:
    damage, message = DAMAGED[which]
    given = damage(saved())
    before = dict(given) if isinstance(given, dict) else given
    with pytest.raises(CheckpointError, match=message) as caught:
        memory_for_rank(given, 0, 1, PER_RANK)
    assert len(str(caught.value)) < 500
    if isinstance(given, dict):
        assert given.keys() == before.keys()
        assert all(given[key] is before[key] for key in given)


@pytest.mark.parametrize("field", CHECKSUM_FIELDS)
def test_every_field_is_under_the_checksum(field: str) -> None:
    other: dict[str, Any] = {
        "layout": [["bias"], ["weight"]],
        "bucket_bytes": [8192],
        "world_size": 3,
        "version": 1,
    }
    state = saved(0, 2)
    state[field] = other.get(field, 9 if field in ("step", "seed") else "another")
    with pytest.raises(CheckpointError):
        read(state)
    del state[field]
    with pytest.raises(CheckpointError):
        read(state)


@pytest.mark.parametrize("key", ["residual", "powersgd.q"])
def test_every_bit_of_every_tensor_is_under_the_checksum(key: str) -> None:
    state = saved()
    for value in state["rank0"]["memory"][key].values():
        data = value.view(-1).view(torch.uint8)
        for place in range(len(data)):
            data[place] ^= 1
            with pytest.raises(CheckpointError, match="checksum"):
                read(state)
            data[place] ^= 1
    read(state)


def test_shapes_dtypes_and_names_are_under_the_checksum() -> None:
    changes: list[Callable[[dict[str, Tensor]], Any]] = [
        lambda values: values.update(weight=values["weight"].view(5, 6)),
        lambda values: values.update(weight=values["weight"].view(torch.int32)),
        lambda values: values.update(other=values.pop("weight")),
        lambda values: values.update(weight=values["weight"][:5]),
        lambda values: values.pop("bias"),
    ]
    for change in changes:
        state = saved()
        change(state["rank0"]["memory"]["residual"])
        with pytest.raises(CheckpointError, match="checksum"):
            read(state)


def test_the_bytes_of_a_checksum_are_those_of_the_version() -> None:
    # Whatever the scheme is printed as. The third version has the bytes of the second.
    common = {**saved(), "version": 2, "scheme": "S", "structure": "S"}
    part = common["rank0"]
    assert checksum(common, part).startswith("d8e7e8077ce326c3")
    del common["plan"]  # as before hooks that choose had their choice in the state
    assert checksum(common, part).startswith("8fd0bf2079a17a08")
    del part["arrival"]  # as before the order of gradients was in the state
    assert checksum(common, part).startswith("dc8a82c4941356e9")
    del common["bucket_bytes"]  # as before buckets had their sizes in the state
    assert checksum(common, part).startswith("59918e04c5479d3d")


def test_names_that_the_model_has_now_are_everywhere() -> None:
    new = read(saved()).renamed(lambda name: f"new.{name}")
    assert new.common["layout"] == [["new.weight"], ["new.bias"]]
    assert new.parts[0].arrival == ["new.bias", "new.weight"]
    assert set(new.parts[0].memory["residual"]) == {"new.weight", "new.bias"}


def test_a_state_of_version_one_is_taken_without_a_checksum() -> None:
    for state in (saved(), merged(saved(0, 2), saved(1, 2))):
        size = state["world_size"]
        common, memory = memory_for_rank(of_version_one(state), size - 1, size, PER_RANK)
        assert common["step"] == 7
        assert same(memory["residual"], residual(size - 1))


def test_a_part_read_into_a_template_of_version_one_is_taken() -> None:
    state = saved(0, 2)
    state["rank0"] = {"rank": 0, "memory": state["rank0"]["memory"]}
    assert same(memory_for_rank(state, 0, 2, PER_RANK)[1]["residual"], residual(0))


@pytest.mark.parametrize(
    ("given", "rank", "size", "words"),
    [
        (saved(0, 2), 1, 2, "this is rank 1, the state given is of rank 0"),
        ([saved(0, 3), saved(0, 3)], 0, 2, r"missing: ranks \[2\]"),
        ([saved(0, 3), saved(0, 3)], 1, 2, r"missing: ranks \[1\]"),
        (  # a huge number costs nothing
            *(sealed(saved(0, 1) | {"world_size": 2**31 - 1}), 0, 1),
            r"missing: ranks \[1, 2, 3, 4, 5, 6, 7, 8\] \.\.\.",
        ),
    ],
)
def test_parts_of_other_ranks_that_are_needed_are_named(
    given: Any, rank: int, size: int, words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        memory_for_rank(given, rank, size, PER_RANK)


def test_a_rank_needs_those_whose_residuals_it_takes_over() -> None:
    state = read(saved(0, 5))
    assert list(needed_ranks(state, 1, 2, PER_RANK)) == [1, 3]
    assert list(needed_ranks(state, 0, 5, PER_RANK)) == [0]
    assert list(needed_ranks(state, 6, 8, PER_RANK)) == []
    assert list(needed_ranks(state, 0, 2, {"residual": "mean"})) == [0, 1, 2, 3, 4]
    assert list(needed_ranks(state, 0, 2, {"residual": "drop"})) == []
    memory_for_rank([saved(1, 5), saved(3, 5)], 1, 2, PER_RANK)


def test_two_parts_of_one_rank_are_not_of_one_checkpoint() -> None:
    other = saved(0, 2)
    other["rank0"]["memory"]["residual"]["bias"] += 1
    with pytest.raises(CheckpointError, match="two different parts of rank 0"):
        memory_for_rank([saved(0, 2), sealed(other)], 0, 2, PER_RANK)


def test_what_no_rank_keeps_for_itself_anybody_may_load() -> None:
    state = saved(0, 4)
    del state["rank0"]["memory"]["residual"]
    sealed(state)
    for rank, size in ((3, 4), (0, 2), (6, 7)):
        _, memory = memory_for_rank(state, rank, size, PER_RANK)
        assert same(memory, {"powersgd.q": {"weight": torch.ones(1, 5)}})


def test_ranks_that_have_not_saved_may_owe_nothing() -> None:
    state = saved(1, 3)
    _, memory_alone = memory_for_rank(state, 1, 3, PER_RANK, alone=True)
    assert same(memory_alone["residual"], residual(1))
    _, other = memory_for_rank(state, 0, 3, PER_RANK, alone=True)
    assert same(other, {"powersgd.q": {"weight": torch.ones(1, 5)}})
    moved = [memory_for_rank(state, rank, 2, PER_RANK, alone=True)[1] for rank in range(2)]
    assert moved[0]["residual"] == {}
    torch.testing.assert_close(moved[1]["residual"]["bias"], residual(1)["bias"] * 2 / 3)


# ---- groups of ranks within a job


def test_groups_of_ranks_have_keys_of_their_own() -> None:
    groups = [[saved(rank, 2, first, 2) for rank in range(2)] for first in range(2)]
    for state in groups[1]:  # another shard of the model: other numbers under the same names
        for field in ("rank1", "rank3"):
            if field in state:
                state[field]["memory"]["residual"]["bias"].neg_()
        sealed(state)
    whole = merged(*groups[0], *groups[1])
    for field, value in (("rank2", 1), ("rank3", 1), ("rank1", 0)):
        assert whole[field]["rank"] == value
    for leader in range(2):
        for rank in range(2):
            _, memory = memory_for_rank(whole, rank, 2, PER_RANK, leader=leader)
            assert same(memory, whole[f"rank{leader + 2 * rank}"]["memory"])
    with pytest.raises(CheckpointError, match=r"2 groups of ranks.*0, 1; .* begins with rank 7"):
        memory_for_rank(whole, 0, 2, PER_RANK, leader=7)


def test_a_groups_state_is_taken_by_the_rank_within_the_group() -> None:
    moved = [saved(rank, 2, 5, 3) for rank in range(2)]
    for rank in range(2):
        _, memory = memory_for_rank(moved, rank, 2, PER_RANK, leader=0)
        assert same(memory["residual"], residual(rank))


def test_parts_of_other_pieces_of_the_model_are_left_out_or_refused() -> None:
    cut = [saved(rank, 2, first) for first in (0, 2) for rank in range(2)]
    for number, state in enumerate(cut):
        state[f"rank{number}"]["placement"] = [[f"piece {number // 2} of 2", "weight"]]
    states = [sealed(state) for state in cut]
    whole = read(states)
    for piece in range(2):
        fitting = with_local_shards(whole, {"new.weight": f"piece {piece} of 2"}, "new.{}".format)
        assert [part.global_rank for part in fitting.parts] == [2 * piece, 2 * piece + 1]
    for here, text in (({}, "all of it"), ({"weight": "piece 2 of 3"}, "piece 2 of 3")):
        with pytest.raises(CheckpointError, match=f"has piece 0 of 2, and this rank trains {text}"):
            with_local_shards(whole, here, str)
    # It is of whole parameters where it has no placement, but in earlier releases it did not tell.
    with pytest.raises(CheckpointError, match="has all of it, and this rank trains piece 0 of 2"):
        with_local_shards(read(saved()), {"weight": "piece 0 of 2"}, str)
    earlier = sealed({**saved(), "version": 2})
    assert with_local_shards(read(earlier), {"weight": "piece 0 of 2"}, str).parts
    turned = [["piece 1 of 2 along dimension 1, piece 0 of 3 along dimension 0", "weight"]]
    earlier["rank0"]["placement"] = turned
    here = {"weight": "piece 0 of 3 along dimension 0, piece 1 of 2 along dimension 1"}
    assert with_local_shards(read(sealed(earlier)), here, str).parts


def test_ranks_of_unlike_models_are_not_added_up() -> None:
    other = saved(1, 2)
    other["rank1"]["memory"]["residual"]["bias"] = torch.ones(2)
    sealed(other)
    with pytest.raises(CheckpointError, match="bias"):
        memory_for_rank([saved(0, 2), other], 0, 1, PER_RANK)


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([0.0, torch.nan]),
        torch.tensor([-torch.inf, 0.0]),
        torch.tensor([1e300], dtype=torch.float64),
    ],
)
def test_memory_that_is_not_finite_is_refused(value: Tensor) -> None:
    with pytest.raises(CheckpointError, match=r"bias.*not finite in float32"):
        read_memory({"residual": {"bias": value}}, "rank0", "load_state_dict")


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ({"residual": {"other": torch.ones(6)}}, "not averaged here.*other"),
        ({"residual": {"bias": torch.ones(7)}}, r"\(7,\).*\(6,\)"),
        ({"residual": {"bias": torch.ones(6, dtype=torch.int64)}}, "floating point"),
        ({"residual": {"bias": torch.ones(2, 3)}}, r"\(2, 3\).*\(6,\)"),
        ({"unheard.of": {"bias": torch.ones(6)}}, "does not keep"),
        ({"powersgd.q": {"weight": torch.ones(1, 9)}}, "powersgd.q"),
        ({"powersgd.q": {"bias": torch.ones(1, 6)}}, "matrix"),
        ({"powersgd.q": {"weight": torch.ones(1, 5, dtype=torch.bool)}}, "torch.bool"),
        ({"powersgd.q": {"weight": torch.ones(1, 5, dtype=torch.int64)}}, "torch.int64"),
        ({"powersgd.q": {"weight": torch.ones(1, 5, dtype=torch.complex64)}}, "complex64"),
        ({"powersgd.q": {"weight": torch.ones(0, 5)}}, r"\(0, 5\)"),
        ({"powersgd.q": {"weight": torch.ones(500, 5)}}, r"\(500, 5\)"),
    ],
)
def test_memory_that_does_not_fit_is_refused(
    memory: dict[str, dict[str, Tensor]], message: str
) -> None:
    for same_settings in (True, False):
        with pytest.raises(CheckpointError, match=message):
            check_memory(memory, SCHEME, SHAPES, DECLARED, same_settings=same_settings)


def test_memory_that_fits_is_taken() -> None:
    _, memory = memory_for_rank(saved(), 0, 1, PER_RANK)
    check_memory(memory, SCHEME, SHAPES, DECLARED, same_settings=True)
    check_complete(memory, SCHEME, PER_RANK, DECLARED, same_settings=True)
    memory["powersgd.q"]["weight"] = torch.ones(3, 5)  # of another rank
    check_memory(memory, SCHEME, SHAPES, DECLARED)
    with pytest.raises(CheckpointError, match=r"\(3, 5\), not \(1, 5\)"):
        check_memory(memory, SCHEME, SHAPES, DECLARED, same_settings=True)


@pytest.mark.parametrize("same_settings", [True, False])
def test_memory_that_is_missing_is_refused(same_settings: bool) -> None:
    factors = {"powersgd.q": {"weight": torch.ones(1, 5)}}
    for residuals in ({}, {"residual": {}}, {"residual": {"bias": torch.ones(6)}}):
        memory = {**factors, **residuals}
        with pytest.raises(CheckpointError, match="lacks 'residual' of"):
            check_complete(memory, SCHEME, PER_RANK, DECLARED, same_settings=same_settings)


def test_what_fills_up_pieces_need_not_be_there() -> None:
    """A unit of FSDP1 has it on some numbers of ranks only."""
    declared = {"residual": {"0.2#padding": torch.zeros(2)}}
    check_complete({}, SCHEME, PER_RANK, declared, same_settings=True)


def test_a_factor_that_is_missing_is_refused_unless_settings_say_so() -> None:
    memory = {"residual": residual(0)}
    with pytest.raises(CheckpointError, match=r"lacks 'powersgd.q' of \['weight'\]"):
        check_complete(memory, SCHEME, PER_RANK, DECLARED, same_settings=True)
    check_complete(memory, SCHEME, PER_RANK, DECLARED, same_settings=False)


@pytest.mark.parametrize("scale", [[0, 0, 128, 127], [255, 255, 255, 255]])
def test_a_memory_in_bytes_whose_scales_are_not_finite_is_refused(scale: list[int]) -> None:
    scheme, shape = AveragedFeedback(Blockwise("int4")), torch.Size([300])
    (slot,) = slots_of(scheme)
    value = slot.initial("p", torch.Size(slot.shape(shape) or ()), NOW)
    assert value is not None
    check_memory({"averaged_error": {"p": value}}, scheme, {"p": shape})
    value[4:8] = torch.tensor(scale, dtype=torch.uint8)  # of the second block
    with pytest.raises(CheckpointError, match="not finite"):
        check_memory({"averaged_error": {"p": value}}, scheme, {"p": shape})


@pytest.mark.parametrize(
    ("scheme", "key", "value"),
    [
        (IntSGD(), "intsgd.norm", torch.tensor(-1.0)),
        (Guard(SCHEME), "guard.dense_until", torch.tensor(-1.0, dtype=torch.float64)),
        (make("batched_powersgd"), "batched_powersgd.q", torch.ones(0, 5)),
        (make("batched_powersgd"), "batched_powersgd.q", torch.ones(6, 5)),
        (make("batched_powersgd"), "batched_powersgd.q", torch.ones(1, 5).long()),
    ],
)
def test_numbers_that_a_scheme_never_keeps_are_refused(
    scheme: Scheme, key: str, value: Tensor
) -> None:
    with pytest.raises(CheckpointError, match=f"{key}.*(not 0 or more|rank, side|floating)"):
        check_memory({key: {"weight": value}}, scheme, SHAPES)


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
        PowerSGD(rank=1),
        ErrorFeedback(PowerSGD(rank=1)),
        Cast(ErrorFeedback(PowerSGD(rank=1))),
        Coalesced(PowerSGD(rank=1)),
        PerParameter([], PowerSGD(rank=1)),
        PerParameter([Rule(ErrorFeedback(PowerSGD(rank=1)))], PowerSGD(rank=1)),
        PerParameter([Rule(Dense())], PowerSGD(rank=1)),
    ]
    assert len({structure(scheme) for scheme in different}) == len(different)


# ---- ranks


def test_the_same_ranks_get_their_own_back() -> None:
    for rank in range(3):
        states = [saved(i, 3) for i in range(3)]
        for state in (states[rank], states, merged(*states)):
            common, memory = memory_for_rank(state, rank, 3, PER_RANK)
            assert common["step"] == 7
            assert same(memory["residual"], residual(rank))


# ---- flat form


def test_flat_form_gives_the_state_back() -> None:
    state = saved()
    state["rank0"]["memory"]["empty"] = {}
    state["rank0"]["memory"]["residual"]["a/b/c"] = torch.ones(2)
    state["rank0"]["memory"]["a/key%"] = {"a/b": torch.ones(3)}
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
        ({}, {"commhooks": "[" * 100_000}),
        ({}, {"commhooks": "1" * 10_000}),
        ({}, {"commhooks": '{"rank0": {"keys": [[]]}}'}),
        ({}, {"commhooks": '{"rank0": {"keys": [1]}}'}),
        ({1: torch.ones(1)}, {"commhooks": "{}"}),
        ({"rank0": torch.ones(1)}, {"commhooks": "{}"}),
        ({"rank0/residual/bias": torch.ones(1)}, {"commhooks": "{}"}),
        ({"a/b/c": torch.ones(1)}, {"commhooks": '{"a": 3}'}),
    ],
)
def test_damaged_flat_form_is_refused(tensors: Any, metadata: Any) -> None:
    with pytest.raises(CheckpointError, match="unflatten_state"):
        unflatten_state(tensors, metadata)


def test_a_flat_form_of_version_one_is_read() -> None:
    old = of_version_one(saved())
    plain = {field: value for field, value in old.items() if field != "rank0"}
    plain["rank0"] = {"rank": 0, "keys": ["powersgd.q", "residual"]}
    tensors = {
        f"rank0/{key}/{name}": value
        for key, values in old["rank0"]["memory"].items()
        for name, value in values.items()
    }
    assert same(unflatten_state(tensors, {"commhooks": json.dumps(plain)}), old)


@pytest.mark.parametrize(
    "state",
    [
        None,
        {"a": object()},
        {"rank0": {}},
        {"rank0": {"memory": 1}},
        {"rank0": {"memory": {"q": {"p": torch.zeros(1).expand(10**12)}}}},
        {"rank0": {"memory": {"q": {"p": torch.eye(3).to_sparse()}}}},
    ],
)
def test_what_is_no_state_has_no_flat_form(state: Any) -> None:
    with pytest.raises(CheckpointError, match="flatten_state"):
        flatten_state(state)


# ---- what becomes of memory that differs between ranks on another number of them


@pytest.mark.parametrize(("old", "new"), [(4, 2), (2, 3), (3, 1), (1, 4)])
@pytest.mark.parametrize(
    ("scheme", "key", "resize"),
    [
        (ErrorFeedback(TopK(0.1)), "residual", "moved"),
        (make("onebit_adam", freeze_step=1), "residual", "moved"),
        (DGC(0.1), "dgc.momentum", "moved"),
        (DGC(0.1), "dgc.unsent", "moved"),
        (EF21(TopK(0.1)), "ef21.own", "mean"),
        (DeMo(4), "demo.momentum", "mean"),
        (AveragedFeedback(Blockwise("int4")), "averaged_error", "drop"),
        (make("onebit_adam", freeze_step=1), "onebit_adam.momentum", "same"),
        (IntSGD(), "intsgd.norm", "same"),
        (EF21(TopK(0.1)), "ef21.total", "same"),
    ],
)
def test_memory_on_another_number_of_ranks(
    scheme: Scheme, key: str, resize: str, old: int, new: int
) -> None:
    shape = (300,)
    ranks = Simulation(scheme, {"p": shape}, world_size=old)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        ranks.step([torch.randn(shape, generator=generator) for _ in range(old)])
    per_rank = resizes_of(scheme)
    states = []
    for rank, engine in enumerate(ranks.engines):
        memory: dict[str, dict[str, Tensor]] = {}
        for stored, name, value in engine.memory.items():
            memory.setdefault(stored, {})[name] = value.clone()
        part = {"rank": rank, "global_rank": rank, "leader": 0, "memory": memory}
        states.append(sealed(saved(rank, old) | {f"rank{rank}": part}))
    before = [state[f"rank{rank}"]["memory"][key]["p"] for rank, state in enumerate(states)]
    given = copy.deepcopy(states)
    after = [memory_for_rank(states, rank, new, per_rank)[1] for rank in range(new)]
    assert all(map(same, states, given))
    whole = memory_for_rank(merged(*states), new - 1, new, per_rank)[1]
    assert same(whole, after[-1])
    if resize == "drop":
        assert all(key not in memory for memory in after)
        return
    values = [memory[key].get("p", torch.zeros(shape)) for memory in after]
    if resize != "same":  # whatever moves where: their mean is what training applies
        torch.testing.assert_close(torch.stack(values).mean(0), torch.stack(before).mean(0))
    if resize == "moved":
        for rank, value in enumerate(values):
            taken_over = [before[i] for i in range(rank, old, new)]
            expected = sum(taken_over, torch.zeros(shape)) * (new / old)
            torch.testing.assert_close(value, expected)
    elif resize == "mean":
        for value in values:
            torch.testing.assert_close(value, torch.stack(before).mean(0))
    else:
        assert all(torch.equal(value, before[0]) for value in (*before, *values))
    if scheme == EF21(TopK(0.1)) and key == "ef21.own":  # what was applied is still their mean
        total = after[0]["ef21.total"]["p"]
        torch.testing.assert_close(torch.stack(values).mean(0), total)


@pytest.mark.usefixtures("one_rank")
def test_a_folder_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    hook = commhooks.HookState("int8")
    hook.call_monitor.disable()  # else it warns that no gradient came
    with pytest.raises(CheckpointError, match=f"load_dcp: {tmp_path} has no checkpoint"):
        commhooks.load_dcp(hook, tmp_path)
    hook.close()
