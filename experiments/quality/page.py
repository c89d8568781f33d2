"""Writes the tables of the study into the pages, and into the package for ``commhooks advise``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from commhooks.predict._quality import Gap
from experiments.quality.setups import BASE, SETUPS, Setup
from experiments.quality.verdicts import bootstrapped, comparable, counted, predictors, sentence
from experiments.tools.schemes import Entry
from experiments.tools.tables import markdown, replaced

__all__ = ["ADVISED", "HOME", "pages_with", "table_of_task", "told"]

HOME = Path(__file__).parents[2]
SCHEMES, RESULTS = "docs/schemes/index.md", "docs/results/quality/README.md"
PACKAGE = "commhooks/predict/_quality.py"
ADVISED = "characters"  # the task of which commhooks.predict speaks
SHOWN = {  # tasks of the index of schemes
    "characters": "characters",
    "larger": "larger",
    "digits": "digits",
    "lstm": "LSTM",
    "minilm": "MiniLM",
}


def _interval(row: pd.Series) -> str:
    return str(Gap("", {}, 100 * row.low, 100 * row.high, 0, 0))


def told(row: Any) -> str:
    """Returns the verdict of an arm, as a provisional one where runs are missing."""
    return row.verdict + (" so far" if row.verdict and row.runs < row.planned else "")


def table_of_task(setup: Setup, table: pd.DataFrame) -> str:
    """Returns the arms of a task with their intervals and verdicts, as Markdown."""
    if not len(table):
        return "No runs yet, or fewer than five of each arm.\n"
    planned = {arm.name: arm.seeds or setup.seeds for arm in setup.arms}
    rows: list[tuple[object, ...]] = []
    for row in table.itertuples():
        compared = row.arm != row.base
        arm = f"{row.arm} ({row.role})" if row.role else row.arm
        outcome = f"{row.outcome:.4f} ± {row.outcome_half:.4f}"
        interval = _interval(row) if compared else ""
        runs = counted(row)
        if row.planned < planned[row.arm] and compared:
            runs += ", ended"
        if row.diverged:
            runs += f", {row.diverged} diverged"
        rows.append((arm, runs, outcome, interval, told(row)))
    words = ("loss", f"over that of {BASE}, 95 %")
    if setup.outcome == "misses":
        words = ("share of misses", f"hits lost, of those of {BASE}, 95 %")
    return markdown(("arm", "runs", *words, "verdict"), rows)


def table_of_schemes(tables: Mapping[str, pd.DataFrame]) -> str:
    """Returns the schemes with their verdict in each task, the best first, as Markdown."""
    setup = SETUPS[ADVISED]
    ordered = comparable(setup, tables[ADVISED]).sort_values("gap")
    calls = {arm.name: _call(arm.entry) for arm in setup.arms if not arm.role}
    rows = [
        (calls[name], *(_judged(tables[task], name) if task in tables else "" for task in SHOWN))
        for name in ordered.arm
        if name in calls
    ]
    return markdown(("scheme", *SHOWN.values()), rows)


def _judged(table: pd.DataFrame, arm: str) -> str:
    """Returns interval and verdict of an arm of a task; nothing where it has not run."""
    rows = list(table[table.arm == arm].itertuples())
    if not rows:
        return ""
    runs = "" if rows[0].runs >= rows[0].planned else f" ({counted(rows[0])} runs)"
    return f"{_interval(rows[0])}, {told(rows[0])}{runs}"


def table_of_cost(tables: Mapping[str, pd.DataFrame]) -> str:
    """Returns the runs of each task, and the hours of two cores that they took, as Markdown."""
    rows = [
        (name, f"{table.runs.sum()}", f"{(table.runs * table.cpu_seconds).sum() / 7200:.2g}")
        for name, table in tables.items()
    ]
    return markdown(("task", "runs", "hours on two cores"), rows)


def predictions(
    correlations: Mapping[str, float], ranges: Mapping[str, tuple[float, float]]
) -> str:
    """Returns the rank correlation of each figure with the gap, as Markdown, and what it says."""
    norms = {
        "error": "vNMSE, `error`",
        "worst": "of the worst tensor, `worst`",
        "adam": "in Adam's metric, `adam`",
    }

    def cell(name: str) -> str:
        low, high = ranges[name]
        return f"{correlations[name]:.2f} ({low:.2f} to {high:.2f})"

    rows = [
        (words, *(cell(f"{kind}_{norm}") for kind in ("step", "sum")))
        for norm, words in norms.items()
    ]
    head = ("error", "of a step", "of the sum of all steps")
    return f"{markdown(head, rows)}\n{sentence(dict(correlations))}.\n"


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
        if arm.name in names and row is not None and not arm.role:
            made_with = arm.entry.options_with(None).items()
            options = ", ".join(f'"{key}": {_literal(value)}' for key, value in made_with)
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

    put(RESULTS, "cost", table_of_cost(tables))
    for name, setup in SETUPS.items():
        table = table_of_task(setup, tables.get(name, pd.DataFrame()))
        put(RESULTS, name.replace(" ", "-"), table)
    if ADVISED in tables:
        put(SCHEMES, "quality", table_of_schemes(tables))
        if correlations := predictors(SETUPS[ADVISED], tables[ADVISED]):
            ranges = bootstrapped(SETUPS[ADVISED], tables[ADVISED])
            put(RESULTS, "predictors", predictions(correlations, ranges))
        put(PACKAGE, "measured", gaps_as_source(SETUPS[ADVISED], tables[ADVISED]))
    return texts
