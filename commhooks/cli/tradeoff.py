"""Measures the error and the bits of schemes on equal gradients.

Each scheme averages gradients of 4 simulated ranks, with entries of N(0, 1), of a Laplace and of a
t(3) distribution; half of the variance is common to all ranks. Recorded gradients are measured,
too. ``error`` is the mean over steps of |mean - exact|^2 / |exact|^2, without error feedback;
``bits`` are the bits per entry of an all-reduce that sends as many bytes. A scheme is on the front
if no other has less error with as many bits or fewer.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from commhooks import Simulation, make
from commhooks.report.colours import BLUE, GREY
from commhooks.report.labels import spread
from commhooks.report.page import Page
from commhooks.research.trace import Trace, bits_per_entry, replay
from ddp_core import needs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Case", "Point", "cases_of", "drawn", "measured", "page_of", "with_front", "write_csv"]

WORLD_SIZE, STEPS, SHAPE = 4, 3, (512, 512)
# Settings beyond the defaults, by name.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "eden": [{"bits": bits} for bits in (1, 2, 3, 4)],
    "powersgd": [{"rank": rank} for rank in (1, 4, 16, 64)],
    "acpsgd": [{"rank": rank} for rank in (1, 4, 16, 64)],
    "topk": [{"ratio": ratio} for ratio in (0.001, 0.01, 0.1)],
    "random_k": [{"ratio": ratio} for ratio in (0.001, 0.01, 0.1)],
    "random_block": [{"ratio": ratio} for ratio in (0.01, 0.1)],
    "aligned_topk": [{"ratio": ratio} for ratio in (0.01, 0.1)],
    "bf16": [{}, {"stochastic": True}],
    "sdp4bit": [{"local_size": 2, "memory": False}],
    "int8": [{}, {"stochastic": False}],
    "int4": [{}, {"rotate": False}],
}
HIDDEN = {"local_size", "memory"}  # settings that labels leave out
# Not compared: "drive" is another name of "eden", "none" is exact, and "noop" averages nothing.
SAME = {"drive", "none", "noop"}


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
    """Holds the bits and the error of a scheme on gradients of one kind."""

    scheme: str
    gradients: str
    bits: float
    error: float
    front: bool = False


def cases_of(names: Iterable[str]) -> list[Case]:
    """Lists the settings under which these schemes are compared."""
    return [Case(name, options) for name in names for options in SETTINGS.get(name, [{}])]


def measured(case: Case, trace: Trace | None = None) -> Iterator[Point]:
    """Yields a point for every kind of random gradients, and one for ``trace``."""
    for tail in TAILS:
        yield _synthetic(case, tail)
    if trace is not None:
        table = replay(trace, case.name, error_feedback=False, **case.options)
        means = float(table.bits.mean()), float(table.error.mean())
        yield Point(case.label, "recorded", *means)


def _synthetic(case: Case, tail: str) -> Point:
    scheme = make(case.name, error_feedback=False, **case.options)
    ranks = Simulation(scheme, {"weight": SHAPE}, world_size=WORLD_SIZE)
    errors = []
    for step in range(1 + STEPS):
        grads = _gradients(tail, step)
        ranks.requests.clear()
        ranks.wire_bytes.clear()
        mean, exact = ranks.step(grads)[0].double(), torch.stack(grads).double().mean(0)
        if step:  # intsgd, for one, sends the first step dense
            errors.append(float((mean - exact).square().sum() / exact.square().sum()))
    bits = bits_per_entry(ranks, SHAPE[0] * SHAPE[1])
    return Point(case.label, tail, bits, sum(errors) / STEPS)


# ---- gradients


def _gradients(tail: str, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    n = SHAPE[0] * SHAPE[1]
    # A common part, as gradients of one model have. Without it, the error of a mean of four ranks
    # would be relative to a mean that is mostly noise.
    common = TAILS[tail](generator, n)
    return [(common + TAILS[tail](generator, n)) / 2**0.5 for _ in range(WORLD_SIZE)]


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


def with_front(points: Sequence[Point]) -> list[Point]:
    """Marks the points that no other scheme beats in bits and error on the same gradients."""

    def beaten(point: Point) -> bool:
        return any(
            other.bits <= point.bits and other.error < point.error
            for other in points
            if other.gradients == point.gradients and other.scheme != point.scheme
        )

    return [replace(point, front=not beaten(point)) for point in points]


def write_csv(points: Sequence[Point], path: Path) -> None:
    """Writes a row per point."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["scheme", "gradients", "bits", "error", "front"])
        rows.writerows((p.scheme, p.gradients, p.bits, p.error, p.front) for p in points)


def drawn(points: Sequence[Point]) -> Figure:
    """Returns a picture with a panel for each kind of gradients.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    with needs("The picture", "matplotlib"):
        from matplotlib.figure import Figure  # pyplot would look for a display

    kinds = list(dict.fromkeys(point.gradients for point in points))
    # One below the other: side by side, letters would be too small at the width of a page.
    figure = Figure(figsize=(7.0, 6.2 * len(kinds)), layout="constrained")
    axes = figure.subplots(len(kinds), 1, squeeze=False)[:, 0]
    for kind, panel in zip(kinds, axes, strict=True):
        shown = [point for point in points if point.gradients == kind and point.error > 1e-12]
        # Room above for what loses nearly all of a random gradient, and on the right for the rest.
        panel.set(xscale="log", yscale="log", xlim=(0.02, 6e2), ylim=(3e-8, 1e4))
        panel.set(xlabel="bits per entry", ylabel="error of the mean (squared, relative)")
        panel.set_xticks([0.1, 1, 10], ["0.1", "1", "10"])
        panel.set_yticks([10.0**power for power in range(-7, 1)])
        panel.set_title(f"{kind} gradients; blue: no scheme is better in both")
        panel.spines[["top", "right"]].set_visible(False)
        _draw_panel(panel, sorted(shown, key=lambda point: point.bits))
    return figure


def page_of(points: Sequence[Point], figure: Figure) -> Page:
    """Returns a page with the picture, and a table for each kind of gradients."""
    page = Page("Bits and error of every scheme")
    page.text(
        "Error of the mean of four ranks (squared, relative), after some steps with the scheme's "
        "own memory, against the bits that one rank sends per entry. On the front: no other scheme "
        "has fewer bits and a smaller error on the same gradients."
    )
    page.figure(figure, "blue: on the front")
    for kind in dict.fromkeys(point.gradients for point in points):
        page.section(f"{kind} gradients")
        some = sorted((p for p in points if p.gradients == kind), key=lambda point: point.bits)
        rows = [(p.scheme, p.bits, f"{p.error:.3g}", "front" if p.front else "") for p in some]
        page.table(("scheme", "bits per entry", "error", ""), rows)
    return page


def _draw_panel(panel: Any, points: Sequence[Point]) -> None:
    front = [point for point in points if point.front]
    line = [point.bits for point in front], [point.error for point in front]
    panel.plot(*line, color=BLUE, linewidth=1, drawstyle="steps-post")
    for point in points:
        panel.plot(point.bits, point.error, "o", color=_colour(point), markersize=4)
    # Sparse and low-rank schemes lose most of a random gradient, which has no structure: of these
    # only those on the front have a label.
    above = [point for point in front if point.error > _CROWDED]
    beside = [point for point in points if point.error <= _CROWDED]
    places = spread([math.log10(point.bits) for point in above], 0.28, -1.6, 2.0)
    for point, place in zip(above, places, strict=True):
        _label(
            panel, point, (10.0**place, 6.0), {"rotation": 50, "ha": "left", "va": "bottom"}, (0, 0)
        )
    places = spread([math.log10(point.error) for point in beside], 0.38, -7.3, 0.9)
    for point, place in zip(beside, places, strict=True):
        _label(panel, point, (30.0, 10.0**place), {"ha": "left", "va": "center"}, (0, 0.5))


_CROWDED = 0.5


def _label(
    panel: Any,
    point: Point,
    place: tuple[float, float],
    text: dict[str, Any],
    side: tuple[float, float],
) -> None:
    colour = _colour(point)
    arrow: dict[str, Any] = {
        "arrowstyle": "-",
        "color": colour,
        "linewidth": 0.4,
        "shrinkA": 1,
        "shrinkB": 2,
    }
    arrow["relpos"] = side  # where the line meets the text
    where = (point.bits, point.error)
    panel.annotate(
        point.scheme, where, xytext=place, color=colour, fontsize=7.5, arrowprops=arrow, **text
    )


def _colour(point: Point) -> str:
    return BLUE if point.front else GREY
