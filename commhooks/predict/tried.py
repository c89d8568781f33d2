"""Tells of the candidates of ``register(model, "auto")``: what was predicted, and what measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

from commhooks.hook.reporting import Tried
from commhooks.predict.advise import Option
from commhooks.predict.race import Entry

__all__ = ["tried_of"]


def tried_of(
    predicted: Sequence[Option],
    raced: Sequence[Entry[Option]],
    *,
    before: Sequence[Entry[Option]] | None = None,
) -> list[Tried]:
    """Returns the candidates, the fastest first; those that were not tried come last.

    Args:
        predicted: all options, the fastest first; of each scheme the best one is told.
        raced: what was tried.
        before: what was tried before some of it was compared once more, which is ``raced`` then.
    """
    first, again = (raced, ()) if before is None else (before, raced)
    best: dict[str, Option] = {}
    for option in predicted:
        best.setdefault(option.name, option)
    entries = {str(entry.what): entry for entry in first}
    repeated = {str(entry.what): _measured(entry) for entry in again}
    options = {str(one): one for one in (*(entry.what for entry in first), *best.values())}
    rows = [
        Tried(
            candidate=name,
            predicted_s=option.predicted_s,
            measured_s=_measured(entries[name]) if name in entries else math.nan,
            again_s=repeated.get(name, math.nan),
            steps=len(entries[name].times) if name in entries else 0,
        )
        for name, option in options.items()
    ]
    return sorted(rows, key=_seconds)


def _measured(entry: Entry[Option]) -> float:
    return entry.median if entry.times else math.nan


def _seconds(row: Tried) -> tuple[bool, float]:
    untried = math.isnan(row.measured_s)
    return untried, row.predicted_s if untried else row.measured_s
