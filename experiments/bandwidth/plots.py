"""Draws the pictures of the study."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # before pyplot, which would look for a display
import matplotlib.pyplot as plt
import pandas as pd

from experiments.bandwidth.table import BASE, FLOOR
from experiments.tools.schemes import NO_HOOK

__all__ = ["draw", "when_it_pays"]

SAVES, COSTS, PLAIN, INK = "#2a6f97", "#c97b4a", "#9aa1ad", "#333333"
LINK_COLOURS = ("#2a6f97", "#a9c6da")
# The schemes and links of the README's picture.
CHOSEN = (BASE, "fp16", "int8", "int4", "topk 1 %", "powersgd, rank 4", FLOOR)
CHOSEN_LINKS = ("1 Gbit/s", "unlimited")


def draw(table: pd.DataFrame, folder: Path) -> list[Path]:
    """Writes the pictures, and the table of the README's picture; returns their paths."""
    chosen = when_it_pays(table)
    pictures = {"step_time.png": _step_time(table), "bytes_and_error.png": _bytes_and_error(table)}
    paths = []
    if not chosen.empty:
        chosen.to_csv(folder / "when_it_pays.csv", float_format="%.3f")
        paths.append(folder / "when_it_pays.csv")
        pictures = {"when_it_pays.png": _when_it_pays(chosen), **pictures}
    for name, figure in pictures.items():
        figure.savefig(folder / name, dpi=150)
        plt.close(figure)
        paths.append(folder / name)
    return paths


def when_it_pays(table: pd.DataFrame) -> pd.DataFrame:
    """Returns step times over that of no compression: a row per scheme, a column per link."""
    wide = table.pivot(index="scheme", columns="link", values="over_none")
    wide = wide.reindex(columns=[link for link in CHOSEN_LINKS if link in wide.columns])
    return wide.reindex([name for name in CHOSEN if name in wide.index]).dropna(how="all")


def _when_it_pays(chosen: pd.DataFrame) -> Any:
    figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    width = 0.8 / len(chosen.columns)
    # Bars of one scheme stand next to each other, centred at its position.
    for place, (link, colour) in enumerate(zip(chosen.columns, LINK_COLOURS, strict=False)):
        positions = [
            position + (place - (len(chosen.columns) - 1) / 2) * width
            for position in range(len(chosen))
        ]
        bars = axes.bar(positions, chosen[link], width * 0.94, color=colour, label=_with_link(link))
        for bar, value in zip(bars, chosen[link], strict=True):
            middle = bar.get_x() + bar.get_width() / 2
            colour_of_text = "white" if place == 0 else INK
            axes.text(middle, 0.04, f"{value:.2f}", ha="center", fontsize=8, color=colour_of_text)
    axes.axhline(1, color=INK, linewidth=0.8, linestyle="--")
    names = [f"{name}\n(sends nothing)" if name == FLOOR else name for name in chosen.index]
    axes.set_xticks(range(len(chosen)), [name.replace(", ", ",\n") for name in names], fontsize=9)
    axes.set_ylabel("step time over that of none (ratio)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylim(top=1.25 * float(chosen.max(axis=None)))  # room for the legend
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="upper right")
    return figure


def _with_link(link: str) -> str:
    return "this machine, no limit" if link == "unlimited" else link


def _step_time(table: pd.DataFrame) -> Any:
    """Draws step times over that of no compression: medians, with whiskers at the quartiles."""
    links = list(table["link"].unique())
    figure, panels = plt.subplots(
        1, len(links), figsize=(4.4 * len(links) + 1, 7), squeeze=False, layout="constrained"
    )
    for link, axes in zip(links, panels[0], strict=True):
        rows = table[table["link"] == link].sort_values("over_none", ascending=False)
        ratio, names = rows["over_none"], rows["scheme"]
        colours = [{"yes": SAVES, "no": COSTS}.get(pays, PLAIN) for pays in rows["pays"]]
        axes.barh(names, ratio, color=colours, height=0.7)
        whiskers = [ratio - rows["over_none_q1"], rows["over_none_q3"] - ratio]
        axes.errorbar(
            ratio, names, xerr=[w.clip(lower=0) for w in whiskers], fmt="none", ecolor=INK, lw=1
        )
        axes.axvline(1, color=INK, linewidth=0.8, linestyle="--")
        how = rows["how"].iloc[0]
        axes.set(title=f"{_with_link(link)} ({how})", xlabel="step time over that of none (ratio)")
        axes.tick_params(axis="y", labelsize=8)
        axes.margins(y=0.01)
        axes.spines[["top", "right"]].set_visible(False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=c) for c in (SAVES, COSTS, PLAIN)]
    labels = ["pays", "costs", "even, or no compression"]
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return figure


def _bytes_and_error(table: pd.DataFrame) -> Any:
    """Draws the bytes that a process sends, next to the error of the averages."""
    # Neither depends on the link, so any will do.
    rows = table[(table["link"] == table["link"].iloc[0]) & (table["scheme"] != NO_HOOK)]
    rows = rows[rows["update_error"].notna()].sort_values("sent_mb", ascending=False)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 6), sharey=True, layout="constrained")
    left.plot(rows["sent_mb"], rows["scheme"], "o", color=SAVES)
    left.set(xscale="log", xlabel="sent per process and step (MB)")
    # An exact average has an error of 0, which a logarithmic axis does not show.
    right.plot(rows["update_error"].clip(lower=1e-5), rows["scheme"], "o", color=SAVES)
    right.axvline(1, color=INK, linewidth=0.8, linestyle="--")
    right.set(xscale="log", xlabel="error of what the optimizer got (relative)")
    for axes in (left, right):
        axes.grid(alpha=0.3, linewidth=0.5)
        axes.set_axisbelow(True)
        axes.tick_params(axis="y", labelsize=8)
        axes.margins(y=0.02)
        axes.spines[["top", "right"]].set_visible(False)
    return figure
