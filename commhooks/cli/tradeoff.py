"""Measures the error and the bits of schemes on equal gradients.

Each scheme averages gradients of 4 simulated ranks, with entries of N(0, 1), of a Laplace and of a
t(3) distribution; half of the variance is common to all ranks. Recorded gradients are measured,
too. Schemes run without error feedback over the last steps, up to six; the figures are means over
the second half of these, when factors and scales have settled. ``bits`` are the bits per entry of
an all-reduce that sends as many bytes. A scheme is on the front of a figure if no other has less of
it with as many bits or fewer.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from commhooks.core.layout import Layout
from commhooks.research.simulation import Simulation
from commhooks.research.trace import Gradients, Step, measure, simulation_of

__all__ = [
    "FIGURES",
    "MOST_STEPS",
    "Case",
    "Course",
    "Point",
    "by_title",
    "cases_of",
    "cell",
    "random_gradients",
    "title_of",
    "with_fronts",
    "write_csv",
]

WORLD_SIZE, RANDOM_STEPS, SHAPE = 4, 4, (512, 512)
MOST_STEPS = 6  # that a scheme runs over
# Settings beyond the defaults, by name.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "eden": [{"bits": bits} for bits in (1, 2, 3, 4)],
    "powersgd": [{"rank": rank} for rank in (1, 4, 16, 64)],
    "acpsgd": [{"rank": rank} for rank in (1, 4, 16, 64)],
    "topk": [{"ratio": ratio} for ratio in (0.001, 0.01, 0.1)],
    "random_k": [{"ratio": ratio} for ratio in (0.001, 0.01, 0.1)],
    "random_block": [{"ratio": ratio} for ratio in (0.01, 0.1)],
    "aligned_topk": [{"ratio": ratio} for ratio in (0.01, 0.1)],
    "fp8": [{}, {"format": "mx_e4m3"}],
    "bf16": [{}, {"stochastic": True}],
    "sdp4bit": [{"local_size": 2, "memory": False}],
    "int8": [{}, {"rounding": "stochastic"}, {"rounding": "nearest"}],
    "int4": [{}, {"rotate": False}],
}
HIDDEN = {"local_size", "memory"}  # settings that labels leave out
# The figures of error, and what tables and pictures call them.
FIGURES = {
    "error": "error",
    "median": "median tensor",
    "worst": "worst tensor",
    "adam": "Adam's metric",
}
# Not compared: "none" is another name of "allreduce", and "noop" averages nothing.
SAME = {"none", "noop"}


@dataclass(frozen=True)
class Case:
    """Pairs a registered name with settings."""

    name: str
    options: dict[str, Any]

    @property
    def label(self) -> str:
        shown = (f"{key}={value}" for key, value in self.options.items() if key not in HIDDEN)
        return " ".join([self.name, *shown])


@dataclass(frozen=True)
class Point:
    """Holds the bits and the error of a scheme on gradients of one kind.

    Attributes:
        scheme, gradients, ranks: what was measured, on what, and on how many ranks.
        bits: per entry.
        error, median, worst, adam, noise: see
            :class:`commhooks.research.error_figures.ErrorFigures`.
        fronts: figures in which no other scheme with as many bits is better.
    """

    scheme: str
    gradients: str
    ranks: int
    bits: float
    error: float
    median: float
    worst: float
    adam: float
    noise: float
    fronts: frozenset[str] = frozenset()


def cases_of(names: Iterable[str]) -> list[Case]:
    """Lists the settings under which these schemes are compared."""
    return [Case(name, options) for name in names for options in SETTINGS.get(name, [{}])]


class Course:
    """Runs a scheme over successive steps, and measures its average of each.

    Args:
        case: the scheme and its settings.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self._ranks: Simulation | None = None
        self._rows: list[tuple[float, ...]] = []

    def run(self, step: Step) -> None:
        """Runs the scheme's next step."""
        if self._ranks is None:
            options = self.case.options
            self._ranks = simulation_of(step, self.case.name, error_feedback=False, **options)
        bits, figures, _ = measure(self._ranks, step)
        self._rows.append((bits, *figures))

    def point(self, gradients: Gradients) -> Point:
        """Returns the means over the second half of the steps."""
        # The first steps of low-rank schemes are for their factors; IntSGD sends the first dense.
        rows = self._rows[len(self._rows) // 2 :]
        means = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
        return Point(self.case.label, gradients.name, gradients.world_size, *means)


# ---- gradients


def random_gradients() -> list[Gradients]:
    """Returns the random gradients of each distribution."""
    return [_Random(tail) for tail in TAILS]


class _Random:
    """Draws the gradients of one tensor; random ones have no structure that a scheme could use."""

    steps, world_size = range(RANDOM_STEPS), WORLD_SIZE

    def __init__(self, tail: str) -> None:
        self.name, self._draw = tail, TAILS[tail]

    def gradients(self, step: int) -> tuple[Layout, list[Tensor]]:
        generator = torch.Generator().manual_seed(step)
        layout = Layout(["weight"], [SHAPE])
        # A common part, as gradients of one model have. Without it, the error of a mean of four
        # ranks would be relative to a mean that is mostly noise.
        common = self._draw(generator, layout.numel)
        own = [self._draw(generator, layout.numel) for _ in range(WORLD_SIZE)]
        return layout, [(common + one) / 2**0.5 for one in own]


def _normal(generator: torch.Generator, n: int) -> Tensor:
    return torch.randn(n, generator=generator)


def _laplace(generator: torch.Generator, n: int) -> Tensor:
    # The inverse of the distribution function. In float64: a float32 u has 2^24 values, which are
    # too coarse where the logarithm is large.
    u = torch.rand(n, generator=generator, dtype=torch.float64) - 0.5
    return (-u.sign() * torch.log1p(-2 * u.abs())).float()


def _student(generator: torch.Generator, n: int) -> Tensor:
    squares = torch.randn(3, n, generator=generator).square().sum(0)
    return torch.randn(n, generator=generator) / (squares / 3).sqrt()


TAILS: dict[str, Callable[[torch.Generator, int], Tensor]] = {
    "normal": _normal,
    "Laplace": _laplace,
    "t(3)": _student,
}


# ---- results


def title_of(gradients: str, ranks: int) -> str:
    """Returns in words what was measured on."""
    return f"{gradients} gradients, {ranks} ranks"


def by_title(points: Iterable[Point]) -> dict[str, list[Point]]:
    """Returns the points on the same gradients and number of ranks, by the title of these."""
    parts: dict[str, list[Point]] = {}
    for point in points:
        parts.setdefault(title_of(point.gradients, point.ranks), []).append(point)
    return parts


def with_fronts(points: Sequence[Point]) -> list[Point]:
    """Marks the points that no other one beats in bits and a figure; all on the same gradients."""

    def beaten(point: Point, figure: str) -> bool:
        return any(
            other.bits <= point.bits and getattr(other, figure) < getattr(point, figure)
            for other in points
        )

    return [
        replace(point, fronts=frozenset(name for name in FIGURES if not beaten(point, name)))
        for point in points
    ]


def cell(point: Point, figure: str) -> str:
    """Returns a figure with three digits, and a star if the point is on its front."""
    return f"{getattr(point, figure):.3g}{' *' * (figure in point.fronts)}"


def write_csv(points: Sequence[Point], path: Path) -> None:
    """Writes a row per point."""
    columns = ["scheme", "gradients", "ranks", "bits", *FIGURES, "noise"]
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow([*columns, "fronts"])
        for point in points:
            fronts = " ".join(name for name in FIGURES if name in point.fronts)
            rows.writerow([*(getattr(point, column) for column in columns), fronts])
