"""Says how far from bf16's loss training with a scheme ended, as ``experiments.quality`` measured.

The study's ``--report``, in a clone, writes the table of this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from commhooks.core._scheme import Scheme
from commhooks.wrappers._make import make
from commhooks.wrappers._schedules import DelayedStart

__all__ = ["MARGIN", "MEASURED", "Gap", "gap_of"]

MARGIN = 0.5  # percent of the loss, within which a scheme keeps the quality of bf16


class Gap(NamedTuple):
    """Holds the loss with a scheme over that with bf16, after a character transformer's training.

    Attributes:
        scheme: its name.
        options: with which it was made, and how many first steps were uncompressed.
        low, high: 95 % interval, percent of the loss; above 0 is worse.
        runs: number of pairs of runs.
        planned: runs after which the study judges.
    """

    scheme: str
    options: Mapping[str, Any]
    low: float
    high: float
    runs: int
    planned: int

    @property
    def is_proved(self) -> bool:
        """Whether all runs are there, and the interval lies within the margin."""
        return self.runs >= self.planned and self.low > -MARGIN and self.high < MARGIN

    @property
    def dense(self) -> str:
        """Returns the option for first steps without compression, as in a call, or ""."""
        steps = self.options.get("start_step")
        return f"start_step={steps}" if steps else ""

    @property
    def counted(self) -> str:
        """Returns the number of runs in words."""
        of = "" if self.runs >= self.planned else f" of {self.planned}"
        return f"{self.runs}{of} runs"

    def __str__(self) -> str:
        return f"{_signed(self.low)} to {_signed(self.high)} %"


def _signed(percent: float) -> str:
    digits = 2 if abs(percent) < 0.995 else 1 if abs(percent) < 9.95 else 0
    text = f"{percent:+.{digits}f}"
    return text[1:] if float(text) == 0 else text  # a zero has no sign


MEASURED: tuple[Gap, ...] = (
    # <measured>
    Gap("int8", {}, -0.00896, 0.0386, 30, 30),
    Gap("int4", {}, 0.725, 0.934, 330, 330),
    Gap("eden", {"bits": 2}, 0.995, 1.83, 30, 30),
    Gap("powersgd", {"rank": 4, "start_step": 10}, 2.62, 3.1, 30, 30),
    Gap("none", {}, -0.0128, 0.0118, 30, 30),
    Gap("fp8", {}, -0.109, 0.0167, 30, 30),
    Gap("onebit", {}, 21.5, 23.7, 30, 30),
    Gap("powersgd", {"rank": 2, "start_step": 10}, 6.43, 7.38, 30, 30),
    Gap("acpsgd", {"rank": 8, "wire_dtype": "bf16", "start_step": 10}, 5.16, 6.11, 30, 30),
    Gap("topk", {"ratio": 0.01}, 18.1, 20.2, 30, 30),
    Gap("sdp4bit", {}, 0.0888, 0.438, 100, 100),
    Gap("eden", {"bits": 4}, 0.047, 0.402, 100, 100),
    # </measured>
)


def gap_of(scheme: Scheme) -> Gap | None:
    """Returns what was measured with a scheme, whatever its first steps are; None: nothing was."""
    return next((gap for made, gap in _made() if made == _begun(scheme)), None)


@cache
def _made() -> tuple[tuple[Scheme, Gap], ...]:
    return tuple((_begun(make(gap.scheme, **gap.options)), gap) for gap in MEASURED)


def _begun(scheme: Scheme) -> Scheme:
    return scheme.scheme if isinstance(scheme, DelayedStart) else scheme
