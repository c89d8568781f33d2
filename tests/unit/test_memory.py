"""State that schemes keep by parameter (``Memory``), which changes only with a good step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from commhooks import ErrorFeedback, PerParameter, Rule, Schedule, Scheme
from commhooks.core import Bucket, Layout, Memory, SchemeExchange, Slot
from commhooks.hook._coalesce import Coalescer, FindLayout
from commhooks.hook._engine import Engine
from commhooks.schemes import Dense, Noop, TopK
from commhooks.wrappers import PeriodicDense
from ddp_core import Exchange, simulate

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


def test_missing_values_start_at_the_given_value() -> None:
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


LAYOUT = Layout(["a"], [(4, 1)])


@pytest.mark.parametrize(
    ("scheme", "averaged"),
    [
        (Noop(), False),
        (Dense(), True),
        (Schedule([(0, Dense()), (100, Noop())]), True),
        (PeriodicDense(Noop(), every=2), True),
    ],
    ids=["noop", "dense", "schedule", "periodic"],
)
@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "complex"])
def test_they_stay_local_only_under_a_scheme_without_exchanges(
    scheme: Scheme, averaged: bool, sparse: bool
) -> None:
    exchanges = []
    for rank in range(2):
        engine = Engine(scheme, rank=rank, world_size=2)
        engine.begin_bucket(0, is_last=True)
        if sparse:
            grad = torch.sparse_coo_tensor([[0]], [[float(rank)]], (4, 1), check_invariants=True)
        else:
            grad = torch.full((4,), float(rank), dtype=torch.complex64)
        exchanges.append(engine.exchange(grad, LAYOUT))
    means = [float((mean.to_dense() if sparse else mean.real)[0]) for mean in simulate(exchanges)]
    assert means == ([0.5, 0.5] if averaged else [0.0, 1.0])


class Knows(Dense):
    """A scheme that says whether its result is finite."""

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        result = yield from super().exchange(bucket)
        return result._replace(finite=result.mean.isfinite().all())


class Counts(Dense):
    """A scheme that keeps the number of its steps."""

    keeps = (Slot("count"),)

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        bucket.write(self.keeps[0], bucket.read(self.keeps[0]) + 1)
        return (yield from super().exchange(bucket))


def counted(engine: Engine) -> list[float]:
    return [float(value.max()) for _, _, value in engine.memory.items()]


def test_a_part_that_does_not_say_whether_it_is_finite_is_looked_at() -> None:
    both = Layout(["a", "b"], [(2,), (2,)])
    engine = Engine(PerParameter([Rule(Counts(), name="b")], Knows()), rank=0, world_size=1)
    for value, count in ((1.0, 1.0), (torch.nan, 1.0), (1.0, 2.0)):
        engine.begin_bucket(0, is_last=True)
        simulate([engine.exchange(torch.tensor([1.0, 1.0, 1.0, value]), both)])
        assert counted(engine) == [count]


def test_a_step_with_a_bucket_that_failed_commits_nothing() -> None:
    class Breaks(Exception):
        pass

    engine = Engine(Counts(), rank=0, world_size=1)
    for failing in (False, True, False):
        engine.begin_bucket(0)
        engine.begin_bucket(1, is_last=True)
        simulate([engine.exchange(torch.ones(4), LAYOUT)])
        other = engine.exchange(torch.ones(4), Layout(["b"], [(4, 1)]))
        next(other)
        with pytest.raises(Breaks if failing else StopIteration):
            other.throw(Breaks()) if failing else other.send(torch.ones(4))
        assert counted(engine) == ([2.0, 2.0] if engine.step == 3 else [1.0, 1.0])


def test_an_abandoned_step_that_finishes_late_does_not_end_the_next_one() -> None:
    engine = Engine(ErrorFeedback(TopK(0.25)), rank=0, world_size=1)
    layouts = [Layout([name], [(400,)]) for name in "ab"]

    def start(index: int, *, is_last: bool) -> object:
        engine.begin_bucket(index, is_last=is_last)
        exchange = engine.exchange(torch.arange(400.0), lambda: layouts[index])
        return exchange, next(exchange)

    late, request = start(0, is_last=False)  # backward raises here
    first, first_request = start(0, is_last=False)
    with pytest.raises(StopIteration):
        late.send(request.combine([request])[0])
    last, last_request = start(1, is_last=True)
    with pytest.raises(StopIteration):
        last.send(last_request.combine([last_request])[0])
    assert engine.step == 0, "bucket 0 is still under way"
    with pytest.raises(StopIteration):
        first.send(first_request.combine([first_request])[0])
    assert (engine.step, engine.under_way) == (1, False)
    assert engine.memory.get("residual", "a") is not None


@pytest.mark.parametrize("kind", ["complex", "sparse"])
def test_a_bad_uncompressed_bucket_counts_too(kind: str) -> None:
    engine = Engine(ErrorFeedback(TopK(0.25)), rank=0, world_size=1)
    bad = torch.full((3,), math.inf)
    other = torch.complex(bad, bad) if kind == "complex" else bad.to_sparse()
    for index in range(2):
        engine.begin_bucket(index, is_last=index == 1)
    simulate([engine.exchange(torch.arange(4.0), lambda: Layout(["a"], [(4,)]))])
    simulate([engine.exchange(other, lambda: Layout(["b"], [(3,)]))])
    assert engine.skipped == 1
    assert not engine.memory.get("residual", "a").any()


# ---- held buckets, exchanged in other groups than they came in


SIZES = {"a": 1, "b": 2, "c": 5}


def layout_of(names: list[str], dtype: torch.dtype) -> Layout:
    """As ``Parameters`` describes them: a complex parameter has pairs of reals."""
    pair = (2,) if dtype.is_complex else ()
    return Layout(names, [(SIZES[name], *pair) for name in names])


def doubled(flat: Tensor, find_layout: FindLayout) -> Exchange:
    yield from ()
    return flat * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_parameters_are_exchanged_in_other_buckets_and_come_back(dtype: torch.dtype) -> None:
    coalescer, buffers = Coalescer(), [torch.arange(3).to(dtype), torch.arange(3, 8).to(dtype)]
    for index, names in enumerate([["a", "b"], ["c"]]):
        layout = layout_of(names, dtype)
        coalescer.hold(index, buffers[index], lambda layout=layout: layout)
    groups = coalescer.groups_like([("b", "c"), ("a",)], merged=False)
    assert groups is not None
    seen = []
    for group in groups:
        with pytest.raises(StopIteration) as end:
            next(group.exchange(doubled))
        seen.append((end.value.value.real / 2).tolist())
    assert seen == [[1, 2, 3, 4, 5, 6, 7], [0]]
    assert torch.cat(buffers).real.tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
