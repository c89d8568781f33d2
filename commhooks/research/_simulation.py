"""Simulates n ranks in one process, for tests and research."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from commhooks.core._layout import Layout
from commhooks.core._scheme import Scheme
from commhooks.core._settings import check_value
from commhooks.hook._coalesce import Coalescer, Group
from commhooks.hook._engine import Engine
from commhooks.wrappers._make import make
from ddp_core import Collective, Exchange, as_request, simulate

__all__ = ["Simulation"]


class Simulation:
    """Runs a scheme over several steps on ``world_size`` simulated ranks.

    Args:
        scheme: a scheme or a registered name.
        shapes: shape of each parameter by name, in bucket order; one bucket holds them all.
        world_size: number of ranks.
        seed: base of all random draws.
        options: of the scheme, see :func:`commhooks.make`.

    Attributes:
        layout: the parameters, in bucket order.
        engines: one for each rank.
        requests: collectives of rank 0 in all steps: name and payload bytes.
        wire_bytes: bytes that rank 0 sends in each of these, by the formulas of ``ddp_core``.
        buckets: names of the parameters of each exchange in the last step.

    Example:
        >>> ranks = Simulation("powersgd", {"weight": (64, 64)}, world_size=4, rank=2)
        >>> means = ranks.step([torch.randn(64 * 64) for _ in range(4)])
    """

    def __init__(
        self,
        scheme: str | Scheme,
        shapes: Mapping[str, Sequence[int]],
        *,
        world_size: int,
        seed: int = 0,
        **options: Any,
    ) -> None:
        world_size = check_value("Simulation", "world_size", world_size, int)
        if world_size < 1:
            raise ValueError(f"Simulation(world_size=...) is 1 or more, got {world_size}")
        built = make(scheme, **options)
        self.layout = Layout(list(shapes), list(shapes.values()))
        self.engines = [
            Engine(built, rank=rank, world_size=world_size, seed=seed) for rank in range(world_size)
        ]
        self.buckets: list[tuple[str, ...]] = []
        self._restored: list[tuple[str, ...]] = []  # the buckets of a resumed run's next step
        self.requests: list[tuple[str, int]] = []
        self.wire_bytes: list[float] = []

    def step(
        self, grads: Sequence[Tensor], *, buckets: Sequence[Layout] | None = None
    ) -> list[Tensor]:
        """Runs one step and returns the average that each rank gets.

        Args:
            grads: flat gradient of each rank, as long as all parameters together; not changed.
            buckets: how the parameters are split; one bucket by default.

        Raises:
            ValueError: another number of gradients than ranks, or of entries than in the layout.
        """
        layouts = list(buckets) if buckets is not None else [self.layout]
        numel = sum(layout.numel for layout in layouts)
        if [tuple(grad.shape) for grad in grads] != [(numel,)] * len(self.engines):
            raise ValueError(
                f"Simulation.step(grads): one flat gradient of {numel} entries for each of "
                f"{len(self.engines)} ranks, got shapes {[tuple(grad.shape) for grad in grads]}"
            )
        means = [grad.clone() for grad in grads]  # schemes overwrite the bucket
        ranks = []
        for mean in means:
            # A hook does the same: the first step of a resumed run exchanges the buckets of the run
            # that was saved, whatever buckets it has.
            most = self.engines[0].traits.max_bucket_numel
            coalescer, pieces = Coalescer(most), mean.split([layout.numel for layout in layouts])
            for index, (piece, layout) in enumerate(zip(pieces, layouts, strict=True)):
                coalescer.hold(index, piece, partial(_same, layout))
            wanted = coalescer.groups_like(self._restored, merged=False) if self._restored else None
            ranks.append(coalescer.one_by_one() if wanted is None else wanted)
        for engine in self.engines:
            for index in range(len(ranks[0])):
                engine.begin_bucket(index, is_last=index == len(ranks[0]) - 1)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(means[0])
        for groups in zip(*ranks, strict=True):
            pairs = zip(self.engines, groups, strict=True)
            try:
                simulate([self._exchange(engine, group) for engine, group in pairs])
            finally:
                # Nobody waits for the buckets here; but a future that does not complete keeps its
                # callback, and with it the gradients of all steps.
                for group in groups:
                    group.release(done)
        self.buckets = [group.find_layout().names for group in ranks[0]]
        self._restored = []
        return means

    def resume(self, other: Simulation) -> None:
        """Continues from ``other`` as from a checkpoint: memory, step, seed and buckets."""
        for old, new in zip(other.engines, self.engines, strict=True):
            saved: dict[str, dict[str, Tensor]] = {}
            for key, name, value in old.memory.items():
                saved.setdefault(key, {})[name] = value.clone()  # both runs continue
            new.memory.load(saved)
            new.step, new.seed = old.step, old.seed
        self._restored = other.buckets

    def _exchange(self, engine: Engine, group: Group) -> Exchange:
        return self._watched(group.exchange(engine.exchange), engine.rank)

    def _watched(self, inner: Exchange, rank: int) -> Exchange:
        """Runs an exchange of a rank and records what it sends."""
        try:
            request = as_request(next(inner))
            while True:
                self._record(request, rank)
                request = as_request(inner.send((yield request)))
        except StopIteration as stop:
            result: Tensor = stop.value
            return result

    def _record(self, request: Collective, rank: int) -> None:
        if rank:
            return
        self.requests.append((request.name, request.payload_nbytes))
        self.wire_bytes.append(request.wire_nbytes(len(self.engines)))

    def memory(self, rank: int, key: str = "residual") -> Tensor:
        """Returns a rank's memory under ``key``, flat, in parameter order, with zeros for none."""
        engine = self.engines[rank]
        pieces = []
        for name, size in zip(self.layout.names, self.layout.sizes, strict=True):
            value = engine.memory.get(key, name)
            zeros = torch.zeros(size, dtype=torch.float32, device="cpu")
            pieces.append(zeros if value is None else value.reshape(-1))
        return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.float32, device="cpu")


def _same(layout: Layout) -> Layout:
    return layout
