"""Says within which margin each scheme keeps the quality of training with bf16.

Run ``python -m experiments.quality``. ``plan.md`` says what is run and how it is judged. Each run
appends a row to ``runs_<task>.csv``; a study that was ended goes on where it stopped, and
``--report`` makes tables and pictures of the runs there are.
"""

from __future__ import annotations

import math
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer
from rich.console import Console

from commhooks.errors import MissingPackageError
from experiments.quality.page import ADVISED, HOME, pages_with, told
from experiments.quality.plots import draw_forest, draw_predictors
from experiments.quality.pool import Progressed, append, commit, missing, planned, read, run_all
from experiments.quality.setups import BASE, SETUPS, Setup, small
from experiments.quality.verdicts import FEWEST, LOOKS, comparable, predictors, sentence, summary

OUT = Path("docs/results/quality")


def _chosen(task: str, arms: str) -> list[Setup]:
    """Returns the tasks, each with the arms that were asked for."""
    names = [name.strip() for name in task.split(",") if name.strip()] or list(SETUPS)
    for name in names:
        if name not in SETUPS:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(SETUPS)}")
    setups = [SETUPS[name] for name in names]
    wanted = [name.strip() for name in arms.split(";") if name.strip()]
    if not wanted:
        return setups
    known = {arm.name for setup in setups for arm in setup.arms}
    for name in wanted:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is not one of {'; '.join(sorted(known))}")
    chosen = []
    for setup in setups:
        bases = {arm.base for arm in setup.arms if arm.name in wanted}
        arms_of_task = tuple(arm for arm in setup.arms if arm.name in {*wanted, *bases})
        chosen.append(replace(setup, arms=arms_of_task))
    return [setup for setup in chosen if setup.arms]


def _train(
    setup: Setup, out: Path, *, seeds: int | None, until: float, jobs: int, device: str
) -> None:
    """Runs what is missing of a task."""
    setup.task(setup.ranks, batch_size=1, seed=0)  # here, where it can say what is missing
    path = _file(out, setup.name)
    facts = {
        "commit": commit(),
        "command": shlex.join(["python", "-m", "experiments.quality", *sys.argv[1:]]),
    }
    for look in (*LOOKS, math.inf):  # after each, arms whose verdict is sure end
        rows = read(path)
        runs = [run for run in planned(setup, rows, seeds) if run.number < look]
        try:
            left = missing(runs, rows, setup.steps)
        except ValueError as error:
            raise typer.BadParameter(f"{path}: {error}") from error
        longest = float(rows.seconds.tail(20).max()) if len(rows) else 0.0
        progress = Progressed(setup, len(runs), rows, left, jobs, Console())
        with progress.bar:
            for row in run_all(setup, left, jobs=jobs, device=device, until=until, longest=longest):
                append(path, row | facts)
                progress.add(row)


def _file(out: Path, task: str) -> Path:
    return out / f"runs_{task.replace(' ', '_')}.csv"


def judged(out: Path = OUT, fewest: int = FEWEST) -> dict[str, pd.DataFrame]:
    """Returns the table of each task that a folder has judged: some arm has enough runs."""
    tables = {
        name: summary(setup, read(_file(out, name)), fewest) for name, setup in SETUPS.items()
    }
    return {name: table for name, table in tables.items() if len(table)}


def _report(out: Path, fewest: int) -> None:
    """Judges all runs there are; prints and writes tables and pictures."""
    tables = judged(out, fewest)
    for name, table in tables.items():
        setup = SETUPS[name]
        typer.echo(f"\n{setup.name}: gap to {BASE} in %, with its 95 % interval")
        shown = table[["arm", "runs", "planned", "diverged", "outcome"]].copy()
        for column in ("gap", "low", "high"):
            shown[column] = 100 * table[column]
        shown["verdict"] = [told(row) for row in table.itertuples()]
        typer.echo(shown.to_string(index=False, float_format="{:.3f}".format))
        correlations = predictors(setup, table)
        if setup.name == ADVISED and correlations:
            typer.echo(sentence(correlations))
            picture = out / "predictors.png"
            draw_predictors(comparable(setup, table), correlations, picture)
    if not tables:
        typer.echo(f"no arm in {out} has {fewest} pairs of runs yet")
        return
    pd.concat(tables.values()).to_csv(out / "summary.csv", index=False, float_format="%.6g")
    draw_forest(tables, out / "forest.png")
    typer.echo(f"\nwrote {out / 'summary.csv'} and pictures")
    if out.resolve() == (HOME / OUT).resolve():
        for path, text in pages_with(tables).items():
            path.write_text(text)
            typer.echo(f"wrote the tables of {path.relative_to(HOME)}")


def main(
    task: Annotated[
        str, typer.Option(help=f"Of {', '.join(SETUPS)}; comma-separated. All but gpu by default.")
    ] = "",
    arms: Annotated[
        str,
        typer.Option(
            help="Separated by semicolons, all by default; what they are compared with is added."
        ),
    ] = "",
    seeds: Annotated[
        int | None, typer.Option(help="Runs of an arm; by default those of the plan.", min=1)
    ] = None,
    minutes: Annotated[float, typer.Option(help="No run ends later than this.")] = math.inf,
    jobs: Annotated[int, typer.Option(help="Processes, of one thread each.", min=1)] = 2,
    device: Annotated[str, typer.Option(help="cpu or cuda; the task gpu is for cuda.")] = "cpu",
    rehearse: Annotated[
        bool, typer.Option(help="Runs a few steps of two seeds, and writes to results/quality.")
    ] = False,
    report: Annotated[
        bool, typer.Option(help="Only makes tables and pictures of the runs there are.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder of runs, tables and pictures.")] = OUT,
) -> None:
    """Runs what is missing of the study, and judges it."""
    until = time.monotonic() + 60 * minutes
    if rehearse and out == OUT:
        out = Path("results/quality")
    setups = _chosen(task, arms)
    if not task:
        setups = [setup for setup in setups if setup.name != "gpu" or rehearse]
    for setup in setups if not report else ():
        if rehearse:
            setup = small(setup)
        try:
            _train(setup, out, seeds=seeds, until=until, jobs=jobs, device=device)
        except MissingPackageError as error:
            typer.echo(f"left out: {error}")
    _report(out, 2 if rehearse else FEWEST)


if __name__ == "__main__":
    typer.run(main)
