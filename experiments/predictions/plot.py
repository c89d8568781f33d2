"""Draws predicted beside measured values."""

from __future__ import annotations

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter, StrMethodFormatter

__all__ = ["UNITS", "plotted"]

# Okabe and Ito's colours, which people with colour blindness distinguish.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
_TITLES = {
    "all_reduce": "all-reduce, 32 to 8192 GPUs",
    "diloco": "steps over slow lines",
    "grace": "ResNet-50 at 1 Gbit/s",
    "grace_signs": "steps at 10 Gbit/s, over dense",
    "quickreduce": "all-reduce of 4 MI300, over dense",
}
UNITS = {
    "all_reduce": "microseconds",
    "diloco": "milliseconds per step",
    "grace": "milliseconds per step",
    "grace_signs": "ratio of times",
    "quickreduce": "ratio of times",
}


def plotted(tables: dict[str, pd.DataFrame]) -> Figure:
    """Returns a plot per study: predicted over measured, fitted points hollow."""
    mpl.use("agg")
    figure = Figure(figsize=(13, 8), layout="constrained")
    axes = figure.subplots(2, 3).flat
    for axis, (study, table) in zip(axes, tables.items(), strict=False):
        low, high = table.measured.min() * 0.8, table.measured.max() * 1.25
        axis.plot([low, high], [low, high], color="0.4", linewidth=1)
        axis.fill_between(
            [low, high], [0.9 * low, 0.9 * high], [1.1 * low, 1.1 * high], color="0.92"
        )
        for colour, (group, rows) in zip(_COLOURS, table.groupby("group"), strict=False):
            for used, some in rows.groupby("fitted"):
                axis.scatter(
                    some.measured,
                    some.predicted,
                    s=22,
                    edgecolors=colour,
                    facecolors="none" if used else colour,
                    label=None if used and not rows.fitted.all() else group,
                )
        if study in ("grace_signs", "quickreduce"):
            axis.axvline(1, color="0.6", linewidth=0.8, linestyle=":")
            axis.axhline(1, color="0.6", linewidth=0.8, linestyle=":")
        else:
            axis.loglog()
            if high < 10 * low:
                for scale in (axis.xaxis, axis.yaxis):
                    scale.set_major_locator(FixedLocator([300, 500, 1000, 2000]))
                    scale.set_major_formatter(StrMethodFormatter("{x:.0f}"))
                    scale.set_minor_formatter(NullFormatter())
        unit = UNITS[study]
        axis.set(title=_TITLES[study], xlabel=f"measured ({unit})", ylabel=f"predicted ({unit})")
        axis.legend(fontsize=8, loc="upper left")
    legend = list(axes)[len(tables) :] or [figure.axes[-1]]
    legend[0].axis("off")
    legend[0].text(
        0.05,
        0.6,
        "line: predicted = measured\nband: within 10 %\nhollow: used to fit\nfilled: judged",
        transform=legend[0].transAxes,
        fontsize=11,
    )
    return figure
