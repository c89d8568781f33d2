"""Measures the error and the bits of schemes on the same gradients.

Each scheme averages gradients of 4 simulated ranks, with entries of N(0, 1), of a Laplace and of a
t(3) distribution; half of the variance is common to all ranks. Recorded gradients are measured,
too. Schemes run without error feedback over the last steps, up to six; the figures are means over
the second half of these, when factors and scales have settled. ``bits`` are the bits per entry of
an all-reduce that sends as many bytes. A scheme is on the front of a figure if no other has less of
it with as many bits or fewer.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from commhooks.cli._arguments import settings_of
from commhooks.core._layout import Layout
from commhooks.report._page import Page
from commhooks.report._style import BLUE, GREY, ORANGE, RED, spread
from commhooks.research._simulation import Simulation
from commhooks.research.trace import Gradients, Step, measure, simulation_of
from ddp_core import needs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "FIGURES",
    "MAX_STEPS",
    "Case",
    "Course",
    "Point",
    "by_title",
    "cases_of",
    "cell",
    "drawn",
    "named",
    "of_one_tensor",
    "page_of",
    "random_gradients",
    "title_of",
    "with_fronts",
    "write_csv",
]


LIGHT = "#C8C8C8"
_LOW = 3e-8  # where the axis of errors begins at the lowest
_EXACT = 1e-12
_CROWDED = 0.5


class _Dot(NamedTuple):
    """Holds a scheme's position in a panel."""

    scheme: str
    bits: float
    error: float
    front: bool
    yours: bool

    @property
    def colour(self) -> str:
        return RED if self.yours else BLUE if self.front else GREY


def drawn(
    points: Sequence[Point],
    behind: Mapping[str, Sequence[Point]] | None = None,
    *,
    yours: Collection[str] = (),
    full: bool = False,
) -> Figure:
    """Returns a picture with a panel for each kind of gradients, one below the other.

    A panel has the error of the mean, and names all schemes.

    Args:
        points: marked with their fronts.
        behind: more points by name of gradients, which are small dots.
        yours: schemes of the user's, which stand out.
        full: recorded gradients have a panel for each figure, which names the schemes on its front
            and the user's own.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    with needs("The picture", "matplotlib"):
        from matplotlib.figure import Figure  # pyplot would look for a display

    parts = by_title(points)
    single = {title: not full or of_one_tensor(part) for title, part in parts.items()}
    heights = [6.2 if single[title] else 7.4 for title in parts]
    # One below the other: side by side, letters would be too small at the width of a page.
    figure = Figure(figsize=(7.4, sum(heights)), layout="constrained")
    rows = figure.subfigures(len(parts), 1, squeeze=False, height_ratios=heights)[:, 0]
    for row, (title, part) in zip(rows, parts.items(), strict=True):
        row.suptitle(f"{title}; blue: Pareto front{'; red: yours' if yours else ''}")
        if single[title]:
            _draw_panel(row.subplots(), part, "error", yours, everyone=True)
        else:
            more = (behind or {}).get(part[0].gradients, [])
            for panel, name in zip(row.subplots(2, 2).flat, FIGURES, strict=True):
                errors = [getattr(point, name) for point in more]
                panel.plot([p.bits for p in more], errors, ".", color=LIGHT, markersize=3, zorder=0)
                _draw_panel(panel, part, name, yours, everyone=False)
    return figure


def page_of(points: Sequence[Point], figure: Figure, yours: Collection[str] = ()) -> Page:
    """Returns a page with the picture, and a table for each kind of gradients.

    Args:
        points, yours: see :func:`drawn`.
        figure: the picture.
    """
    page = Page("Bits and error of every scheme")
    page.text(
        "Errors of the mean over ranks (squared, relative), after some steps with the scheme's own "
        "state and without error feedback, against the bits that one rank sends per gradient "
        "entry, scales and padding included: of the whole gradient, of the tensor in the middle "
        "and of the worst one, and with each entry divided by Adam's denominator. *, and blue: on "
        "the Pareto front, no other scheme has fewer bits and less of it on the same gradients."
    )
    page.figure(
        figure,
        "blue: on the Pareto front; orange: 2^(-2R), the least error of R bits for one vector of "
        "Gaussian entries",
    )
    for title, part in by_title(points).items():
        page.section(title)
        some = sorted(part, key=lambda point: point.bits)
        rows = [(named(p, yours), p.bits, *(cell(p, name) for name in FIGURES)) for p in some]
        page.table(("scheme", "bits per gradient entry", *FIGURES.values()), rows)
    return page


def of_one_tensor(points: Sequence[Point]) -> bool:
    return all(point.error == point.worst and not point.noise for point in points)


def _draw_panel(
    panel: Any, points: Sequence[Point], figure: str, yours: Collection[str], *, everyone: bool
) -> None:
    """Draws the front of a figure, and all points.

    Args:
        yours: schemes that stand out.
        everyone: names all schemes, for which a panel needs the width of the page.
    """
    # Triangles at both ends of the axis are beyond it: noise where Adam's denominator is 1e-8, and
    # tensors that travel exactly. What travels exactly as a whole is not compared.
    shown = [
        _Dot(
            scheme=point.scheme,
            bits=point.bits,
            error=getattr(point, figure),
            front=figure in point.fronts,
            yours=point.scheme in yours,
        )
        for point in sorted(points, key=lambda point: point.bits)
        if point.error > _EXACT
    ]
    # Room above for what loses nearly all of a random gradient, and on the right for the rest.
    right, high = (6e2, 1e4) if everyone else (3e4, 1e2)
    least = math.floor(math.log10(max(_LOW, min((dot.error for dot in shown), default=1.0))))
    low = max(_LOW, 10.0**least / 3)
    panel.set(xscale="log", yscale="log", xlim=(0.02, right), ylim=(low, high))
    words = "error of the mean" if figure == "error" else FIGURES[figure]
    panel.set(xlabel="bits sent per gradient entry", ylabel=f"{words} (squared, relative)")
    panel.set_xticks([0.1, 1, 10], ["0.1", "1", "10"])
    panel.set_yticks([10.0**power for power in range(max(-7, least), 1 if everyone else 3)])
    panel.minorticks_off()
    panel.spines[["top", "right"]].set_visible(False)
    _draw_limit(panel)
    front = [dot for dot in shown if dot.front]
    line = [dot.bits for dot in front], [dot.error for dot in front]
    panel.plot(*line, color=BLUE, linewidth=1, drawstyle="steps-post")
    shown = [dot._replace(error=min(max(dot.error, low), high)) for dot in shown]
    for dot in shown:
        marker = {high: "^", low: "v"}.get(dot.error, "o")
        size = 7 if dot.yours else 4
        panel.plot(dot.bits, dot.error, marker, color=dot.colour, markersize=size, clip_on=False)
    lowest = math.log10(low) + 0.2
    if everyone:
        _name_all(panel, _at_one_place(shown), lowest)
    else:
        some = [dot for dot in shown if dot.front or dot.yours]
        _name_beside(panel, _at_one_place(some), 60.0, (0.5, lowest, 1.8))


def _at_one_place(dots: Sequence[_Dot]) -> list[_Dot]:
    """Joins the names of dots that cover each other."""
    places: dict[tuple[int, int], list[_Dot]] = {}
    for dot in dots:
        place = round(50 * math.log10(dot.bits)), round(50 * math.log10(dot.error))
        places.setdefault(place, []).append(dot)
    return [
        together[0]._replace(
            scheme=", ".join(dot.scheme for dot in together),
            front=any(dot.front for dot in together),
            yours=any(dot.yours for dot in together),
        )
        for together in places.values()
    ]


def _draw_limit(panel: Any) -> None:
    """Draws the rate-distortion function of a Gaussian source, D = 2^(-2R)."""
    rates = [10 ** (power / 20) for power in range(-34, 23)]
    panel.plot(rates, [2 ** (-2 * rate) for rate in rates], color=ORANGE, linewidth=1, zorder=0)


def _name_all(panel: Any, shown: Sequence[_Dot], lowest: float) -> None:
    # Sparse and low-rank schemes lose most of a random gradient, which has no structure: their
    # labels are above, side by side, and those of the others on the right.
    above = [dot for dot in shown if dot.error > _CROWDED]
    places = spread([math.log10(dot.bits) for dot in above], 0.15, -1.65, 2.0)
    for dot, place in zip(above, places, strict=True):
        text = {"rotation": 50, "ha": "left", "va": "bottom"}
        _label(panel, dot, (10.0**place, 6.0), text, (0, 0))
    beside = [dot for dot in shown if dot.error <= _CROWDED]
    _name_beside(panel, beside, 45.0, (0.032 * (4 - lowest), lowest, 0.4))


def _name_beside(
    panel: Any, dots: Sequence[_Dot], where: float, rows: tuple[float, float, float]
) -> None:
    """Writes labels to the right of all dots, one below the other.

    Args:
        where: bits per entry at which they begin.
        rows: distance of two, lowest and highest one; logarithms of errors.
    """
    places = spread([math.log10(dot.error) for dot in dots], *rows)
    for dot, place in zip(dots, places, strict=True):
        text = {"ha": "left", "va": "center"}
        _label(panel, dot, (where, 10.0**place), text, (0, 0.5))


def _label(
    panel: Any,
    dot: _Dot,
    place: tuple[float, float],
    text: dict[str, Any],
    side: tuple[float, float],
) -> None:
    arrow: dict[str, Any] = {
        "arrowstyle": "-",
        "color": dot.colour,
        "linewidth": 0.4,
        "shrinkA": 1,
        "shrinkB": 2,
    }
    arrow["relpos"] = side  # where the line meets the text
    text["weight"] = "bold" if dot.yours else "normal"
    panel.annotate(
        dot.scheme, (dot.bits, dot.error), xytext=place, color=dot.colour, fontsize=7.5,
        arrowprops=arrow, **text,
    )  # fmt: skip


# ---- measuring


WORLD_SIZE, RANDOM_STEPS, SHAPE = 4, 4, (512, 512)
MAX_STEPS = 6  # that a scheme runs over
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
            :class:`commhooks.research._error_figures.ErrorFigures`.
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


def cases_of(words: Iterable[str]) -> list[Case]:
    """Returns the settings under which schemes are compared: those of a word, or the usual ones."""
    given = [settings_of(word) for word in words]
    return [
        Case(name, options)
        for name, settings in given
        for options in ([settings] if settings else SETTINGS.get(name, [{}]))
    ]


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
        differences = [self._draw(generator, layout.numel) for _ in range(WORLD_SIZE)]
        return layout, [(common + difference) / 2**0.5 for difference in differences]


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
    """Returns a title for the gradients that were measured on."""
    return f"{gradients} gradients, {ranks} ranks"


def by_title(points: Iterable[Point]) -> dict[str, list[Point]]:
    """Returns the points by title: the same gradients and number of ranks."""
    parts: dict[str, list[Point]] = {}
    for point in points:
        parts.setdefault(title_of(point.gradients, point.ranks), []).append(point)
    return parts


def with_fronts(points: Sequence[Point]) -> list[Point]:
    """Marks the points on the front of bits and a figure; all on the same gradients."""

    def beaten(point: Point, figure: str) -> bool:
        return any(
            other.bits <= point.bits and getattr(other, figure) < getattr(point, figure)
            for other in points
        )

    return [
        replace(point, fronts=frozenset(name for name in FIGURES if not beaten(point, name)))
        for point in points
    ]


def named(point: Point, yours: Collection[str]) -> str:
    """Returns the name of a scheme, with a mark if it is one of the user's own."""
    return f"{point.scheme} (yours)" if point.scheme in yours else point.scheme


def cell(point: Point, figure: str) -> str:
    """Formats a figure with three digits, and a star if the point is on its front."""
    return f"{getattr(point, figure):.3g}{'*' * (figure in point.fronts)}"


def write_csv(points: Sequence[Point], path: Path) -> None:
    """Writes a row per point."""
    columns = ["scheme", "gradients", "ranks", "bits", *FIGURES, "noise"]
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow([*columns, "fronts"])
        for point in points:
            fronts = " ".join(name for name in FIGURES if name in point.fronts)
            rows.writerow([*(getattr(point, column) for column in columns), fronts])
