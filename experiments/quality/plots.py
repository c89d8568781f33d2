"""Draws the intervals of all arms, and the errors of schemes against their gaps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib
import pandas as pd

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from experiments.quality.setups import SETUPS
from experiments.quality.verdicts import FIGURES, MARGIN, NARROW, counted

__all__ = ["draw_forest", "draw_predictors"]

_COLOURS = {"proved": "#1b7837", "refuted": "#b2182b", "better": "#2166ac", "not": "#666666"}
_SHOWN = 0.03  # gaps beyond it are arrows: controls would make all others invisible


def draw_forest(tables: Mapping[str, pd.DataFrame], path: Path) -> None:
    """Draws the gap of each arm with its interval and the margins, a panel per task.

    Draws nothing where no arm has a verdict.
    """
    shown = {task: table[table.verdict != ""] for task, table in tables.items()}
    shown = {task: table for task, table in shown.items() if len(table)}
    if not shown:
        return
    heights = [len(table) for table in shown.values()]
    figure, panels = plt.subplots(
        len(shown), 1, figsize=(8, 1.6 + 0.27 * sum(heights) + 0.6 * len(shown)), squeeze=False,
        sharex=True, height_ratios=[height + 1 for height in heights], layout="constrained",
    )  # fmt: skip
    for panel, (task, table) in zip(panels[:, 0], shown.items(), strict=True):
        _draw_panel(panel, task, table)
    panels[-1, 0].set_xlabel("outcome over that of bf16, % of it; above 0 is worse")
    marks = [
        *(Line2D([], [], color=colour, marker="o") for colour in _COLOURS.values()),
        Line2D([], [], color="#666666", marker="o", markerfacecolor="white"),
        Patch(color="#dddddd"),
        Patch(color="#eeeeee"),
    ]
    labels = ["not proved" if verdict == "not" else verdict for verdict in _COLOURS]
    labels += ["fewer runs than planned", f"{100 * NARROW:.1f} %", f"{100 * MARGIN:.1f} %"]
    figure.legend(marks, labels, loc="outside upper center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_panel(panel: plt.Axes, task: str, table: pd.DataFrame) -> None:
    limit = 100 * _SHOWN
    for margin, shade in ((MARGIN, "#eeeeee"), (NARROW, "#dddddd")):
        panel.axvspan(-100 * margin, 100 * margin, color=shade, zorder=0)
    panel.axvline(0, color="#999999", linewidth=0.8)
    for place, row in enumerate(table.itertuples()):
        colour = _COLOURS[row.verdict.split()[0]]
        low, mean, high = 100 * row.low, 100 * row.gap, 100 * row.high
        if max(abs(low), abs(high)) > limit:  # an arrow stands for what lies outside, in figures
            side = limit if mean > 0 else -limit
            panel.plot(side, place, marker=">" if mean > 0 else "<", color=colour, clip_on=False)
            panel.annotate(
                f"{low:.1f} to {high:.1f}", (side, place), xytext=(-9 if mean > 0 else 9, 0),
                textcoords="offset points", ha="right" if mean > 0 else "left", va="center",
                fontsize=8,
            )  # fmt: skip
        else:
            panel.plot([low, high], [place, place], color=colour, linewidth=2, zorder=1)
            face = colour if row.runs >= row.planned else "white"
            panel.plot(mean, place, "o", color=colour, markerfacecolor=face, markersize=4)
    panel.set_xlim(-limit, limit)
    panel.set_ylim(len(table) - 0.5, -0.5)
    names = [
        f"{row.arm} ({counted(row)} runs)" + (f", {row.role}" if row.role else "")
        for row in table.itertuples()
    ]
    panel.set_yticks(range(len(table)), names, fontsize=8)
    unit = "share of hits" if SETUPS[task].outcome == "misses" else "loss"
    panel.set_title(f"{task} ({unit})", fontsize=9, loc="left")


def draw_predictors(table: pd.DataFrame, correlations: Mapping[str, float], path: Path) -> None:
    """Draws the gap of each scheme against its error, a panel per figure."""
    # A logarithm has no place for the error of a scheme that is exact.
    table = table[table.step_error > 0]
    figure, panels = plt.subplots(3, 2, figsize=(9, 9.5), sharey=True, layout="constrained")
    colours = plt.get_cmap("tab20").colors  # type: ignore[attr-defined]
    for panel, name in zip(panels.flat, FIGURES, strict=True):
        for index, row in enumerate(table.itertuples()):
            panel.errorbar(
                getattr(row, name), 100 * row.gap, yerr=100 * (row.high - row.gap),
                fmt="os^D"[index % 4], color=colours[index % 20], markersize=5, label=row.arm,
            )  # fmt: skip
        panel.set_xscale("log")
        panel.set_yscale("symlog", linthresh=0.5)
        panel.set_title(f"{name}: rank correlation {correlations[name]:.2f}", fontsize=9)
        panel.set_xlabel("squared error over the squared norm of the mean", fontsize=8)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8)
    figure.supylabel("gap to bf16, %; linear up to 0.5 %, then logarithmic")
    figure.savefig(path, dpi=150)
    plt.close(figure)
