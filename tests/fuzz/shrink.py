"""The smallest case that still breaks the same law."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.fuzz.case import Case
from tests.fuzz.laws import Verdict

__all__ = ["shrink"]


def shrink(
    case: Case, law: str, run: Callable[[Case], Verdict], *, seconds: float = 120.0
) -> tuple[Case, Verdict]:
    """Leaves out one feature after the other, as long as ``law`` stays broken.

    Args:
        run: the verdict on a case.
        seconds: to spend on it; what has been reached by then is returned.

    Returns:
        The case and its verdict; of the first run if it does not break again.
    """
    deadline = time.monotonic() + seconds
    verdict = run(case)
    if verdict.law != law or verdict.status != "broken":
        return case, verdict
    tried: set[str] = set()
    progress = True
    while progress and time.monotonic() < deadline:
        progress = False
        for candidate in case.simpler():
            text = candidate.dumps()
            if text in tried or time.monotonic() > deadline:
                continue
            tried.add(text)
            tried_verdict = run(candidate)
            if tried_verdict.status == "broken" and tried_verdict.law == law:
                case, verdict, progress = candidate, tried_verdict, True
                break
    return case, verdict
