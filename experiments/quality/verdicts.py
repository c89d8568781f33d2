"""Judges the runs as ``plan.md`` says: intervals of gaps, verdicts, what predicts them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from experiments.quality.setups import BASE, Arm, Setup
from experiments.tools.intervals import interval

__all__ = [
    "FIGURES",
    "MARGIN",
    "NARROW",
    "comparable",
    "gap",
    "predictors",
    "sentence",
    "summary",
    "verdict",
]

NARROW, MARGIN = 0.002, 0.005
FIGURES = tuple(f"{kind}_{norm}" for norm in ("error", "worst", "adam") for kind in ("step", "sum"))


def verdict(low: float, high: float) -> str:
    """Returns what a 95 % interval of a relative gap proves.

    Example:
        >>> verdict(-0.001, 0.003)
        'proved within 0.5 %'
    """
    if low > -NARROW and high < NARROW:
        return f"proved within {100 * NARROW:.1f} %"
    if low > -MARGIN and high < MARGIN:
        return f"proved within {100 * MARGIN:.1f} %"
    if low > MARGIN:
        return "refuted"
    return "better" if high < -MARGIN else "not proved"


def gap(values: Sequence[float], base: Sequence[float], scale: float) -> tuple[float, float, float]:
    """Returns the mean gap of paired runs over ``scale``, and its 95 % interval.

    Args:
        values: outcome of each run.
        base: outcome of the run of the same number with the base.
        scale: outcome of the base, of which the gap is a share.
    """
    mean, half = interval([value - other for value, other in zip(values, base, strict=True)])
    return mean / scale, (mean - half) / scale, (mean + half) / scale


def _outcomes(setup: Setup, runs: pd.DataFrame, arm: str) -> pd.Series[float]:
    """Returns the outcome of each run of an arm by number; a diverged one is a guess."""
    rows = runs[runs.arm == arm].set_index("run")
    return rows[setup.outcome].where(rows.loss.map(math.isfinite), setup.guess).sort_index()


def _row(setup: Setup, runs: pd.DataFrame, arm: Arm) -> dict[str, object] | None:
    """Returns the row of an arm, of the runs that its base has, too; None if there are none."""
    values, base = (_outcomes(setup, runs, name) for name in (arm.name, arm.base))
    values, base = values.align(base, join="inner")
    if values.empty:
        return None
    scale = float(base.mean())
    if setup.outcome == "misses":  # margins are shares of the hits
        scale = 1 - scale
    mean, low, high = gap(values.tolist(), base.tolist(), scale)
    rows = runs[(runs.arm == arm.name) & runs.run.isin(values.index)]
    return {
        "task": setup.name,
        "arm": arm.name,
        "role": arm.role,
        "ranks": arm.ranks or setup.ranks,
        "runs": len(values),
        "planned": arm.seeds or setup.seeds,
        "diverged": int((~rows.loss.map(math.isfinite)).sum()),
        setup.outcome: float(values.mean()),
        "base": arm.base,
        "gap": mean,
        "low": low,
        "high": high,
        "verdict": "" if arm.name == arm.base else verdict(low, high),
        **{name: float(rows[name].mean()) for name in FIGURES},
        "cpu_seconds": float(rows.cpu_seconds.mean()),
    }


def summary(setup: Setup, runs: pd.DataFrame) -> pd.DataFrame:
    """Returns a row per arm that has run: outcome, gap with its interval, and verdict.

    Args:
        setup: the task.
        runs: rows of its file.
    """
    rows = (_row(setup, runs, arm) for arm in setup.arms)
    return pd.DataFrame([row for row in rows if row is not None])


def predictors(setup: Setup, table: pd.DataFrame) -> dict[str, float]:
    """Returns the rank correlation of each figure with the gap, over the comparable arms.

    These are the arms of the task's own number of ranks without clipping, except ``bf16`` itself
    and its other seeds. With fewer than four there is none.
    """
    compared = comparable(setup, table)
    if len(compared) < 4:
        return {}
    return {name: float(compared[name].rank().corr(compared.gap.rank())) for name in FIGURES}


def comparable(setup: Setup, table: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows of arms whose errors may predict their gaps."""
    names = {
        arm.name
        for arm in setup.arms
        if arm.base == BASE and arm.name != BASE and arm.role != "null"
    }
    return table[table.arm.isin(names)]


def sentence(correlations: dict[str, float]) -> str:
    """Says which figure predicts the gap, by the rule of the plan."""
    if not correlations:
        return "too few arms to say what predicts the gap"
    best = max(correlations, key=lambda name: correlations[name])
    usual = correlations["step_error"]
    chosen = best if correlations[best] > usual + 0.1 else "step_error"
    verb = "predicts" if correlations[chosen] >= 0.9 else "does not predict"
    return f"{chosen} {verb} the gap: rank correlation {correlations[chosen]:.2f}"
