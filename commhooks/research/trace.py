"""Reads gradients that a training run recorded, and runs schemes on them offline."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from commhooks.core._layout import Layout
from commhooks.core._scheme import Scheme
from commhooks.core._settings import check_value, shown
from commhooks.research._error_figures import ErrorFigures, SecondMoment, error_figures
from commhooks.research._simulation import Simulation
from commhooks.wrappers._traced import FILE_NAME
from ddp_core import needs

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "ErrorFigures",
    "Gradients",
    "SecondMoment",
    "Step",
    "Trace",
    "bits_per_entry",
    "error_figures",
    "measure",
    "replay",
    "simulation_of",
    "steps_of",
]


class Trace:
    """Reads the gradients that :class:`commhooks.wrappers.Traced` wrote.

    Args:
        folder: where the files of all ranks are.
        ranks: reads the first ranks only, this many; None: all that recorded.

    Attributes:
        name: of the folder.
        steps: recorded steps, ascending.
        world_size: number of ranks that are read.

    Raises:
        MissingPackageError: safetensors is not installed.
        FileNotFoundError: the folder has no recorded gradients.
        ValueError: a rank lacks a step that another rank has, or fewer than ``ranks`` recorded.
    """

    def __init__(self, folder: str | Path, *, ranks: int | None = None) -> None:
        with needs("Trace(...)", "safetensors"):
            import safetensors  # noqa: F401
        self.name = Path(folder).resolve().name
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
        if ranks is not None:
            ranks = check_value("Trace", "ranks", ranks, int)
            if not 1 <= ranks <= self.world_size:
                raise ValueError(
                    f"Trace({str(folder)!r}, ranks=...): {self.world_size} ranks recorded, so it "
                    f"is 1 to {self.world_size}, got {ranks}"
                )
            self.world_size = ranks

    def gradients(self, step: int) -> tuple[Layout, list[Tensor]]:
        """Returns the layout of a step, and the gradients of each rank: flat, float32.

        Raises:
            ValueError: the ranks recorded different parameters.
        """
        layout, flat = Layout([], []), []
        for rank in range(self.world_size):  # one at a time: files of all ranks may be gigabytes
            tensors = self._read(step, rank)
            names = sorted(tensors)  # by name: buckets change after the first step
            if not rank:
                layout = Layout(names, [tensors[name].shape for name in names])
            elif tuple(names) != layout.names:
                raise ValueError(f"Trace: in step {step}, ranks 0 and {rank} have other parameters")
            flat.append(torch.cat([tensors[name].reshape(-1).float() for name in names]))
        return layout, flat

    def _read(self, step: int, rank: int) -> dict[str, Tensor]:
        from safetensors.torch import load_file

        tensors: dict[str, Tensor] = {}
        for path in self._files[step, rank]:  # a file for each bucket
            tensors |= load_file(path)
        return tensors


class Gradients(Protocol):
    """Declares what :class:`Trace` provides: gradients of all ranks, step by step."""

    @property
    def name(self) -> str: ...
    @property
    def steps(self) -> Sequence[int]: ...
    @property
    def world_size(self) -> int: ...
    def gradients(self, step: int) -> tuple[Layout, list[Tensor]]: ...


class Step(NamedTuple):
    """Holds the gradients of one step, and the values that a scheme is compared with.

    Attributes:
        number: of the step.
        layout: of the gradients.
        grads: flat gradient of each rank.
        exact: their mean, in float64.
        moment: Adam's second moment of the means up to this step.
    """

    number: int
    layout: Layout
    grads: list[Tensor]
    exact: Tensor
    moment: Tensor


def steps_of(gradients: Gradients, last: int | None = None) -> Iterator[Step]:
    """Yields the steps in order, with the exact mean and Adam's second moment of each.

    Args:
        gradients: a trace.
        last: yields the last steps only, this many. The moment is of those before, too.

    Example:
        >>> for step in steps_of(Trace("trace")):
        ...     print(step.number, float(step.exact.norm()))
    """
    moment = SecondMoment()
    first = 0 if last is None else len(gradients.steps) - last
    for index, number in enumerate(gradients.steps):
        layout, grads = gradients.gradients(number)
        exact = torch.zeros(layout.numel, dtype=torch.float64, device="cpu")
        for grad in grads:  # not stacked: in float64, all ranks at once would need much memory
            exact += grad
        exact /= len(grads)
        second = moment.updated(exact)
        if index >= first:
            yield Step(number, layout, grads, exact, second)


def measure(ranks: Simulation, step: Step) -> tuple[float, ErrorFigures, Tensor]:
    """Runs a step on simulated ranks.

    Args:
        ranks: of the parameters of the step, see :func:`simulation_of`; they continue from the step
            before.
        step: as :func:`steps_of` yields it.

    Returns:
        The bits per entry, see :func:`bits_per_entry`; the figures of the error; the average.

    Example:
        >>> for step in steps_of(Trace("trace")):
        ...     print(measure(simulation_of(step, "int8"), step)[1].worst)
    """
    ranks.requests.clear()
    ranks.wire_bytes.clear()
    mean = ranks.step(step.grads, buckets=[step.layout])[0]
    figures = error_figures(mean, step.exact, step.layout, step.moment)
    return bits_per_entry(ranks, step.layout.numel), figures, mean


def replay(trace: Trace, scheme: str | Scheme, **options: Any) -> pd.DataFrame:
    """Runs a scheme over recorded gradients, on as many simulated ranks as recorded them.

    Args:
        trace: the recorded gradients.
        scheme: a scheme or a registered name.
        options: of the scheme, see :func:`commhooks.make`.

    Returns:
        One row per recorded step. ``bits``: per entry, see :func:`bits_per_entry`. ``error``,
        ``median``, ``worst``, ``adam``, ``noise``: the error of the mean, see
        :class:`commhooks.research.trace.ErrorFigures`. ``cosine``: of the angle between
        the mean and the exact mean. ``residual``: norm of all residuals over the norm of all
        gradients.

    Example:
        >>> replay(Trace("trace"), "int4")
    """
    with needs("replay(...)", "pandas"):
        import pandas as pd

    if not isinstance(trace, Trace):
        raise TypeError(f"replay(trace, ...): of a folder, give Trace(folder); got {shown(trace)}")
    ranks: Simulation | None = None
    rows: list[dict[str, float]] = []
    for step in steps_of(trace):
        if ranks is None:
            ranks = simulation_of(step, scheme, **options)
        bits, figures, mean = measure(ranks, step)
        whole = sum(float(grad.square().sum()) for grad in step.grads) or 1.0
        residual = sum(
            _squared_residual(ranks, rank, step.layout) for rank in range(len(step.grads))
        )
        rows.append(
            {
                "step": step.number,
                "bits": bits,
                **figures._asdict(),
                "cosine": float(torch.cosine_similarity(mean.double(), step.exact, dim=0)),
                "residual": math.sqrt(residual / whole),
            }
        )
    table: pd.DataFrame = pd.DataFrame(rows)
    return table


def simulation_of(step: Step, scheme: str | Scheme, **options: Any) -> Simulation:
    """Returns simulated ranks for the parameters of a step, which they have not run yet.

    Args:
        step: as :func:`steps_of` yields it.
        scheme: a scheme or a registered name.
        options: of the scheme, see :func:`commhooks.make`.
    """
    shapes = dict(zip(step.layout.names, step.layout.shapes, strict=True))
    return Simulation(scheme, shapes, world_size=len(step.grads), **options)


def _squared_residual(ranks: Simulation, rank: int, layout: Layout) -> float:
    memory = ranks.engines[rank].memory
    values = [memory.get("residual", name) for name in layout.names]
    return sum(float(value.square().sum()) for value in values if value is not None)


def bits_per_entry(ranks: Simulation, numel: int) -> float:
    """Returns the bits per entry of an all-reduce that sends as many bytes as ``ranks`` did.

    All bytes count: codes, scales, indices, and what fills a payload up.

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
