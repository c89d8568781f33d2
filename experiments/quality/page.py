"""Writes the tables of the study into the pages, and into the package for ``commhooks advise``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from commhooks.predict._quality import Gap
from experiments.quality.setups import BASE, SETUPS, Setup
from experiments.quality.verdicts import comparable
from experiments.tools.schemes import Entry
from experiments.tools.tables import markdown, replaced

__all__ = ["HOME", "pages_with"]

HOME = Path(__file__).parents[2]
SCHEMES, RESULTS = "docs/schemes/index.md", "docs/results/quality/README.md"
PACKAGE = "commhooks/predict/_quality.py"
ADVISED = "characters"  # the task of which commhooks.predict speaks


def _interval(row: pd.Series) -> str:
    return str(Gap("", {}, 100 * row.low, 100 * row.high, 0, 0))


def _runs(row: pd.Series) -> str:
    return str(row.runs) if row.runs >= row.planned else f"{row.runs} of {row.planned}"


def table_of_task(setup: Setup, table: pd.DataFrame) -> str:
    """Returns the arms of a task with their intervals and verdicts, as Markdown."""
    rows: list[tuple[object, ...]] = []
    for row in table.itertuples():
        compared = row.arm != row.base
        arm = f"{row.arm} (control)" if row.role == "control" else row.arm
        outcome = f"{row.outcome:.4f} ± {row.outcome_half:.4f}"
        rows.append((arm, _runs(row), outcome, _interval(row) if compared else "", row.verdict))
    outcome = "loss" if setup.outcome == "loss" else "share of misses"
    return markdown(("arm", "runs", outcome, f"over that of {BASE}, 95 %", "verdict"), rows)


def table_of_schemes(setup: Setup, table: pd.DataFrame) -> str:
    """Returns the schemes of a task, the best first, as Markdown."""
    compared = comparable(setup, table)
    compared = compared[compared.role == ""].sort_values("gap")
    calls = {arm.name: _call(arm.entry) for arm in setup.arms}
    rows = [
        (calls[row.arm], _runs(row), _interval(row), row.verdict) for row in compared.itertuples()
    ]
    return markdown(("scheme", "runs", f"loss over that of {BASE}", f"keeps {BASE}'s loss"), rows)


def _call(entry: Entry) -> str:
    options = (f"{key}={_literal(value)}" for key, value in entry.options.items())
    return f"`{', '.join([_literal(entry.scheme), *options])}`"


def gaps_as_source(setup: Setup, table: pd.DataFrame) -> str:
    """Returns the entries of ``commhooks.predict._quality``."""
    names = set(comparable(setup, table).arm)
    rows = {row.arm: row for row in table.itertuples()}
    lines = []
    for arm in setup.arms:
        row = rows.get(arm.name)
        # A single run has no interval.
        if arm.name in names and row is not None and not arm.role and math.isfinite(row.low):
            options = ", ".join(f'"{k}": {_literal(v)}' for k, v in arm.entry.options.items())
            figures = f"{100 * row.low:.3g}, {100 * row.high:.3g}, {row.runs}, {row.planned}"
            lines.append(f'    Gap("{arm.entry.scheme}", {{{options}}}, {figures}),\n')
    return "".join(lines)


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def pages_with(tables: Mapping[str, pd.DataFrame]) -> dict[Path, str]:
    """Returns the text of each page, and of the module of the package, with the tables in it."""
    texts = {HOME / name: (HOME / name).read_text() for name in (RESULTS, SCHEMES, PACKAGE)}

    def put(name: str, marker: str, content: str) -> None:
        texts[HOME / name] = replaced(texts[HOME / name], marker, content)

    for name, table in tables.items():
        put(RESULTS, name.replace(" ", "-"), table_of_task(SETUPS[name], table))
    if ADVISED in tables:
        setup, table = SETUPS[ADVISED], tables[ADVISED]
        put(SCHEMES, "quality", table_of_schemes(setup, table))
        put(PACKAGE, "measured", gaps_as_source(setup, table))
    return texts
