"""The table of the study: ratios between hooks, how they print, and where they came from."""

from __future__ import annotations

import os
import platform
from typing import Any

import pandas as pd
import torch
from rich.table import Table

import commhooks

__all__ = ["environment", "printed", "with_ratios"]

BASE, FLOOR = "allreduce", "no-op headroom"
BYTES, MILLISECONDS = 1e-3, 1e3

# Column -> title, scale and format.
COLUMNS: dict[str, tuple[str, float, str]] = {
    "dense_bytes": ("dense kB", BYTES, "{:.1f}"),
    "payload_bytes": ("payload kB", BYTES, "{:.1f}"),
    "wire_bytes": ("wire kB", BYTES, "{:.1f}"),
    "ratio_fp32": ("x fp32", 1, "{:.1f}"),
    "ratio_bf16": ("x bf16", 1, "{:.1f}"),
    "step_ratio": ("step ratio", 1, "{:.2f}"),
    "step_q1": ("q1", 1, "{:.2f}"),
    "step_q3": ("q3", 1, "{:.2f}"),
    "exposed_s": ("exposed ms", MILLISECONDS, "{:.2f}"),
    "headroom": ("headroom", 1, "{:.0%}"),
    "loss": ("loss", 1, "{:.3f}"),
    "accuracy": ("accuracy", 1, "{:.1%}"),
    "relative_error": ("gradient error", 1, "{:.1e}"),
}


def with_ratios(table: pd.DataFrame, world_size: int) -> pd.DataFrame:
    """Adds the columns that compare a hook with others of its task.

    Times are compared block by block, a hook's with the other's of the same turn, and the median
    taken afterwards: a slow moment of the machine then hits both sides of a ratio.
    """
    table = table.copy()
    fp32 = table["dense_bytes"] * 2 * (world_size - 1) / world_size
    sent = table["wire_bytes"].where(table["wire_bytes"] > 0)
    table["ratio_fp32"], table["ratio_bf16"] = fp32 / sent, fp32 / 2 / sent
    blocks = {(row.task, row.hook): pd.Series(row.block_s) for row in table.itertuples()}
    for index, row in table.iterrows():
        own = blocks[row["task"], row["hook"]]
        base = blocks.get((row["task"], BASE))
        floor = blocks.get((row["task"], FLOOR))
        if base is not None:
            quartiles = (own / base).quantile([0.5, 0.25, 0.75]).tolist()
            table.loc[index, ["step_ratio", "step_q1", "step_q3"]] = quartiles
        if floor is not None:
            table.loc[index, "headroom"] = 1 - (floor / own).median()
    return table.reindex(columns=["task", "hook", *COLUMNS, "ranks_agree"])


def printed(task: str, rows: pd.DataFrame, world_size: int) -> Table:
    """The rows of one task, to look at."""
    shown = Table(title=f"{task}: {world_size} Gloo processes, per rank and step")
    shown.add_column("hook", no_wrap=True)
    for title, _, _ in COLUMNS.values():
        shown.add_column(title, justify="right")
    for row in rows.to_dict("records"):
        name = row["hook"] if row["ranks_agree"] else f"{row['hook']} *"
        shown.add_row(name, *(_cell(row[column], column) for column in COLUMNS))
    if not rows["ranks_agree"].all():
        shown.caption = "* the ranks ended with different parameters"
    return shown


def _cell(value: float, column: str) -> str:
    _, scale, form = COLUMNS[column]
    return "-" if pd.isna(value) else form.format(value * scale)


def environment() -> dict[str, Any]:
    """What a number depends on besides the settings."""
    return {
        "commhooks": commhooks.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }
