"""Buckets with more entries than a scheme takes are exchanged in parts, cut between parameters."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import commhooks
import ddp_core
from commhooks.core import Layout, Traits
from commhooks.hook._coalesce import Coalescer
from commhooks.hook._engine import Engine
from commhooks.hook._exchanges import ExchangeLauncher
from commhooks.wrappers._base import Wrapper
from ddp_core import simulate
from tests.shelf import BUILT_IN
from tests.tools.harness import on_ranks
from tests.tools.training import (
    batch,
    equal_bits,
    equal_on_all_ranks,
    gradients,
    mlp,
    train,
)

LIMITED = [name for name in BUILT_IN if commhooks.make(name).traits.max_bucket_numel < sys.maxsize]
MOST = 16 * 16  # a weight of the model; its bias has a part of its own


@dataclass(frozen=True)
class Small(Wrapper):
    """Takes few entries at a time."""

    scheme: commhooks.Scheme
    most: int = MOST

    @property
    def traits(self) -> Traits:
        return self.scheme.traits._replace(max_bucket_numel=self.most)

    def exchange(self, bucket: Any) -> Any:
        assert bucket.raw.numel() <= self.most or len(bucket.layout) == 1
        return (yield from self.scheme.exchange(bucket))


def test_schemes_whose_places_are_32_bits_declare_it() -> None:
    expected = {"topk", "random_k", "dgc", "demo"}
    assert set(LIMITED) == expected
    for name in expected:
        scheme = commhooks.make(name, start_step=3) if name != "dgc" else commhooks.make(name)
        assert scheme.traits.max_bucket_numel <= 2**31
    assert commhooks.make("powersgd").traits.max_bucket_numel == sys.maxsize


def _model(core: bool, bucket_mb: float, options: dict[str, Any]) -> Any:
    kind = ddp_core.DistributedDataParallel if core else DistributedDataParallel
    return kind(mlp(), bucket_cap_mb=bucket_mb, **options)


SHAPES = {"a": (16, 16), "b": (16,), "c": (8, 32), "d": (1,)}


@pytest.mark.parametrize("name", LIMITED)
def test_a_cut_bucket_gives_what_small_buckets_give(name: str) -> None:
    scheme = commhooks.make(name)
    small = commhooks.Simulation(scheme, SHAPES, world_size=2)
    cut = commhooks.Simulation(Small(scheme, 1), SHAPES, world_size=2)
    generator = torch.Generator().manual_seed(0)
    buckets = [Layout([name], [shape]) for name, shape in SHAPES.items()]
    for _ in range(4):
        grads = [torch.randn(small.layout.numel, generator=generator) for _ in range(2)]
        assert equal_bits([*small.step(grads, buckets=buckets), *cut.step(grads)])
    assert cut.buckets == [(name,) for name in SHAPES]
    for rank in range(2):
        expected = [(key, name, value) for key, name, value in small.engines[rank].memory.items()]
        for key, name, value in expected:
            assert equal_bits([value, cut.engines[rank].memory.get(key, name)])


@on_ranks(2)
def test_coalesced_buckets_are_cut_too(rank: int) -> None:
    scheme = Small(commhooks.make("topk", ratio=0.1, coalesce=True))
    model = _model(True, 1e-3, {})
    hook = commhooks.register(model, scheme)
    train(model, rank, range(3))
    assert equal_on_all_ranks(gradients(model))
    assert len(hook.report().query("step == 2")) == 6  # three weights, three biases


def test_a_large_parameter_is_a_part_of_its_own() -> None:
    ranks = commhooks.Simulation(
        Small(commhooks.make("topk"), 10),
        {"a": (4,), "b": (6,), "c": (30,), "d": (1,)},
        world_size=2,
    )
    ranks.step([torch.randn(41) for _ in range(2)])
    assert ranks.buckets == [("a", "b"), ("c",), ("d",)]


@on_ranks(1)
def test_the_timeline_has_the_rounds_of_all_parts(rank: int) -> None:
    model = _model(True, 25, {})
    commhooks.register(model, Small(commhooks.make("topk", ratio=0.1)))
    model(batch(0, rank, 4, 16)).square().mean().backward()
    assert [len(bucket.rounds) for bucket in model.timeline.steps[-1].buckets] == [6]


@on_ranks(2)
def test_parts_outside_of_backward_are_one_step() -> None:
    """Hands a bucket to the hook itself, as hosts without a backward pass do."""
    model, start = mlp(), ExchangeLauncher.start

    def start_and_wait(*arguments: Any, **options: Any) -> Any:
        future = start(*arguments, **options)
        future.wait()  # a part that ends a step has done so when the next one begins
        return future

    hook = commhooks.HookState(Small(commhooks.make("topk", ratio=0.1)), model)
    with mock.patch.object(ExchangeLauncher, "start", start_and_wait):
        for _ in range(3):
            values = list(model.parameters())
            buffer = torch.cat([value.detach().reshape(-1) for value in values])
            hook.start(ddp_core.GradBucket(0, buffer, values)).wait()
    assert hook.step == 3


@dataclass(frozen=True)
class Noting(Small):
    """Notes where its buckets lie."""

    places: Any = None

    def exchange(self, bucket: Any) -> Any:
        self.places.append(bucket.raw.data_ptr())
        return (yield from super().exchange(bucket))


def test_parts_are_not_copied() -> None:
    layout = Layout(["a", "b", "c"], [(4,), (6,), (30,)])
    buffer, places = torch.randn(40), []
    parts = Coalescer(10)
    parts.hold(0, buffer, lambda: layout)
    engine = Engine(Noting(commhooks.make("none"), 10, places), rank=0, world_size=1)
    for part in parts.one_by_one():
        engine.begin_bucket(part)
        simulate([part.exchange(engine.exchange)])
    begin = buffer.data_ptr()
    assert places == [begin, begin + 10 * 4]
