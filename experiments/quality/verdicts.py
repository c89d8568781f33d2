"""Judges the runs as ``plan.md`` says: intervals of gaps, verdicts, what predicts them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from commhooks.predict import _quality
from experiments.quality.setups import BASE, NEGATIVE, Arm, Setup
from experiments.tools.intervals import interval

__all__ = [
    "FIGURES",
    "LOOKS",
    "MARGIN",
    "NARROW",
    "bootstrapped",
    "comparable",
    "counted",
    "gap",
    "predictors",
    "sentence",
    "summary",
    "verdict",
    "wanted",
]

NARROW, MARGIN = 0.002, _quality.MARGIN / 100
LOOKS = (30, 100)  # runs after which an arm ends whose verdict is sure
SURE = 0.999  # level of the interval of a look
FEWEST = 5  # pairs of runs for an interval: two that are equal by chance would give one of no width
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


def gap(
    values: Sequence[float],
    base: Sequence[float],
    scale: float,
    level: float = 0.95,
    items: int = 0,
) -> tuple[float, float, float]:
    """Returns the mean gap of paired runs over ``scale``, and its interval.

    Args:
        values: outcome of each run.
        base: outcome of the run of the same number with the base.
        scale: outcome of the base, of which the gap is a share.
        level: probability with which the interval covers the gap.
        items: where outcomes are shares of held-out items, their number. Equal counts prove no
            equal accuracy: the differences vary at least as if one run missed one item more.
    """
    differences = [value - other for value, other in zip(values, base, strict=True)]
    least = 1 / (items * math.sqrt(len(differences))) if items else 0.0
    mean, half = interval(differences, level, least)
    return mean / scale, (mean - half) / scale, (mean + half) / scale


def _outcomes(setup: Setup, runs: pd.DataFrame, arm: str) -> pd.Series[float]:
    """Returns the outcome of each run of an arm by number; a diverged one is a guess."""
    rows = runs[runs.arm == arm].set_index("run")
    return rows[setup.outcome].where(rows.loss.map(math.isfinite), setup.guess).sort_index()


def _pairs(setup: Setup, runs: pd.DataFrame, arm: Arm) -> tuple[pd.Series[float], ...]:
    """Returns the outcomes of an arm and of its base, by number, of the runs that both have."""
    values, base = (_outcomes(setup, runs, name) for name in (arm.name, arm.base))
    return values.align(base, join="inner")


def _scale(setup: Setup, base: pd.Series[float]) -> float:
    """Returns what gaps are shares of: the mean loss of the base, or its mean share of hits."""
    mean = float(base.mean())
    return (1 - mean if setup.outcome == "misses" else mean) or math.nan


def wanted(setup: Setup, runs: pd.DataFrame) -> dict[str, int]:
    """Returns how many runs each arm needs, by its name.

    It is the number of the plan, or that of the first look at which the arm's verdict was sure. A
    base needs as many as the arms that are compared with it.

    Args:
        setup: the task.
        runs: rows of its file.
    """
    needed = {arm.name: arm.seeds or setup.seeds for arm in setup.arms}
    for arm in setup.arms:
        values, base = _pairs(setup, runs, arm)
        for look in (look for look in LOOKS if look < needed[arm.name]):
            first, first_base = values[values.index < look], base[base.index < look]
            if arm.name == arm.base or len(first) < look:
                continue
            scale = _scale(setup, first_base)
            _, low, high = gap(first.tolist(), first_base.tolist(), scale, SURE, setup.items)
            if -NARROW < low <= high < NARROW or low > MARGIN:
                needed[arm.name] = look
                break
    for base_name in {arm.base for arm in setup.arms}:
        others = [arm.name for arm in setup.arms if arm.base == base_name != arm.name]
        needed[base_name] = max(needed[name] for name in others) if others else needed[base_name]
    return needed


def _row(
    setup: Setup, runs: pd.DataFrame, arm: Arm, needed: int, fewest: int
) -> dict[str, object] | None:
    """Returns the row of an arm, of the runs that its base has, too, or None of too few."""
    values, base = _pairs(setup, runs, arm)
    if len(values) < fewest:
        return None
    items = setup.items if arm.name != arm.base else 0
    mean, low, high = gap(values.tolist(), base.tolist(), _scale(setup, base), items=items)
    rows = runs[(runs.arm == arm.name) & runs.run.isin(values.index)]
    return {
        "task": setup.name,
        "arm": arm.name,
        "role": arm.role,
        "ranks": arm.ranks or setup.ranks,
        "runs": len(values),
        "planned": needed,
        "diverged": int((~rows.loss.map(math.isfinite)).sum()),
        "outcome": float(values.mean()),
        "outcome_half": interval(values.tolist())[1],
        "base": arm.base,
        "gap": mean,
        "low": low,
        "high": high,
        "verdict": "" if arm.name == arm.base else verdict(low, high),
        **{name: float(rows[name].mean()) for name in FIGURES},
        "cpu_seconds": float(rows.cpu_seconds.mean()),
    }


def summary(setup: Setup, runs: pd.DataFrame, fewest: int = FEWEST) -> pd.DataFrame:
    """Returns a row per arm with enough pairs of runs: outcome, gap with its interval, and verdict.

    Args:
        setup: the task.
        runs: rows of its file.
        fewest: pairs that an arm needs, two or more.
    """
    needed = wanted(setup, runs)
    rows = (_row(setup, runs, arm, needed[arm.name], fewest) for arm in setup.arms)
    return pd.DataFrame([row for row in rows if row is not None])


def counted(row: Any) -> str:
    """Returns the number of runs of an arm, and of how many where some are missing.

    Args:
        row: of ``summary``.
    """
    return str(row.runs) if row.runs >= row.planned else f"{row.runs} of {row.planned}"


def predictors(setup: Setup, table: pd.DataFrame) -> dict[str, float]:
    """Returns Spearman's rank correlation of each figure with the gap, over the comparable arms.

    These are the arms of the task's own number of ranks without clipping, except ``bf16`` itself
    and its other seeds. With fewer than four there is none.
    """
    compared = comparable(setup, table)
    if len(compared) < 4:
        return {}
    return {name: float(compared[name].rank().corr(compared.gap.rank())) for name in FIGURES}


def bootstrapped(setup: Setup, table: pd.DataFrame) -> dict[str, tuple[float, float]]:
    """Returns the 95 % interval of each of ``predictors``: a bootstrap over the arms."""
    compared = comparable(setup, table)
    draws = np.random.default_rng(0).integers(len(compared), size=(2000, len(compared)))
    ranks = {  # a column per draw
        name: pd.DataFrame(compared[name].to_numpy()[draws].T).rank() for name in ("gap", *FIGURES)
    }
    return {
        name: tuple(ranks[name].corrwith(ranks["gap"]).quantile((0.025, 0.975))) for name in FIGURES
    }


def comparable(setup: Setup, table: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows of arms whose errors may predict their gaps."""
    names = {
        arm.name
        for arm in setup.arms
        if arm.base == BASE and arm.name != BASE and arm.role != NEGATIVE
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
    words = f"`{chosen}` {verb} the gap: its rank correlation is {correlations[chosen]:.2f}"
    return words + (", and no other is 0.1 above it" if chosen == "step_error" else "")
