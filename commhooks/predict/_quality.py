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

MARGIN = 0.5  # percent of the loss within which a scheme keeps the quality of bf16


class Gap(NamedTuple):
    """Holds the loss with a scheme over that with bf16, after a character transformer's training.

    Attributes:
        scheme: its name.
        options: with which it was made.
        low, high: 95 % interval, percent of the loss; above 0 is worse.
        runs: number of pairs of runs.
    """

    scheme: str
    options: Mapping[str, Any]
    low: float
    high: float
    runs: int

    @property
    def is_proved(self) -> bool:
        """Whether the interval lies within the margin: the scheme keeps the quality of bf16."""
        return self.low > -MARGIN and self.high < MARGIN

    def __str__(self) -> str:
        return f"{_signed(self.low)} to {_signed(self.high)} %"


def _signed(percent: float) -> str:
    return f"{percent:+.{2 if abs(percent) < 0.095 else 1 if abs(percent) < 9.5 else 0}f}"


MEASURED: tuple[Gap, ...] = (
    # <measured>
    Gap("int8", {}, -0.0187, 0.0553, 8),
    Gap("int4", {}, 0.13, 1.6, 8),
    Gap("eden", {"bits": 2}, 0.274, 2.21, 7),
    Gap("powersgd", {"rank": 4}, 2.22, 3.29, 7),
    Gap("none", {}, -0.042, 0.00944, 7),
    Gap("fp8", {}, -0.0925, 0.122, 7),
    Gap("onebit", {}, 20.7, 22.6, 7),
    Gap("powersgd", {"rank": 2}, 5.14, 7.62, 7),
    Gap("acpsgd", {"rank": 8, "wire_dtype": "bf16"}, 4.07, 6.98, 7),
    Gap("topk", {"ratio": 0.01}, 15.5, 19.8, 7),
    Gap("sdp4bit", {}, -0.418, 0.257, 7),
    Gap("eden", {"bits": 4}, -0.645, 0.348, 7),
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
