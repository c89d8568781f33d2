"""Reads gradients that a training run recorded, and runs schemes on them offline."""

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
    """Reads the gradients that :class:`commhooks.wrappers.Traced` wrote.

    Args:
        folder: where the files of all ranks are.

    Attributes:
        steps: recorded steps, ascending.
        world_size: number of ranks that recorded.

    Raises:
        MissingPackageError: safetensors is not installed.
        FileNotFoundError: the folder has no recorded gradients.
        ValueError: a rank lacks a step that another rank has.
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
        # A file that was not copied shows here: without it, a mean would be over fewer ranks.
        for step in self.steps:
            for rank in range(self.world_size):
                if (step, rank) not in self._files:
                    raise ValueError(f"Trace({str(folder)!r}): rank {rank} has no step {step}")

    def gradients(self, step: int) -> tuple[Layout, list[Tensor]]:
        """Returns the layout of a step, and the gradients of each rank: flat, float32.

        Raises:
            ValueError: the ranks recorded different parameters.
        """
        ranks = [self._read(step, rank) for rank in range(self.world_size)]
        # By name: buckets change after the first step, parameters do not.
        names = sorted(ranks[0])
        layout = Layout(names, [ranks[0][name].shape for name in names])
        for rank, tensors in enumerate(ranks):
            if sorted(tensors) != names:
                raise ValueError(f"Trace: in step {step}, ranks 0 and {rank} have other parameters")
        flat = [torch.cat([tensors[n].reshape(-1).float() for n in names]) for tensors in ranks]
        return layout, flat

    def _read(self, step: int, rank: int) -> dict[str, Tensor]:
        from safetensors.torch import load_file

        tensors: dict[str, Tensor] = {}
        for path in self._files[step, rank]:  # a file for each bucket
            tensors |= load_file(path)
        return tensors


def replay(trace: Trace, scheme: str | Scheme, **options: Any) -> pd.DataFrame:
    """Runs a scheme over recorded gradients, on as many simulated ranks as recorded them.

    Args:
        trace: the recorded gradients.
        scheme: a scheme or a registered name.
        options: of the scheme, see :func:`commhooks.make`.

    Returns:
        One row per recorded step. ``bits``: per entry, see :func:`bits_per_entry`. ``error``:
        relative squared error of the mean. ``cosine``: of the angle between the mean and the exact
        mean. ``residual``: norm of all residuals over the norm of all gradients.

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
        # A step of zeros, as of a skipped batch, has no relative error: the absolute one is shown.
        size = float(exact.square().sum()) or 1.0
        whole = sum(float(grad.square().sum()) for grad in grads) or 1.0
        residual = sum(_squared_residual(ranks, rank, layout) for rank in range(trace.world_size))
        rows.append(
            {
                "step": step,
                "bits": bits_per_entry(ranks, layout.numel),
                "error": float((mean - exact).square().sum()) / size,
                "cosine": float(torch.cosine_similarity(mean, exact, dim=0)),
                "residual": math.sqrt(residual / whole),
            }
        )
    table: pd.DataFrame = pd.DataFrame(rows)
    return table


def _squared_residual(ranks: Simulation, rank: int, layout: Layout) -> float:
    memory = ranks.engines[rank].memory
    values = [memory.get("residual", name) for name in layout.names]
    return sum(float(value.square().sum()) for value in values if value is not None)


def bits_per_entry(ranks: Simulation, numel: int) -> float:
    """Returns the bits per entry of an all-reduce that sends as many bytes as ``ranks`` did.

    Args:
        ranks: simulated ranks, whose ``requests`` and ``wire_bytes`` are of one step.
        numel: entries of all parameters together.
    """
    world_size = len(ranks.engines)
    if world_size == 1:  # one rank sends nothing, so its payloads are counted
        return 8 * sum(size for _, size in ranks.requests) / max(1, numel)
    # A ring all-reduce of b bytes sends 2 (n - 1) / n b bytes per rank. Payload bits would not do:
    # an all-gather of the same payload sends n - 1 times its bytes.
    return 8 * sum(ranks.wire_bytes) * world_size / (2 * (world_size - 1)) / max(1, numel)
