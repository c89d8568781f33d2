"""Recorded gradients: take some from a real run, and try any scheme on them offline."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from commhooks.core.layout import Layout
from commhooks.core.scheme import Scheme
from commhooks.core.settings import shown
from commhooks.research.simulation import Simulation
from commhooks.wrappers.traced import FILE_NAME
from ddp_core import needs

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Trace", "bits_per_entry", "replay"]


class Trace:
    """Gradients that :class:`Traced` wrote.

    Attributes:
        steps: that were recorded, ascending.
        world_size: ranks that recorded.

    Raises:
        MissingPackageError: safetensors is not installed.
        FileNotFoundError: no recorded gradients there.
        ValueError: a rank lacks a step, or parameters that another rank has.
    """

    def __init__(self, folder: str | Path) -> None:
        with needs("Trace(...)", "safetensors"):
            import safetensors  # noqa: F401
        self._files: dict[tuple[int, int], list[Path]] = {}
        for path in sorted(Path(folder).glob("step*.safetensors")):
            if match := FILE_NAME.fullmatch(path.name):
                self._files.setdefault((int(match[1]), int(match[2])), []).append(path)
        if not self._files:
            raise FileNotFoundError(f"Trace({str(folder)!r}): no file of recorded gradients there")
        self.steps = sorted({step for step, _ in self._files})
        self.world_size = 1 + max(rank for _, rank in self._files)
        for step in self.steps:
            for rank in range(self.world_size):
                if (step, rank) not in self._files:
                    raise ValueError(f"Trace({str(folder)!r}): rank {rank} has no step {step}")

    def gradients(self, step: int) -> tuple[Layout, list[Tensor]]:
        """What the parameters are, and per rank their gradients, flat float32."""
        ranks = [self._read(step, rank) for rank in range(self.world_size)]
        names = sorted(ranks[0])
        layout = Layout(names, [ranks[0][name].shape for name in names])
        for rank, found in enumerate(ranks):
            if sorted(found) != names:
                raise ValueError(f"Trace: in step {step}, ranks 0 and {rank} have other parameters")
        return layout, [torch.cat([one[n].reshape(-1).float() for n in names]) for one in ranks]

    def _read(self, step: int, rank: int) -> dict[str, Tensor]:
        from safetensors.torch import load_file

        found: dict[str, Tensor] = {}
        for path in self._files[step, rank]:
            found |= load_file(path)
        return found


def replay(trace: Trace, scheme: str | Scheme, **options: Any) -> pd.DataFrame:
    """Runs a scheme over recorded gradients, on as many simulated ranks as recorded them.

    Args:
        options: of the scheme, see :func:`commhooks.make`.

    Returns:
        One row per recorded step: ``bits`` per entry (of an all-reduce of equal cost), ``error``
        of the mean (its square over that of the exact mean), ``cosine`` with it, and ``residual``,
        the norm of all residuals over that of all gradients.

    Example:
        >>> replay(Trace("trace"), "int4")
    """
    with needs("replay(...)", "pandas"):
        import pandas as pd

    if not isinstance(trace, Trace):
        raise TypeError(f"replay(trace, ...): of a folder, give Trace(folder); got {shown(trace)}")
    ranks: Simulation | None = None
    rows: list[dict[str, float]] = []
    for step in trace.steps:
        layout, grads = trace.gradients(step)
        shapes = dict(zip(layout.names, layout.shapes, strict=True))
        if ranks is None:
            ranks = Simulation(scheme, shapes, world_size=trace.world_size, **options)
        ranks.requests.clear()
        ranks.wire_bytes.clear()
        mean = ranks.step(grads, buckets=[layout])[0].double()
        exact = torch.stack(grads).double().mean(0)
        size = float(exact.square().sum()) or 1.0
        residual = sum(_norm(ranks, rank, layout) for rank in range(trace.world_size))
        rows.append(
            {
                "step": step,
                "bits": bits_per_entry(ranks, layout.numel),
                "error": float((mean - exact).square().sum()) / size,
                "cosine": float(torch.cosine_similarity(mean, exact, dim=0)),
                "residual": math.sqrt(residual / sum(float(g.square().sum()) for g in grads)),
            }
        )
    table: pd.DataFrame = pd.DataFrame(rows)
    return table


def _norm(ranks: Simulation, rank: int, layout: Layout) -> float:
    memory = ranks.engines[rank].memory
    values = [memory.get("residual", name) for name in layout.names]
    return sum(float(one.square().sum()) for one in values if one is not None)


def bits_per_entry(ranks: Simulation, numel: int) -> float:
    """Of an all-reduce that sends as many bytes as ``ranks`` did: the bits of an entry.

    On one rank nothing is sent; payloads are counted then.
    """
    world_size = len(ranks.engines)
    if world_size == 1:
        return 8 * sum(size for _, size in ranks.requests) / max(1, numel)
    return 8 * sum(ranks.wire_bytes) * world_size / (2 * (world_size - 1)) / max(1, numel)
