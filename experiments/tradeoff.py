"""Measures the errors and the bits of every registered scheme, on recorded gradients, too.

``python -m experiments.tradeoff`` is the command ``commhooks tradeoff`` on all traces that
``python -m experiments.traces`` has recorded, each with 2, 4 and 8 ranks. Its picture has a part
for each task: schemes are at the geometric means over the stages of the task on most ranks; small
dots are all stages and numbers of ranks. ``means.csv`` has these means.
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

from commhooks.cli import commands as _commands
from commhooks.cli.tradeoff import FIGURES, Point, with_fronts, write_csv
from commhooks.cli.tradeoff_plot import drawn
from commhooks.research.trace import Trace

__all__ = ["means_of", "traces_in"]


def traces_in(folder: Path, ranks: Sequence[int]) -> list[Trace]:
    """Returns the traces in the folders within ``folder``, with each number of ranks they have."""
    folders = sorted({path.parent for path in folder.glob("*/step*.safetensors")}, key=_order)
    most = {path: Trace(path).world_size for path in folders}
    return [Trace(path, ranks=n) for path in folders for n in ranks if n <= most[path]]


def means_of(points: Sequence[Point]) -> list[Point]:
    """Returns a point for each scheme and task: on most ranks, the mean over the task's stages.

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
    return drawn(means, tasks)


def main(
    which: Annotated[list[str] | None, typer.Argument(metavar="[NAME|FILE]...")] = None,
    traces: Annotated[
        Path, typer.Option(help="Folder of the folders that experiments.traces wrote.")
    ] = Path("results/traces"),
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, comma-separated.")] = "2,4,8",
    out: Annotated[Path, typer.Option(help="Folder of the tables and the picture.")] = Path(
        "results/tradeoff"
    ),
) -> None:
    """Prints the tables, and draws the fronts."""
    found = traces_in(traces, [int(n) for n in ranks.split(",")])
    if not found:
        typer.echo(f"no traces in {traces}: python -m experiments.traces records some")
    points = _commands.tradeoff(which or [], found, out, _picture)
    write_csv(means_of(points), out / "means.csv")


if __name__ == "__main__":
    typer.run(main)
