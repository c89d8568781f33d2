"""``python -m experiments.bandwidth``: what each hook saves and costs, on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pandas as pd
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from experiments.bandwidth.training import HOOKS, Settings, train
from experiments.processes import run_ranks
from experiments.tasks import TASKS

COLUMNS = {
    "hook": ("hook", "{}"),
    "dense_bytes": ("dense kB", "{:.1f}"),
    "payload_bytes": ("payload kB", "{:.1f}"),
    "wire_bytes": ("wire kB", "{:.1f}"),
    "ratio_fp32": ("x fp32", "{:.1f}"),
    "ratio_bf16": ("x bf16", "{:.1f}"),
    "step_ratio": ("step / allreduce", "{:.2f}"),
    "exposed_s": ("exposed ms", "{:.2f}"),
    "headroom": ("headroom", "{:.0%}"),
    "loss": ("loss", "{:.3f}"),
    "accuracy": ("accuracy", "{:.1%}"),
    "relative_error": ("gradient error", "{:.1e}"),
    "ranks_agree": ("ranks agree", "{}"),
}
TABLE_WIDTH = 150
SCALE = {"dense_bytes": 1e-3, "payload_bytes": 1e-3, "wire_bytes": 1e-3, "exposed_s": 1e3}


def main(
    steps: Annotated[int, typer.Option(help="Training steps per hook and task.", min=33)] = 220,
    world_size: Annotated[int, typer.Option(help="Gloo processes.", min=1)] = 2,
    seed: Annotated[int, typer.Option(help="Of models, batches and random draws.")] = 0,
    out: Annotated[Path, typer.Option(help="Where table and plots go.")] = Path(
        "results/bandwidth"
    ),
    task: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(TASKS)}.")] = None,
    hook: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(HOOKS)}.")] = None,
) -> None:
    """Trains both tasks once per hook and compares bytes, time, error and quality."""
    console = Console()
    if console.width < TABLE_WIDTH:  # a pipe, or a narrow terminal: wrapped lines read better
        console = Console(width=TABLE_WIDTH)
    tasks, hooks = task or list(TASKS), hook or list(HOOKS)
    for given, known in ((tasks, TASKS), (hooks, HOOKS)):
        for name in given:
            if name not in known:
                raise typer.BadParameter(f"{name!r} is not one of {', '.join(known)}")
    cases, losses = _measure(tasks, hooks, steps, world_size, seed, console)
    table = _with_ratios(pd.DataFrame(cases))
    for name, rows in table.groupby("task", sort=False):
        _print(str(name), rows, world_size, console)
    _write(table, losses, out, console)


def _measure(
    tasks: list[str], hooks: list[str], steps: int, world_size: int, seed: int, console: Console
) -> tuple[list[dict[str, object]], dict[tuple[str, str], list[float]]]:
    """Runs the processes of each task; a bar shows how far they are."""
    cases: list[dict[str, object]] = []
    losses: dict[tuple[str, str], list[float]] = {}
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        for name in tasks:
            settings = Settings(task=name, hooks=hooks, steps=steps, seed=seed)
            blocks = max(steps // (settings.block + 1), 3)
            bar = progress.add_task(name, total=blocks * (settings.block + 1) * len(hooks))
            for message in run_ranks(train, world_size, settings):
                if "progress" in message:
                    text = f"{name}: {message['hook']}"
                    progress.update(bar, advance=message["steps"], description=text)
                else:
                    case = message["case"]
                    losses[name, case["hook"]] = case.pop("losses")
                    cases.append(case)
            progress.update(bar, description=name)
    return cases, losses


def _with_ratios(table: pd.DataFrame) -> pd.DataFrame:
    """Adds the columns that compare a hook with others of its task."""
    dense_wire = table["dense_bytes"] / table["payload_bytes"] * table["wire_bytes"]
    fp32 = dense_wire.groupby(table["task"]).transform("max")
    table["ratio_fp32"] = fp32 / table["wire_bytes"]
    table["ratio_bf16"] = table["ratio_fp32"] / 2
    for task in table["task"].unique():
        rows = table["task"] == task
        steps = table.loc[rows].set_index("hook")["step_s"]
        table.loc[rows, "step_ratio"] = table.loc[rows, "step_s"] / steps.get(
            "allreduce", float("nan")
        )
        floor = steps.get("no-op headroom", float("nan"))
        table.loc[rows, "headroom"] = 1 - floor / table.loc[rows, "step_s"]
    return table


def _print(task: str, rows: pd.DataFrame, world_size: int, console: Console) -> None:
    shown = Table(title=f"{task}: {world_size} Gloo processes, per rank and step")
    for column, (title, _) in COLUMNS.items():
        shown.add_column(title, justify="left" if column == "hook" else "right")
    for row in rows.to_dict("records"):
        cells = []
        for column, (_, form) in COLUMNS.items():
            value = row[column] * SCALE[column] if column in SCALE else row[column]
            missing = isinstance(value, float) and value != value or value == float("inf")
            cells.append("-" if missing else form.format(value))
        shown.add_row(*cells)
    console.print(shown)


def _write(
    table: pd.DataFrame,
    losses: dict[tuple[str, str], list[float]],
    out: Path,
    console: Console,
) -> None:
    from experiments.bandwidth.plots import draw

    out.mkdir(parents=True, exist_ok=True)
    table.to_csv(out / "bandwidth.csv", index=False)
    curves = [
        {"task": task, "hook": hook, "step": step, "loss": loss}
        for (task, hook), values in losses.items()
        for step, loss in enumerate(values)
    ]
    pd.DataFrame(curves).to_csv(out / "losses.csv", index=False)
    for path in [out / "bandwidth.csv", out / "losses.csv", *draw(table, losses, out)]:
        console.print(f"wrote {path}")


if __name__ == "__main__":
    typer.run(main)
