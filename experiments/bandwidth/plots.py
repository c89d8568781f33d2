"""The pictures of the study."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd

__all__ = ["draw"]

Losses = dict[tuple[str, str], list[float]]


def draw(table: pd.DataFrame, losses: Losses, folder: Path) -> list[Path]:
    """Writes the three pictures and returns their paths."""
    tasks = list(dict.fromkeys(table["task"]))
    colours = _colours(list(dict.fromkeys(table["hook"])))
    pictures = {
        "bytes_and_error.png": (lambda axes, task: _bytes_and_error(axes, table, task, colours)),
        "loss.png": (lambda axes, task: _loss(axes, losses, task, colours)),
    }
    if table["step_ratio"].notna().any():
        pictures["step_time.png"] = lambda axes, task: _step_time(axes, table, task, colours)
    paths = []
    for name, paint in pictures.items():
        figure, rows = plt.subplots(
            1, len(tasks), figsize=(6.0 * len(tasks) + 2, 4.6), squeeze=False, layout="constrained"
        )
        for axes, task in zip(rows[0], tasks, strict=True):
            paint(axes, task)
            axes.set_title(task)
        _legend(figure, rows[0][0])
        figure.savefig(folder / name, dpi=120)
        plt.close(figure)
        paths.append(folder / name)
    return paths


def _colours(hooks: list[str]) -> dict[str, Any]:
    return {hook: plt.get_cmap("tab20")(i % 20) for i, hook in enumerate(hooks)}


def _legend(figure: Any, axes: Any) -> None:
    """One legend beside the panels, where it hides no data."""
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        figure.legend(handles, labels, loc="outside right center", fontsize=8)


def _bytes_and_error(axes: Any, table: pd.DataFrame, task: str, colours: dict[str, Any]) -> None:
    """Wire bytes against the error of the averaged gradient; left and low is good."""
    rows = table[(table["task"] == task) & (table["wire_bytes"] > 0)]
    for row in rows.itertuples():
        # An exact hook would not show on a logarithmic axis.
        x, y = row.wire_bytes / 1e3, max(row.relative_error, 1e-8)
        if row.hook == "no hook":  # lies under allreduce: a ring around it
            style = {"s": 130, "facecolors": "none", "edgecolors": [colours[row.hook]]}
        else:
            style = {"s": 45, "color": colours[row.hook]}
        axes.scatter(x, y, label=row.hook, zorder=3, **style)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="kB sent per rank and step")
    axes.set_ylabel("relative error of the averaged gradient")
    axes.grid(alpha=0.3, linewidth=0.5)


def _step_time(axes: Any, table: pd.DataFrame, task: str, colours: dict[str, Any]) -> None:
    """Step time over that of the allreduce hook: median of blocks, whiskers at the quartiles."""
    rows = table[table["task"] == task].iloc[::-1]
    middle = rows["step_ratio"]
    axes.barh(rows["hook"], middle, color=[colours[hook] for hook in rows["hook"]])
    whiskers = [(middle - rows["step_q1"]).clip(lower=0), (rows["step_q3"] - middle).clip(lower=0)]
    axes.errorbar(middle, rows["hook"], xerr=whiskers, fmt="none", ecolor="black", capsize=2, lw=1)
    for hook, ratio in zip(rows["hook"], middle, strict=True):
        axes.text(0.03, hook, f"{ratio:.2f}", va="center", fontsize=8, color="white")
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle="--")
    axes.set_xlabel("step time / step time of allreduce")


def _loss(axes: Any, losses: Losses, task: str, colours: dict[str, Any]) -> None:
    """Training loss of rank 0, smoothed."""
    for (of_task, hook), values in losses.items():
        if of_task == task:
            smooth = pd.Series(values).ewm(span=20).mean()
            # "no hook" equals allreduce: a broad line shows on both sides of it.
            width, alpha = (5.0, 0.35) if hook == "no hook" else (1.2, 1.0)
            axes.plot(smooth, color=colours[hook], label=hook, linewidth=width, alpha=alpha)
    axes.set(xlabel="step", ylabel="training loss (smoothed)")
    axes.grid(alpha=0.3, linewidth=0.5)
