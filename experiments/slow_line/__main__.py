"""Runs the study: ``python -m experiments.slow_line``, and ``--quality`` for its second part."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from commhooks.report._page import Page
from experiments.slow_line.cells import (
    GOALS,
    HOSTS,
    Cell,
    Line,
    dense_share,
    lines,
    planned_periods,
    planned_s,
    share,
    source,
)
from experiments.slow_line.plot import drawn
from experiments.slow_line.quality import gaps, measured
from experiments.slow_line.ranks import run_rank
from experiments.tools.hosts import messages_from_hosts
from experiments.tools.namespaces import reason_not_to_run

KEYS = ["mbit", "round_trip_ms", "loss", "dilation", "plan", "codec", "every"]
START_S = 12  # of a line: processes start, codecs are measured


def _rows(
    line: Line, cell: Cell, measured: dict[str, Any], asked: list[Cell]
) -> list[dict[str, Any]]:
    """Returns the rows of a measured cell, one for each of ``asked`` that the cell represents."""
    seconds, periods = measured["times"][-1], measured["periods"]
    rows = []
    for wanted in asked:
        if source(wanted) != cell:
            continue
        # What a period takes beside its sleeps does not depend on their number.
        asked_s = seconds + periods * (wanted.every - cell.every) * line.compute_s
        rows.append(
            {
                **line._asdict(),
                "plan": wanted.plan,
                "codec": wanted.codec,
                "every": wanted.every,
                "share": share(wanted.every, periods, asked_s, line.compute_s),
                "predicted": measured["predicted"][str(wanted.every)],
                "published": dense_share(line, wanted),
                "waiting_ms": 1e3 * (asked_s / periods - wanted.every * line.compute_s),
                "outer_ms": 1e3 * measured["outer_s"],
                "periods": periods,
                "measured_every": cell.every,
            }
        )
    return rows


def _missing(out: Path, asked: dict[Line, list[Cell]]) -> dict[Line, list[Cell]]:
    """Returns the cells without a row in the table that an earlier run began."""
    if not out.exists():
        return asked
    have = {tuple(row) for row in pd.read_csv(out)[KEYS].itertuples(index=False)}
    return {
        line: [cell for cell in cells if (*line, cell.plan, cell.codec, cell.every) not in have]
        for line, cells in asked.items()
    }


def _measure(line: Line, cells: list[Cell], periods: int, out: Path, progress: Progress) -> None:
    """Measures the cells of a line, and writes each row at once."""
    sources = list(dict.fromkeys(source(wanted_cell) for wanted_cell in cells))
    # The measured cell predicts for all periods that it represents.
    wanted = [
        [wanted_cell.every for wanted_cell in cells if source(wanted_cell) == cell]
        for cell in sources
    ]
    task = [
        [cell.plan, cell.codec, cell.every, *planned_periods(line, cell, periods), every]
        for cell, every in zip(sources, wanted, strict=True)
    ]
    costs = [planned_s(line, cell, periods) for cell in sources]
    bar = progress.add_task(str(line), total=START_S + sum(costs))
    messages = messages_from_hosts(
        run_rank,
        {"cells": task, "line": list(line)},
        hosts=HOSTS,
        rate=f"{line.mbit / line.dilation:g}mbit",
        delay_s=line.round_trip_ms / 2e3 * line.dilation,
        loss=line.loss,
        timeout=900,
    )
    done = iter(zip(sources, costs, strict=True))
    for message in messages:
        cell, cost = next(done)
        rows = _rows(line, cell, message.content, cells)
        pd.DataFrame(rows).to_csv(
            out, mode="a", header=not out.exists(), index=False, float_format="%.5g"
        )
        progress.update(bar, advance=cost, description=f"{line}: {cell.codec}")
    progress.update(bar, completed=START_S + sum(costs), description=str(line))


def _print(table: pd.DataFrame, console: Console) -> None:
    for where, rows in table.groupby(KEYS[:4], sort=False):
        line = Line(*where)
        shown = Table("plan", "codec", "H", "computing", "predicted", "published",
                      title=str(line))  # fmt: skip
        for row in rows.itertuples():
            published = "" if pd.isna(row.published) else f"{row.published:.2%}"
            shown.add_row(row.plan, row.codec, str(row.every), f"{row.share:.2%}",
                          f"{row.predicted:.2%}", published)  # fmt: skip
        console.print(shown)
        goal = rows[(rows.every <= GOALS[line.mbit]) & (rows["share"] >= 0.9)]
        best = rows[rows.every == GOALS[line.mbit]].nlargest(1, "share")
        for row in best.itertuples():
            verdict = "met" if len(goal) else "not met"
            console.print(
                f"Goal, 90 % at H = {GOALS[line.mbit]}: {verdict}; best {row.plan} {row.codec}, "
                f"{row.share:.1%}"
            )


def main(
    quality: Annotated[bool, typer.Option("--quality", help="The losses, not the times.")] = False,
    rates: Annotated[str, typer.Option(help="Mbit/s, comma-separated.")] = "50,200,1000,5000",
    kinds: Annotated[str, typer.Option(help="Of lines, comma-separated.")] = "near,fast,far",
    only: Annotated[str, typer.Option(help="Plans or codecs, comma-separated.")] = "",
    periods: Annotated[int, typer.Option(help="Timed exchanges of a quick cell.", min=1)] = 2,
    seeds: Annotated[int, typer.Option(help="With --quality.", min=2)] = 3,
    steps: Annotated[int, typer.Option(help="With --quality.", min=16)] = 512,
    plan_only: Annotated[bool, typer.Option("--plan", help="Say how long it would take.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of tables and pictures.")] = Path(
        "results/slow_line"
    ),
) -> None:
    """Measures the share of time spent computing; continues an interrupted run."""
    console, begin = Console(), time.perf_counter()
    if quality:
        _quality(out, console, seeds=seeds, steps=steps)
        return
    asked = _asked(rates, only, kinds)
    if (reason := reason_not_to_run()) and not plan_only:
        sys.exit(f"experiments.slow_line: {reason}")
    out.mkdir(parents=True, exist_ok=True)
    path = out / "shares.csv"
    missing = {line: cells for line, cells in _missing(path, asked).items() if cells}
    total = 0.0
    for line, cells in missing.items():
        seconds = START_S + sum(
            planned_s(line, cell, periods)
            for cell in dict.fromkeys(source(wanted) for wanted in cells)
        )
        console.print(f"{line}: {len(cells)} cells, about {seconds:.0f} s")
        total += seconds
    console.print(f"about {total / 60:.1f} minutes")
    if plan_only:
        return
    columns = (TextColumn("{task.description:44}"), BarColumn(18), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for line, cells in missing.items():
            _measure(line, cells, periods, path, progress)
    table = pd.read_csv(path)
    _print(table, console)
    figure = drawn(table)
    figure.savefig(out / "shares.png", dpi=110)
    _page(table, figure).write(out / "shares.html")
    console.print(f"{time.perf_counter() - begin:.0f} s; wrote {path}")


def _page(table: pd.DataFrame, figure: Figure) -> Page:
    page = Page("Share of the time computing on slow lines")
    page.text(
        f"{HOSTS} hosts, 30.8 M parameters, 25 ms of computing per step. H: steps between two "
        f"exchanges of a parameter. Goal: 90 %."
    )
    page.figure(figure, "black line: predicted")
    for where, rows in table.groupby(KEYS[:4], sort=False):
        page.section(str(Line(*where)))
        columns = (100 * rows[name] for name in ("share", "predicted", "published"))
        values = (rows.plan, rows.codec, rows.every, *columns)
        heads = ("plan", "codec", "H", "computing [%]", "predicted [%]", "published, dense [%]")
        page.table(heads, list(zip(*values, strict=True)))
    return page


def _quality(out: Path, console: Console, *, seeds: int, steps: int) -> None:
    begin = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    columns = (TextColumn("{task.description:10}"), BarColumn(18), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        losses = measured(
            out / "losses.csv", seeds=seeds, steps=steps, world_size=HOSTS, progress=progress
        )
    table = pd.DataFrame(gaps(losses[losses.steps == steps]))
    table.to_csv(out / "quality.csv", index=False, float_format="%.4f")
    console.print(table.to_string(index=False, float_format="{:.3f}".format))
    seconds = time.perf_counter() - begin
    console.print(f"{seconds:.0f} s; wrote {out / 'quality.csv'} and losses.csv")


def _asked(rates: str, only: str, kinds: str) -> dict[Line, list[Cell]]:
    wanted = {float(rate) for rate in rates.split(",")}
    if unknown := wanted - set(GOALS):
        raise typer.BadParameter(f"rates are {', '.join(map(str, GOALS))}, not {unknown}")
    some = set(filter(None, only.split(",")))
    return {
        line: [cell for cell in cells if not some or some & {cell.plan, cell.codec}]
        for line, cells in lines(set(kinds.split(","))).items()
        if line.mbit in wanted
    }


if __name__ == "__main__":
    typer.run(main)
