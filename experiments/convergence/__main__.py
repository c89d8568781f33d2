"""Compares the quality of training with each scheme to that with bf16.

Run ``python -m experiments.convergence``. Trains the digits network and the character transformer
of the bandwidth study with every scheme, from several seeds, on Gloo processes; with ``--tasks
"tiny layers"``, 500 layers of 64 outputs. ``gap`` is the final loss on held-out data minus that of
bf16 with the same seed: mean and largest of the seeds. ``steps`` is the number of steps until the
training loss (mean of the last ten) reaches the loss at which bf16 ends, plus 2 %, over the number
that bf16 takes. ``ratio`` is the bytes that a dense all-reduce sends over those of the scheme.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from rich.progress import Progress

from experiments.tools.processes import run_ranks
from experiments.tools.schemes import NO_HOOK, SCHEMES, VARIANTS
from experiments.tools.tasks import TASKS
from experiments.tools.training import Settings, train

BASE = "bf16"
WINDOW, MARGIN = 10, 1.02
# Without a hook a run has the losses of "none"; with "noop" ranks do not train one model.
LEFT_OUT = (NO_HOOK, "noop")
RATES = {"time at 100 Mbit/s": 1e8, "time at 1 Gbit/s": 1e9}


def _train(
    tasks: list[str], hooks: list[str], seeds: int, steps: int, world_size: int
) -> Iterator[pd.DataFrame]:
    """Yields the results of all hooks, for one task and seed at a time."""
    with Progress() as progress:
        for task in tasks:
            for seed in range(seeds):
                rows = []
                settings = Settings(task, hooks, steps=steps, seed=seed)
                bar = progress.add_task(f"{task}, seed {seed}", total=settings.total_steps)
                for message in run_ranks(train, world_size, settings):
                    if "progress" in message:
                        progress.advance(bar, message["steps"])
                    else:
                        rows.append({"seed": seed, **message["case"]})
                yield pd.DataFrame(rows)


def _names(tasks: str) -> list[str]:
    names = [name.strip() for name in tasks.split(",")]
    for name in names:
        if name not in TASKS:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(TASKS)}")
    return names


def _hooks(only: str) -> list[str]:
    """Returns the requested hooks, and the one that all are compared with."""
    known = [name for name in (*SCHEMES, *VARIANTS) if name not in LEFT_OUT]
    names = [name.strip() for name in only.split(";") if name.strip()]
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is not one of {'; '.join(known)}")
    return [name for name in known if name in (BASE, *names)] if names else known


def _steps_to(losses: list[float], target: float) -> float:
    """Returns the first step whose smoothed loss is at ``target`` or below; infinity for none."""
    smooth = pd.Series(losses).rolling(WINDOW).mean()
    reached = smooth.index[smooth <= target]
    return float(reached[0] + 1) if len(reached) else math.inf


def _compared(cases: pd.DataFrame) -> pd.DataFrame:
    """Returns a row per hook of one task and seed, with its comparison to bf16."""
    base = cases[cases.hook == BASE].iloc[0]
    # bf16 reaches it before its end, by the margin: a target of its last loss would depend on the
    # noise of one step.
    target = pd.Series(base.losses).rolling(WINDOW).mean().iloc[-1] * MARGIN
    needed = _steps_to(base.losses, target)
    return pd.DataFrame(
        {
            "task": row.task,
            "seed": row.seed,
            "hook": row.hook,
            "loss": row.loss,
            "accuracy": row.accuracy,
            "gap": row.loss - base.loss,
            "steps": _steps_to(row.losses, target) / needed,
            **_times(row, base, _steps_to(row.losses, target) / needed),
            "ratio": base.wire_bytes * base.dense_bytes / base.payload_bytes / row.wire_bytes,
            "error": row.relative_error,
            "ranks agree": row.ranks_agree,
        }
        for row in cases.itertuples()
    )


def _times(row: Any, base: Any, steps: float) -> dict[str, float]:
    """Returns the time until the quality of bf16 over the time of bf16, on lines of some rates.

    A step takes its measured time on this machine plus the time of its bytes on the line; nothing
    of the latter is hidden by the backward pass.
    """
    times = {}
    for name, rate in RATES.items():
        step_s, base_s = (
            statistics.median(case.block_s) + 8 * case.wire_bytes / rate for case in (row, base)
        )
        times[name] = steps * step_s / base_s
    return times


def _summary(table: pd.DataFrame) -> pd.DataFrame:
    groups = table.groupby(["task", "hook"], sort=False)
    summary = groups[["loss", "accuracy", "gap", "ratio", "error"]].mean()
    for column in ("steps", *RATES):  # a run that does not reach the target is infinite
        summary[column] = groups[column].median()
    summary.insert(3, "largest gap", groups.gap.max())
    return summary.reset_index()


def main(
    seeds: Annotated[int, typer.Option(help="Runs of each scheme.", min=1)] = 3,
    steps: Annotated[int, typer.Option(help="Training steps.", min=77)] = 330,
    world_size: Annotated[int, typer.Option(help="Gloo processes.", min=2)] = 2,
    tasks: Annotated[
        str, typer.Option(help=f"Of {', '.join(TASKS)}; comma-separated.")
    ] = "digits,characters",
    only: Annotated[str, typer.Option(help="Hooks, separated by semicolons; all by default.")] = "",
    out: Annotated[Path, typer.Option(help="Folder of the tables.")] = Path("results/convergence"),
) -> None:
    """Prints the table."""
    out.mkdir(parents=True, exist_ok=True)
    runs: list[pd.DataFrame] = []
    for cases in _train(_names(tasks), _hooks(only), seeds, steps, world_size):
        runs.append(_compared(cases))
        # Written after each seed: the study takes long, and may be interrupted.
        pd.concat(runs).to_csv(out / "runs.csv", index=False)
        _summary(pd.concat(runs)).to_csv(out / "summary.csv", index=False)
    summary = _summary(pd.concat(runs))
    for task, part in summary.groupby("task", sort=False):
        typer.echo(f"\n{task}")
        shown = part.drop(columns="task").sort_values("gap")
        typer.echo(shown.to_string(index=False, float_format="{:.3g}".format))
    typer.echo(f"\nwrote {out / 'summary.csv'} and runs.csv")


if __name__ == "__main__":
    typer.run(main)
