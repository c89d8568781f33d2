"""Draws the figures of error of all schemes against their bits, and puts them on a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from commhooks.cli.tradeoff import FIGURES, Point, by_title, cell
from commhooks.report.colours import BLUE, GREY, ORANGE
from commhooks.report.labels import spread
from commhooks.report.page import Page
from ddp_core import needs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["drawn", "page_of"]

LIGHT = "#C8C8C8"
_LOW = 3e-8  # where the axis of errors begins
_EXACT = 1e-12
_CROWDED = 0.5


class _Dot(NamedTuple):
    """Holds a scheme's place in a panel."""

    scheme: str
    bits: float
    error: float
    front: bool

    @property
    def colour(self) -> str:
        return BLUE if self.front else GREY


def drawn(points: Sequence[Point], behind: Mapping[str, Sequence[Point]] | None = None) -> Figure:
    """Returns a picture with a part for each kind of gradients, one below the other.

    Random gradients are one tensor, so a single panel has their error and names all schemes;
    recorded ones have a panel for each figure, which names those on its front.

    Args:
        points: marked with their fronts.
        behind: more points by name of gradients, which are small dots.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    with needs("The picture", "matplotlib"):
        from matplotlib.figure import Figure  # pyplot would look for a display

    parts = by_title(points)
    single = {title: _of_one_tensor(part) for title, part in parts.items()}
    heights = [6.2 if single[title] else 7.4 for title in parts]
    # One below the other: side by side, letters would be too small at the width of a page.
    figure = Figure(figsize=(7.4, sum(heights)), layout="constrained")
    rows = figure.subfigures(len(parts), 1, squeeze=False, height_ratios=heights)[:, 0]
    for row, (title, part) in zip(rows, parts.items(), strict=True):
        row.suptitle(f"{title}; blue: no scheme is better in both")
        if single[title]:
            _draw_panel(row.subplots(), part, "error", everyone=True)
        else:
            more = (behind or {}).get(part[0].gradients, [])
            for panel, name in zip(row.subplots(2, 2).flat, FIGURES, strict=True):
                errors = [getattr(point, name) for point in more]
                panel.plot([p.bits for p in more], errors, ".", color=LIGHT, markersize=3, zorder=0)
                _draw_panel(panel, part, name, everyone=False)
    return figure


def page_of(points: Sequence[Point], figure: Figure) -> Page:
    """Returns a page with the picture, and a table for each kind of gradients."""
    page = Page("Bits and error of every scheme")
    page.text(
        "Errors of the mean over ranks (squared, relative), after some steps with the scheme's own "
        "memory and without error feedback, against the bits that one rank sends per entry, scales "
        "and padding included: of the whole gradient, of the tensor in the middle and of the worst "
        "one, and with each entry divided by Adam's denominator. *, and blue: no other scheme has "
        "fewer bits and less of it on the same gradients."
    )
    page.figure(figure, "blue: on the front; orange: 2^(-2R), the least error of R bits for one "
                "vector of Gaussian entries")  # fmt: skip
    for title, part in by_title(points).items():
        page.section(title)
        some = sorted(part, key=lambda point: point.bits)
        rows = [(p.scheme, p.bits, *(cell(p, name) for name in FIGURES)) for p in some]
        page.table(("scheme", "bits per entry", *FIGURES.values()), rows)
    return page


def _of_one_tensor(points: Sequence[Point]) -> bool:
    return all(point.error == point.worst and not point.noise for point in points)


def _draw_panel(panel: Any, points: Sequence[Point], figure: str, *, everyone: bool) -> None:
    """Draws the front of a figure and all points.

    Args:
        everyone: names all schemes, for which a panel needs the width of the page.
    """
    # Room above for what loses nearly all of a random gradient, and on the right for the rest.
    right, high = (6e2, 1e4) if everyone else (3e4, 1e2)
    panel.set(xscale="log", yscale="log", xlim=(0.02, right), ylim=(_LOW, high))
    words = "error of the mean" if figure == "error" else FIGURES[figure]
    panel.set(xlabel="bits per entry", ylabel=f"{words} (squared, relative)")
    panel.set_xticks([0.1, 1, 10], ["0.1", "1", "10"])
    panel.set_yticks([10.0**power for power in range(-7, 1 if everyone else 3)])
    panel.minorticks_off()
    panel.spines[["top", "right"]].set_visible(False)
    _draw_limit(panel)
    # Triangles at both ends of the axis are beyond it: noise where Adam's denominator is 1e-8, and
    # tensors that travel exactly. What travels exactly as a whole is not compared.
    shown = [
        _Dot(point.scheme, point.bits, getattr(point, figure), figure in point.fronts)
        for point in sorted(points, key=lambda point: point.bits)
        if point.error > _EXACT
    ]
    front = [dot for dot in shown if dot.front]
    line = [dot.bits for dot in front], [dot.error for dot in front]
    panel.plot(*line, color=BLUE, linewidth=1, drawstyle="steps-post")
    shown = [dot._replace(error=min(max(dot.error, _LOW), high)) for dot in shown]
    front = [dot for dot in shown if dot.front]
    for dot in shown:
        marker = {high: "^", _LOW: "v"}.get(dot.error, "o")
        panel.plot(dot.bits, dot.error, marker, color=dot.colour, markersize=4, clip_on=False)
    if everyone:
        _name_all(panel, front, shown)
    else:
        _name_beside(panel, front, 60.0, (0.5, -7.3, 1.8))


def _draw_limit(panel: Any) -> None:
    """Draws the rate-distortion function of a Gaussian source, D = 2^(-2R)."""
    rates = [10 ** (power / 20) for power in range(-34, 23)]
    panel.plot(rates, [2 ** (-2 * rate) for rate in rates], color=ORANGE, linewidth=1, zorder=0)


def _name_all(panel: Any, front: Sequence[_Dot], shown: Sequence[_Dot]) -> None:
    # Sparse and low-rank schemes lose most of a random gradient, which has no structure: of these
    # only those on the front have a label.
    above = [dot for dot in front if dot.error > _CROWDED]
    places = spread([math.log10(dot.bits) for dot in above], 0.28, -1.6, 2.0)
    for dot, place in zip(above, places, strict=True):
        text = {"rotation": 50, "ha": "left", "va": "bottom"}
        _label(panel, dot, (10.0**place, 6.0), text, (0, 0))
    beside = [dot for dot in shown if dot.error <= _CROWDED]
    _name_beside(panel, beside, 30.0, (0.38, -7.3, 0.9))


def _name_beside(
    panel: Any, dots: Sequence[_Dot], where: float, rows: tuple[float, float, float]
) -> None:
    """Puts labels to the right of all dots, one below the other.

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
    panel.annotate(
        dot.scheme, (dot.bits, dot.error), xytext=place, color=dot.colour, fontsize=7.5,
        arrowprops=arrow, **text,
    )  # fmt: skip
