"""Puts verified steps into words and numbers, and warns of what was found."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Sequence
from typing import Literal

import torch.distributed as dist

from commhooks.errors import VerificationError
from commhooks.hook.verdict import Finding, Verified

__all__ = [
    "Told",
    "Verify",
    "VerifyWith",
    "in_words",
    "need_right",
    "numbers_of",
    "warn_of",
]

Verify = Literal["warn", "raise"]
VerifyWith = Literal["sketch", "dense"]
Told = tuple[str, str, tuple[int, ...]]  # kind, parameter, ranks


def _worst_of(rows: list[Verified]) -> str:
    """Returns a sentence on the parameter with the largest error of a step."""
    known = [row for row in rows if row.error == row.error]
    if not known:
        return ""
    worst, median = max(known, key=lambda row: row.error), _median_of(rows)
    others = "" if median is None else f"; the median of all parameters is {median:.3g}"
    return (
        f", the last is {worst.step}. Its largest error is {worst.error:.3g} of the dense mean, of "
        f"{worst.parameter!r}, at a cosine of {worst.cosine:.5g}{others}"
    )


def _median_of(rows: list[Verified]) -> float | None:
    """Returns the error of the parameter in the middle; None: every dense mean is zero.

    A parameter whose dense mean is zero has no relative error, and one that is lost has none.
    """
    errors = [row.error for row in rows if row.norm > 0 and row.error == row.error]
    return statistics.median(errors) if errors else None


def in_words(name: str, steps: int, rows: list[Verified], findings: list[Finding]) -> str:
    """Returns what is known of the verified steps of a scheme, and the last findings."""
    found = [f"\n  {finding}" for finding in findings[-10:]]
    return (
        f"{name}: {_count_of(steps, 'step')} verified{_worst_of(rows)}. "
        f"{_count_of(len(findings), 'finding')}{':' if found else '.'}{''.join(found)}"
    )


def numbers_of(rows: list[Verified], findings: int) -> dict[str, float]:
    found = {"verify/findings": float(findings)}
    if errors := [row.error for row in rows if row.error == row.error]:
        found["verify/error"] = max(errors)
    if (median := _median_of(rows)) is not None:
        found["verify/error_median"] = median
    if cosines := [row.cosine for row in rows if row.cosine == row.cosine]:
        found["verify/cosine_min"] = min(cosines)
    return found


def warn_of(found: list[Finding], rank: int, action: Verify, warned: set[Told]) -> None:
    """Warns of the first finding of each kind, once for a parameter and its ranks."""
    for kind in dict.fromkeys(one.kind for one in found):
        same = [one for one in found if one.kind == kind]
        first = same[0]
        told = (kind, first.parameter, first.ranks)
        raised = action == "raise" and kind != "not finite"
        # On a thousand ranks one warning is enough, and those of the ranks that are concerned.
        elsewhere = rank != 0 and (rank not in first.ranks or kind == "error")
        if raised or elsewhere or told in warned:
            continue
        warned.add(told)
        more = f" (and {len(same) - 1} more, see hook.verification)" if len(same) > 1 else ""
        warnings.warn(f"commhooks: {first}{more}", RuntimeWarning, stacklevel=2)


def _count_of(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def need_right(wrong: Sequence[Finding], beside: Sequence[dist.ProcessGroup]) -> None:
    """Raises VerificationError if something was found here, or by ranks beside this one.

    Args:
        beside: groups of ranks that call this function at the same time.
    """
    told = [(one.step, str(one)) for one in wrong[:20]]
    for group in beside:
        everyone: list[list[tuple[int, str]]] = [[] for _ in range(group.size())]
        dist.all_gather_object(everyone, told, group=group)
        told = sorted({one for theirs in everyone for one in theirs})
    if told:
        text = "\n  ".join(text for _, text in told)
        raise VerificationError(
            f"verification of step {told[0][0]}:\n  {text}\nTraining cannot be trusted from "
            f"this step on. Where parameters differ, load one checkpoint on all ranks; else "
            f"hook.switch('none') does without the scheme. verify='warn' goes on"
        )
