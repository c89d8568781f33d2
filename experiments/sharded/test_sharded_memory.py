"""The formula of memory in FSDP2, on many simulated ranks."""

from __future__ import annotations

import weakref
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from commhooks.core import Layout
from commhooks.core._layout import equal_shards
from commhooks.hook._engine import Engine
from ddp_core import simulate
from experiments.sharded.memory import SCHEMES, formula


class Live(TorchDispatchMode):
    """Counts the bytes of storages that were made while it was on, and the most of them."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[int] = set()
        self.bytes = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        made = func(*args, **(kwargs or {}))
        for tree_leave in tree_leaves(made):
            if isinstance(tree_leave, Tensor) and id_of(tree_leave) not in given:
                self.add(tree_leave)
        return made

    def add(self, tensor: Tensor) -> None:
        storage, address = tensor.untyped_storage(), id_of(tensor)
        if address in self.known:
            return
        self.known.add(address)
        self.bytes += storage.nbytes()
        self.most = max(self.most, self.bytes)
        weakref.finalize(storage, self._gone, address, storage.nbytes())

    def _gone(self, address: int, nbytes: int) -> None:
        self.known.discard(address)
        self.bytes -= nbytes


def id_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def watched(exchange: Any, live: Live) -> Generator[Any, Tensor, Any]:
    """Runs an exchange, with its allocations counted, and what arrives."""
    arrived = None
    while True:
        try:
            with live:
                request = exchange.send(arrived)
        except StopIteration as stop:
            return stop.value
        arrived = yield request
        live.add(arrived)


@pytest.mark.parametrize(
    ("pieces", "ranks"), [((512, 1024, 256), 8), ((500, 1001, 7), 8), ((512, 256), 64)]
)
@pytest.mark.parametrize("name", SCHEMES)
def test_state_and_scratch_are_those_of_the_formula(
    name: str, pieces: tuple[int, ...], ranks: int
) -> None:
    n = ranks * sum(pieces)
    names = [f"{place}#{rank}" for rank in range(ranks) for place in range(len(pieces))]
    layout = Layout(names, [(size,) for _ in range(ranks) for size in pieces])
    engines = [Engine(SCHEMES[name], rank=rank, world_size=ranks) for rank in range(ranks)]
    outputs = [torch.empty(n // ranks) for _ in engines]
    shards = equal_shards(n, ranks)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        live, exchanges = Live(), []
        for engine, output in zip(engines, outputs, strict=True):
            engine.begin_bucket(0, is_last=True)
            gradient = torch.randn(n, generator=generator)
            exchange = engine.exchange(gradient, layout, shards=shards, output=output, agree=True)
            exchanges.append(watched(exchange, live) if engine.rank == 0 else exchange)
        simulate(exchanges)
    wanted = formula(SCHEMES[name], [pieces], ranks)
    assert engines[0].memory.nbytes() == wanted.kept
    # Flags and the like are some hundred bytes.
    assert live.most == pytest.approx(wanted.scratch, rel=0.02, abs=512)
