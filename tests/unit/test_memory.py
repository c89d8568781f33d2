"""Memory: found by parameter name, kept if the step was good."""

import pytest
import torch
from torch import Tensor

from commhooks.core import Layout, Memory

CPU = torch.device("cpu")
GOOD, BAD = torch.tensor(True), torch.tensor(False)
AB = Layout(["a", "b"], [(2,), (3,)])
BC = Layout(["b", "c"], [(3,), (2, 2)])
B = Layout(["b"], [(3,)])


def filled(layout: Layout, start: float = 1.0) -> Tensor:
    return torch.arange(layout.numel, dtype=torch.float32) + start


def memory_with(layout: Layout, start: float = 1.0) -> Memory:
    memory = Memory()
    memory.write("r", layout, filled(layout, start))
    memory.commit(GOOD)
    return memory


def step(memory: Memory, layout: Layout, value: float, good: Tensor = GOOD) -> Tensor:
    """Reads, fills a scratch and writes it, as error feedback does."""
    old = memory.read("r", layout, device=CPU)
    new = memory.scratch("r", layout, like=old)
    assert new.data_ptr() != old.data_ptr()
    new.fill_(value)
    memory.write("r", layout, new)
    memory.commit(good)
    return new


def test_writes_count_from_the_commit_on() -> None:
    memory = Memory()
    memory.write("r", AB, filled(AB))
    assert not memory.has("r")
    memory.commit(GOOD)
    assert memory.get("r", "b").tolist() == [3, 4, 5]


def test_a_bad_step_and_one_that_is_dropped_change_nothing() -> None:
    memory = memory_with(AB)
    memory.write("r", AB, torch.full((5,), 9.0))
    memory.commit(BAD)
    memory.for_step().write("r", AB, torch.full((5,), 9.0))
    memory.commit(GOOD)
    assert torch.equal(memory.read("r", AB, device=CPU), filled(AB))


def test_another_order_and_split_finds_values_by_name() -> None:
    memory = memory_with(AB)
    assert memory.read("r", BC, device=CPU).tolist() == [3, 4, 5, 0, 0, 0, 0]
    assert memory.get("r", "a").tolist() == [1, 2]  # its bucket is gone, it is not
    both = Layout(["c", "a", "b"], [(2, 2), (2,), (3,)])
    assert memory.read("r", both, device=CPU).tolist() == [0, 0, 0, 0, 1, 2, 3, 4, 5]


def test_a_value_of_another_shape_starts_anew() -> None:
    memory = memory_with(AB)
    other = Layout(["b"], [(4,)])
    initial = memory.read("r", other, device=CPU, initial=lambda name, shape: torch.ones(shape))
    assert initial.tolist() == [1, 1, 1, 1]


def test_missing_values_start_as_told() -> None:
    memory = memory_with(B)
    read = memory.read("r", BC, device=CPU, initial=lambda name, shape: torch.full(shape, 7.0))
    assert read.tolist() == [1, 2, 3, 7, 7, 7, 7]


def test_overlapping_layouts_written_in_turn_keep_the_latest() -> None:
    memory = memory_with(AB)
    for round_, layout in enumerate([BC, AB, B, BC]):
        step(memory, layout, float(round_ + 10))
    assert memory.get("r", "a").tolist() == [11, 11]
    assert memory.get("r", "b").tolist() == [13, 13, 13]
    assert {name for _, name, _ in memory.items()} == {"a", "b", "c"}


def test_writing_a_layout_that_was_never_read_takes_over_its_parameters() -> None:
    memory = memory_with(AB)
    memory.write("r", BC, filled(BC, 20))
    memory.commit(GOOD)
    assert memory.get("r", "a").tolist() == [1, 2]
    assert memory.get("r", "b").tolist() == [20, 21, 22]


@pytest.mark.parametrize("good", [GOOD, BAD], ids=["good", "bad"])
def test_scratch_is_never_a_live_tensor(good: Tensor) -> None:
    memory = memory_with(AB)
    for value in range(6):
        before = {name: kept.clone() for _, name, kept in memory.items()}
        scratch = memory.scratch("r", AB, like=memory.read("r", AB, device=CPU))
        scratch.fill_(torch.nan)
        assert all(torch.equal(before[name], kept) for _, name, kept in memory.items())
        scratch.fill_(float(value))
        memory.write("r", AB, scratch)
        memory.commit(good)


@pytest.mark.parametrize("good", [GOOD, BAD])
def test_a_scratch_is_not_what_was_read_and_written_back(good: Tensor) -> None:
    memory = memory_with(AB)
    old = memory.read("r", AB, device=CPU)
    memory.scratch("r", AB, like=old)  # from now on buffers of this key are spared
    memory.write("r", AB, old.view(-1))  # a view, as ``Bucket.write`` stages it
    memory.commit(good)
    memory.scratch("r", AB, like=old).fill_(torch.nan)
    assert torch.equal(memory.read("r", AB, device=CPU), filled(AB))


def test_two_scratches_of_one_step_are_two_tensors() -> None:
    memory = memory_with(AB)
    step(memory, AB, 2.0)
    like = memory.read("r", AB, device=CPU)
    assert memory.scratch("r", AB, like).data_ptr() != memory.scratch("r", AB, like).data_ptr()


def test_the_freed_buffer_is_the_next_scratch() -> None:
    memory = memory_with(AB)
    first = memory.read("r", AB, device=CPU)
    step(memory, AB, 2.0)
    assert memory.scratch("r", AB, like=first).data_ptr() == first.data_ptr()


def test_removing_forgets_only_after_a_good_step() -> None:
    memory = memory_with(AB)
    memory.write("r", AB, None)
    memory.commit(BAD)
    assert memory.get("r", "a") is not None
    memory.write("r", AB, None)
    memory.commit(GOOD)
    assert not memory.has("r")
    assert list(memory.items()) == []


def test_a_flush_leaves_what_is_kept_of_a_parameter_that_was_left_alone() -> None:
    memory = memory_with(AB)
    memory.write("r", AB, None)
    memory.commit(GOOD, unused=["b"])
    a, b = AB.views(memory.read("r", AB, device=CPU))
    assert not a.any()
    assert torch.equal(b, AB.views(filled(AB))[1])


def test_a_parameter_left_alone_at_first_begins_with_its_initial_value() -> None:
    memory = Memory()
    memory.write("q", AB, filled(AB))
    memory.commit(GOOD, unused=["a"])
    assert memory.get("q", "a") is None
    assert [name for _, name, _ in memory.items()] == ["b"]
    read = memory.read("q", AB, device=CPU, initial=lambda name, shape: torch.full(shape, 7.0))
    a, b = AB.views(read)
    assert a.tolist() == [7.0, 7.0]
    assert torch.equal(b, AB.views(filled(AB))[1])


class OnDevice(torch.Tensor):
    """A CPU tensor that claims to be on a GPU, where the verdict is not looked at."""

    device = property(lambda self: torch.device("cuda"))


@pytest.mark.parametrize("before", [None, 4.0])
def test_a_verdict_on_the_device_keeps_what_was_there_without_a_read(before: float | None) -> None:
    memory = Memory()
    if before is not None:
        memory.load({"r": {"b": torch.full((3,), before)}})
    memory.write("r", AB, torch.full((5,), torch.nan))
    memory.commit(BAD.as_subclass(OnDevice))
    assert memory.get("r", "b").tolist() == [before or 0.0] * 3
    memory.write("r", AB, torch.full((5,), 8.0))
    memory.commit(GOOD.as_subclass(OnDevice))
    assert memory.get("r", "a").tolist() == [8.0, 8.0]


def test_items_loaded_are_items_saved() -> None:
    memory, other = memory_with(AB), Memory()
    memory.write("q", B, filled(B, 30))
    memory.commit(GOOD)
    saved: dict[str, dict[str, Tensor]] = {}
    for key, name, value in memory.items():
        saved.setdefault(key, {})[name] = value.clone()
    other.load(saved)
    assert [(k, n, v.tolist()) for k, n, v in other.items()] == [
        (k, n, v.tolist()) for k, n, v in memory.items()
    ]
    assert torch.equal(other.read("r", AB, device=CPU), filled(AB))


def test_dropping_a_key_leaves_the_others() -> None:
    memory = memory_with(AB)
    memory.write("q", B, filled(B))
    memory.commit(GOOD)
    memory.drop("r")
    assert [key for key, _, _ in memory.items()] == ["q"]


def test_bytes_held_include_spare_and_loaded_values() -> None:
    memory = memory_with(AB)
    assert memory.nbytes() == 20
    step(memory, AB, 2.0)
    assert memory.nbytes() == 40
    loaded = Memory()
    loaded.load({"r": {"a": torch.zeros(2)}})
    assert loaded.nbytes() == 8


def test_layouts_are_equal_by_names_and_shapes() -> None:
    assert Layout(["a"], [(2, 3)]) == Layout(["a"], [torch.Size((2, 3))])
    assert Layout(["a"], [(2, 3)]) != Layout(["a"], [(3, 2)])
    views = BC.views(filled(BC))
    assert [tuple(view.shape) for view in views] == [(3,), (2, 2)]
    assert BC.pick([1]).names == ("c",)


def test_nothing_is_spared_for_a_key_that_nobody_asks_a_scratch_of() -> None:
    memory = Memory()
    for value in (1.0, 2.0, 3.0):
        memory.write("q", AB, filled(AB, value))
        memory.commit(GOOD if value != 2.0 else BAD)
    assert memory.nbytes() == 4 * AB.numel
