"""Draws the share of the time computing, beside what was predicted."""

from __future__ import annotations

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from commhooks.report._style import OKABE_ITO
from experiments.slow_line.cells import GOALS, Line

__all__ = ["drawn"]

_MARKS = ("o", "s", "^", "D", "v", "P")


def drawn(table: pd.DataFrame) -> Figure:
    """Returns a figure: a panel per rate, and one for the goals in slow motion."""
    mpl.use("agg")
    near = table[(table.round_trip_ms == 0) & (table.dilation == 1) & (table.plan != "ddp")]
    goals = table[table.dilation > 1]
    figure = Figure(figsize=(13, 8.5), layout="constrained")
    codecs = list(dict.fromkeys(table.codec))
    styles = dict(zip(codecs, zip(OKABE_ITO, _MARKS, strict=False), strict=False))
    grid = figure.subplot_mosaic([["50", "200", "1000", "5000"], ["goals"] * 4])
    for mbit in GOALS:
        axis = grid[f"{mbit:g}"]
        for (plan, codec), rows in near[near.mbit == mbit].groupby(["plan", "codec"], sort=False):
            rows = rows.sort_values("every")
            colour, mark = styles[codec]
            axis.plot(
                *(rows.every, 100 * rows["share"]),
                color=colour,
                marker=mark,
                linestyle="-" if plan == "overlapped" else ":",
                label=f"{codec}, {plan}",
            )
        axis.axhline(90, color="0.6", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_xticks([8, 32, 128], ["8", "32", "128"])
        axis.set(title=str(Line(mbit)), ylim=(-3, 103), xlabel="H (steps between exchanges)")
    grid["50"].set_ylabel("time computing (%)")
    handles: dict[str, object] = {}
    for mbit in GOALS:
        for handle, label in zip(*grid[f"{mbit:g}"].get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        list(handles.values()), list(handles), loc="outside upper center", ncols=5, fontsize=9
    )
    _goals(grid["goals"], goals, styles)
    return figure


def _goals(axis: mpl.axes.Axes, goals: pd.DataFrame, styles: dict[str, tuple[str, str]]) -> None:
    names = []
    for place, row in enumerate(goals.itertuples()):
        colour, _ = styles[row.codec]
        axis.bar(place, 100 * row[list(goals.columns).index("share") + 1], color=colour, width=0.7)
        axis.plot(place, 100 * row.predicted, "k_", markersize=18, markeredgewidth=2)
        far = f"\n{row.round_trip_ms:g} ms\n{100 * row.loss:g} % lost" if row.round_trip_ms else ""
        names.append(f"{row.mbit:g}\nH = {row.every}\n{row.codec.split(':')[0]}{far}")
    axis.axhline(90, color="0.6", linewidth=0.8)
    axis.set_xticks(range(len(names)), names, fontsize=8)
    axis.set(
        ylim=(0, 103),
        ylabel="time computing (%)",
        xlabel="Mbit/s, H, codec, round trip and loss; overlapped, in slow motion. Line: predicted",
    )
