"""The pictures of the study."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd

__all__ = ["draw"]


def draw(
    table: pd.DataFrame, losses: dict[tuple[str, str], list[float]], folder: Path
) -> list[Path]:
    """Writes the three pictures and returns their paths."""
    tasks = list(dict.fromkeys(table["task"]))
    colours = _colours(list(dict.fromkeys(table["hook"])))
    pictures = {
        "bytes_and_error.png": lambda axes, task: _bytes_and_error(axes, table, task, colours),
        "step_time.png": lambda axes, task: _step_time(axes, table, task, colours),
        "loss.png": lambda axes, task: _loss(axes, losses, task, colours),
    }
    paths = []
    for name, paint in pictures.items():
        figure, rows = plt.subplots(
            1, len(tasks), figsize=(6.4 * len(tasks), 4.6), squeeze=False, layout="constrained"
        )
        for axes, task in zip(rows[0], tasks, strict=True):
            paint(axes, task)
            axes.set_title(task)
        figure.savefig(folder / name, dpi=120)
        plt.close(figure)
        paths.append(folder / name)
    return paths


def _colours(hooks: list[str]) -> dict[str, Any]:
    return {hook: plt.get_cmap("tab10")(i % 10) for i, hook in enumerate(hooks)}


def _bytes_and_error(axes: Any, table: pd.DataFrame, task: str, colours: dict[str, Any]) -> None:
    """Wire bytes against the error of the averaged gradient; left and low is good."""
    rows = table[(table["task"] == task) & (table["wire_bytes"] > 0)]
    floor = 1e-8  # exact hooks would not show on a logarithmic axis
    for row in rows.itertuples():
        x, y = row.wire_bytes / 1e3, max(row.relative_error, floor)
        axes.scatter(x, y, color=colours[row.hook], s=45, label=row.hook, zorder=3)
    axes.set(xscale="log", yscale="log", xlabel="kB sent per rank and step")
    axes.set_ylabel("relative error of the averaged gradient")
    axes.grid(alpha=0.3, which="both", linewidth=0.5)
    axes.legend(fontsize=8)


def _step_time(axes: Any, table: pd.DataFrame, task: str, colours: dict[str, Any]) -> None:
    """Step time over that of the allreduce hook."""
    rows = table[table["task"] == task].iloc[::-1]
    bars = axes.barh(rows["hook"], rows["step_ratio"], color=[colours[h] for h in rows["hook"]])
    axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("step time / step time of allreduce")
    axes.margins(x=0.1)


def _loss(
    axes: Any, losses: dict[tuple[str, str], list[float]], task: str, colours: dict[str, Any]
) -> None:
    """Training loss of rank 0, smoothed."""
    for (of_task, hook), values in losses.items():
        if of_task == task:
            smooth = pd.Series(values).ewm(span=20).mean()
            axes.plot(smooth, color=colours[hook], label=hook, linewidth=1.2)
    axes.set(xlabel="step", ylabel="training loss (smoothed)")
    axes.grid(alpha=0.3, linewidth=0.5)
    axes.legend(fontsize=8)
