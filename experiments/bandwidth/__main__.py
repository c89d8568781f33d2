"""``python -m experiments.bandwidth``: what each hook saves and costs, on this machine."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.bandwidth.plots import draw
from experiments.bandwidth.table import environment, printed, with_ratios
from experiments.bandwidth.training import HOOKS, Settings, train
from experiments.processes import run_ranks
from experiments.tasks import TASKS

TABLE_WIDTH = 160
DEFAULT_STEPS, QUICK_STEPS = 220, 77  # 20 and 7 blocks of 11 steps


def main(
    steps: Annotated[int, typer.Option(help="Training steps per hook and task.", min=77)] = (
        DEFAULT_STEPS
    ),
    world_size: Annotated[int, typer.Option(help="Gloo processes.", min=2)] = 2,
    seed: Annotated[int, typer.Option(help="Of models, batches and random draws.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for tables and plots.")] = Path(
        "results/bandwidth"
    ),
    tasks: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(TASKS),
    hooks: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(HOOKS),
    quick: Annotated[bool, typer.Option("--quick", help="A third of the steps.")] = False,
) -> None:
    """Trains both tasks once per hook and compares bytes, time, error and quality."""
    begin = time.perf_counter()
    console = Console()
    if console.width < TABLE_WIDTH:  # a pipe, or a narrow terminal: wrapped lines read better
        console = Console(width=TABLE_WIDTH)
    chosen = _names(hooks, HOOKS)
    runs = [
        Settings(task, chosen, steps=QUICK_STEPS if quick else steps, seed=seed)
        for task in _names(tasks, TASKS)
    ]
    cases, losses = _measure(runs, world_size, console)
    table = with_ratios(pd.DataFrame(cases), world_size)
    for name, rows in table.groupby("task", sort=False):
        console.print(printed(str(name), rows, world_size))
    facts = {**environment(), "world_size": world_size, "seed": seed, "steps": runs[0].steps}
    for path in _write(table, losses, {**facts, "seconds": time.perf_counter() - begin}, out):
        console.print(f"wrote {path}")


def _names(given: str, known: Iterable[str]) -> list[str]:
    names = [name.strip() for name in given.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(known)}")
    if not names:
        raise typer.BadParameter(f"names none of {', '.join(known)}")
    return list(dict.fromkeys(names))


def _measure(
    runs: list[Settings], world_size: int, console: Console
) -> tuple[list[dict[str, Any]], dict[tuple[str, str], list[float]]]:
    """Runs the processes of each task; a bar shows how far they are."""
    cases: list[dict[str, Any]] = []
    losses: dict[tuple[str, str], list[float]] = {}
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        for settings in runs:
            bar = progress.add_task(settings.task, total=settings.total_steps)
            for message in run_ranks(train, world_size, settings):
                if "progress" in message:
                    text = f"{settings.task}: {message['hook']}"
                    progress.update(bar, advance=message["steps"], description=text)
                else:
                    case = message["case"]
                    losses[settings.task, case["hook"]] = case.pop("losses")
                    cases.append(case)
            progress.update(bar, description=settings.task)
    return cases, losses


def _write(
    table: pd.DataFrame,
    losses: dict[tuple[str, str], list[float]],
    facts: dict[str, Any],
    out: Path,
) -> list[Path]:
    """Writes tables, settings and plots; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    table.to_csv(out / "bandwidth.csv", index=False)
    curves = [
        {"task": task, "hook": hook, "step": step, "loss": loss}
        for (task, hook), values in losses.items()
        for step, loss in enumerate(values)
    ]
    pd.DataFrame(curves).to_csv(out / "losses.csv", index=False)
    (out / "run.json").write_text(json.dumps(facts, indent=2) + "\n")
    return [out / "bandwidth.csv", out / "losses.csv", out / "run.json", *draw(table, losses, out)]


if __name__ == "__main__":
    typer.run(main)
