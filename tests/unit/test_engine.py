"""Engines: gradients that schemes do not see, and when a step is over and committed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from commhooks import ErrorFeedback, PerParameter, Rule, Schedule, Scheme
from commhooks.core import Bucket, Layout, SchemeExchange, Slot
from commhooks.hook._coalesce import Coalescer, FindLayout
from commhooks.hook._engine import Engine
from commhooks.schemes import Dense, Noop, TopK
from commhooks.wrappers import PeriodicDense
from ddp_core import Exchange, simulate

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
