"""n pretended ranks in one process: for tests, and for research without processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from commhooks._engine import Engine
from commhooks._make import make
from commhooks._memory import Layout
from commhooks._scheme import Scheme
from ddp_core import Collective, Exchange, simulate

__all__ = ["Simulation"]


class Simulation:
    """Runs a scheme over several steps on ``world_size`` pretended ranks.

    Args:
        scheme: a scheme or a registered name.
        shapes: shape of each parameter by name, in bucket order; one bucket holds them all.
        world_size: number of ranks.
        seed: base of all random draws.
        options: of the scheme, see :func:`commhooks.make`.

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
        built = make(scheme, **options)
        self.layout = Layout(list(shapes), list(shapes.values()))
        self.engines = [
            Engine(built, rank=rank, world_size=world_size, seed=seed) for rank in range(world_size)
        ]
        # Of rank 0, all steps: collective and payload bytes, and bytes it sends by the formulas.
        self.requests: list[tuple[str, int]] = []
        self.wire_bytes: list[float] = []

    def step(
        self, grads: Sequence[Tensor], *, buckets: Sequence[Layout] | None = None
    ) -> list[Tensor]:
        """One step: each rank's flat gradient in, each rank's average out.

        Args:
            grads: per rank, flat, as long as all parameters together; not changed.
            buckets: how the parameters are split; one bucket by default.
        """
        layouts = list(buckets) if buckets is not None else [self.layout]
        means = [grad.clone() for grad in grads]
        begin = 0
        parts = []
        for layout in layouts:
            parts.append((begin, begin + layout.numel, layout))
            begin += layout.numel
        for engine in self.engines:
            for index in range(len(parts)):
                engine.launch(index, is_last=index == len(parts) - 1)
        for low, high, layout in parts:
            outcomes = simulate(
                [
                    self._exchange(engine, mean[low:high], layout)
                    for engine, mean in zip(self.engines, means, strict=True)
                ]
            )
            for mean, outcome in zip(means, outcomes, strict=True):
                mean[low:high].copy_(outcome)
        return means

    def _exchange(self, engine: Engine, grad: Tensor, layout: Layout) -> Exchange:
        inner = engine.exchange(grad.clone(), lambda: layout)
        if engine.rank:
            return inner
        return self._watched(inner)

    def _watched(self, inner: Exchange) -> Exchange:
        """Notes what rank 0 sends."""
        try:
            request: Collective = next(inner)
            while True:
                self.requests.append((request.name, request.payload_nbytes))
                self.wire_bytes.append(request.wire_nbytes(len(self.engines)))
                request = inner.send((yield request))
        except StopIteration as stop:
            result: Tensor = stop.value
            return result

    def memory(self, rank: int, key: str = "residual") -> Tensor:
        """One rank's values of ``key``, flat in parameter order; zero where there are none."""
        engine = self.engines[rank]
        pieces = []
        for name, size in zip(self.layout.names, self.layout.sizes, strict=True):
            value = engine.memory.get(key, name)
            pieces.append(torch.zeros(size) if value is None else value.reshape(-1))
        return torch.cat(pieces) if pieces else torch.zeros(0)
