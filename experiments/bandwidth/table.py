"""Makes and prints the tables of the study, one per link, with ratios between schemes."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable
from typing import Any

import pandas as pd
import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

import commhooks
from experiments.bandwidth.links import Link, bucket_count, computed
from experiments.tools.schemes import NO_HOOK

__all__ = ["BASE", "FLOOR", "SHOWN", "compared", "computed_cases", "environment", "printed"]

# What schemes are compared with: no compression, half of the bytes, and no exchange at all.
BASE, HALF, FLOOR = "none", "fp16", "noop"


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


# By column of the CSV: the title, and the function that formats a cell.
SHOWN: dict[str, tuple[str, Callable[[float], str]]] = {
    "step_ms": ("step,\nms", "{:.1f}".format),
    "over_none": ("against\nnone", _ratio),
    "range": ("half of\nturns in", str),
    "pays": ("\npays", str),
    "sent_mb": ("MB\nsent", "{:.3f}".format),
    "saved": ("bytes\nsaved", lambda share: f"{share:.1%}" if 0.99 < share < 1 else f"{share:.0%}"),
    "update_error": ("update\nerror", lambda error: f"{error:.1%}"),
    "loss": ("loss\nat end", "{:.2f}".format),
}
COLUMNS = (
    "task", "link", "how", "scheme", "step_ms", "over_none", "over_none_q1", "over_none_q3",
    "over_fp16", "over_noop", "pays", "sent_mb", "saved", "update_error", "loss", "accuracy",
    "computed_ms", "exposed_ms", "dense_bytes", "dense_wire_bytes", "payload_bytes", "wire_bytes",
    "ranks_agree",
)  # fmt: skip


def computed_cases(
    link: Link, cases: Iterable[dict[str, Any]], bucket_cap_mb: float
) -> list[dict[str, Any]]:
    """Returns the results of the run without a limit, with step times computed for a link."""
    rows = list(cases)
    if link.rate is None:
        return rows
    # When gradients come does not depend on the scheme: the median has less noise than each.
    window = float(pd.Series([row["window_s"] for row in rows]).median())
    return [
        row
        | {
            "block_s": computed(
                row["block_s"],
                wire_nbytes=row["wire_bytes"],
                rate=link.rate,
                window_s=window,
                buckets=bucket_count(row["dense_bytes"], bucket_cap_mb),
            )
        }
        for row in rows
    ]


def compared(
    link: Link, how: str, cases: Iterable[dict[str, Any]], estimates: Iterable[dict[str, Any]]
) -> pd.DataFrame:
    """Returns the table of a link, with columns that compare each scheme with others.

    Times are compared turn by turn, and the median of the ratios is taken: a slow moment of the
    machine is then on both sides of a ratio.

    Args:
        link: the link.
        how: "measured" or "computed".
        cases: the results of the schemes on the link.
        estimates: the same results with computed times.
    """
    rows = list(cases)
    blocks = {row["hook"]: pd.Series(row["block_s"], dtype=float) for row in rows}
    expected = {row["hook"]: row["block_s"] for row in estimates}
    return pd.DataFrame(
        [_row(row, blocks, expected.get(row["hook"], [])) for row in rows]
    ).assign(link=link.name, how=how).reindex(columns=list(COLUMNS))  # fmt: skip


def _row(
    case: dict[str, Any], blocks: dict[str, pd.Series], expected: list[float]
) -> dict[str, Any]:
    name, times = case["hook"], blocks[case["hook"]]
    base, half, floor = (_over(times, blocks.get(other)) for other in (BASE, HALF, FLOOR))
    low, middle, high = base.quantile([0.25, 0.5, 0.75])
    return case | {
        "scheme": name,
        "step_ms": times.median() * 1e3,
        "over_none": middle,
        "over_none_q1": low,
        "over_none_q3": high,
        "over_fp16": half.median(),
        "over_noop": floor.median(),
        "pays": "" if name in (BASE, FLOOR, NO_HOOK) else _pays(low, high),
        "sent_mb": case["wire_bytes"] / 1e6,
        "saved": 1 - case["wire_bytes"] / case["dense_wire_bytes"],
        "update_error": case["relative_error"],
        "computed_ms": pd.Series(expected, dtype=float).median() * 1e3,
        "exposed_ms": case["exposed_s"] * 1e3,
    }


def _over(times: pd.Series, other: pd.Series | None) -> pd.Series:
    return times / (float("nan") if other is None else other)


def _pays(low: float, high: float) -> str:
    """Returns whether a scheme is faster than no compression; "even" if the quartiles disagree."""
    if pd.isna(low):
        return ""
    return "yes" if high < 1 else "no" if low > 1 else "even"


def printed(rows: pd.DataFrame, link: Link, world_size: int) -> Table:
    """Returns the table of a link for the terminal, at most 80 characters wide."""
    where = "this machine, no limit" if link.rate is None else link.name
    how = "computed from bytes, not measured" if (rows["how"] == "computed").any() else "measured"
    shown = Table(
        title=f"{where}: {world_size} processes, {how}",
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=0,
    )
    shown.add_column("\nscheme", no_wrap=True)
    for name, (head, _) in SHOWN.items():
        shown.add_column(head, justify="center" if name == "pays" else "right", no_wrap=True)
    for row in rows.to_dict("records"):
        row["range"] = _range(row)
        mark = "" if row["ranks_agree"] else " *"
        cells = [_cell(row[column], form) for column, (_, form) in SHOWN.items()]
        style = {"yes": "green", "no": "dim"}.get(row["pays"])
        shown.add_row(row["scheme"] + mark, *cells, style=style)
    if not rows["ranks_agree"].all():
        shown.caption = "* the ranks end with different parameters: for timing, not for training"
    return shown


def _range(row: dict[str, Any]) -> str:
    if row["scheme"] == BASE or pd.isna(row["over_none"]):
        return ""
    return f"{_ratio(row['over_none_q1'])}-{_ratio(row['over_none_q3'])}"


def _cell(value: Any, form: Callable[[Any], str]) -> str:
    return "" if pd.isna(value) else form(value)


def environment() -> dict[str, Any]:
    """Returns the versions and the machine, on which the numbers depend."""
    return {
        "commhooks": commhooks.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }
