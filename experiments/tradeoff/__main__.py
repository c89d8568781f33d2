"""Measures the errors and bits of every scheme, also those of papers, on recorded gradients.

``python -m experiments.tradeoff`` is the command ``commhooks tradeoff`` on all traces that
``python -m experiments.traces`` has recorded, each with 2, 4 and 8 ranks. Its picture has a part
for each task: schemes are at the geometric means over the stages of the task on most ranks; small
dots are all stages and numbers of ranks. ``means.csv`` has these means, and with
``--pages docs/schemes`` the pages of the schemes get those of two tasks.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from matplotlib.figure import Figure

import commhooks.research.baselines  # noqa: F401  # registers schemes
from commhooks.cli import _commands as _commands
from commhooks.cli._tradeoff import FIGURES, Point, drawn, with_fronts, write_csv
from commhooks.research.trace import Trace

__all__ = ["means_of", "page_with_errors", "traces_in"]

# Of the tasks of ``experiments.traces``: dense gradients, and rows of zeros.
ON_PAGES = ("characters", "minilm")
_PLACE = re.compile(r"(<!-- errors: ([\w, ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def traces_in(folder: Path, ranks: Sequence[int]) -> list[Trace]:
    """Returns the traces in the folders within ``folder``, with each number of ranks they have."""
    folders = sorted({path.parent for path in folder.glob("*/step*.safetensors")}, key=_order)
    most = {path: Trace(path).world_size for path in folders}
    return [Trace(path, ranks=n) for path in folders for n in ranks if n <= most[path]]


def means_of(points: Sequence[Point]) -> list[Point]:
    """Returns a point for each scheme and task: the mean over the task's stages, on most ranks.

    Of bits it is the arithmetic mean, of errors the geometric one, since these differ by powers of
    ten between stages.
    """
    groups: dict[str, dict[str, list[Point]]] = {}
    for point in points:
        groups.setdefault(_task(point), {}).setdefault(point.scheme, []).append(point)
    means = []
    for task, schemes in groups.items():
        some = []
        for group in schemes.values():
            ranks = max(point.ranks for point in group)
            rows = [point for point in group if point.ranks == ranks]
            figures = {name: _mean([getattr(row, name) for row in rows]) for name in FIGURES}
            bits, noise = (
                statistics.fmean(getattr(row, name) for row in rows) for name in ("bits", "noise")
            )
            some.append(replace(rows[0], gradients=task, bits=bits, noise=noise, **figures))
        means += with_fronts(some)
    return means


def page_with_errors(page: str, means: Sequence[Point]) -> str:
    """Returns a page with the errors of its schemes, between the comments that name these.

    Args:
        page: Markdown; ``<!-- errors: int8, fp8 -->`` and ``<!-- end -->`` are around the table.
        means: see :func:`means_of`.
    """

    def table(match: re.Match[str]) -> str:
        names = match[2].split(", ")
        rows = ["| scheme | gradients | bits | " + " | ".join(FIGURES.values()) + " |"]
        rows.append("|---" * (len(FIGURES) + 3) + "|")
        for point in means:
            if point.scheme.split()[0] in names and point.gradients in ON_PAGES:
                figures = " | ".join(f"{getattr(point, name):.2g}" for name in FIGURES)
                shown = f"`{point.scheme}` | {point.gradients} | {point.bits:.2f} | {figures}"
                rows.append(f"| {shown} |")
        return f"{match[1]}\n" + "\n".join(rows) + f"\n\n{match[3]}"

    return _PLACE.sub(table, page)


def _mean(errors: Sequence[float]) -> float:
    return statistics.geometric_mean(errors) if all(errors) else 0.0


def _task(point: Point) -> str:
    return re.sub(r"_step\d+$", "", point.gradients)


def _order(folder: Path) -> tuple[str, int]:
    task, _, stage = folder.name.rpartition("_step")
    return task, int(stage) if stage.isdecimal() else 0


def _picture(points: Sequence[Point]) -> Figure:
    # Of the random gradients the normal ones: for them the line of 2^(-2R) is a bound.
    means = [point for point in means_of(points) if point.gradients not in ("Laplace", "t(3)")]
    tasks = {point.gradients: [p for p in points if _task(p) == point.gradients] for point in means}
    return drawn(means, tasks, full=True)


def main(
    which: Annotated[list[str] | None, typer.Argument(metavar="[NAME|FILE]...")] = None,
    traces: Annotated[
        Path, typer.Option(help="Folder of the folders that experiments.traces wrote.")
    ] = Path("results/traces"),
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, comma-separated.")] = "2,4,8",
    out: Annotated[Path, typer.Option(help="Folder of the tables and the picture.")] = Path(
        "results/tradeoff"
    ),
    pages: Annotated[
        Path | None, typer.Option(help="Folder of pages that get the figures of their schemes.")
    ] = None,
) -> None:
    """Prints the tables, and draws the fronts."""
    traces_found = traces_in(traces, [int(n) for n in ranks.split(",")])
    if not traces_found:
        typer.echo(f"no traces in {traces}: python -m experiments.traces records some")
    points = _commands.tradeoff(which or [], traces_found, out, _picture, full=True)
    means = means_of(points)
    write_csv(means, out / "means.csv")
    for path in pages.glob("*.md") if pages else ():
        path.write_text(page_with_errors(path.read_text("utf-8"), means), "utf-8")


if __name__ == "__main__":
    typer.run(main)
