"""Limits of one case: seconds of CPU, and memory beyond what the process had before."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

__all__ = ["MAX_BYTES", "MAX_SECONDS", "Cost", "measured"]

MAX_BYTES, MAX_SECONDS = 64 << 20, 1.0


class Cost(NamedTuple):
    """The cost of one call."""

    nbytes: int
    seconds: float

    def error(self) -> str | None:
        """Names what is too much; None if nothing is."""
        if self.nbytes > MAX_BYTES:
            return f"took {self.nbytes >> 20} MB"
        return f"took {self.seconds:.1f} s" if self.seconds > MAX_SECONDS else None


def measured(call: Callable[[], None]) -> Cost:
    """Calls, and says by how much memory peaked (Linux; 0 elsewhere) and what CPU time it took.

    The kernel's figures, not Python's: tensors are not allocated by Python.
    """
    before, begun = _resident(reset=True), time.process_time()
    call()
    seconds = time.process_time() - begun
    return Cost(max(0, _resident(peak=True) - before), seconds)


def _resident(*, peak: bool = False, reset: bool = False) -> int:
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    if reset:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    name = "VmHWM:" if peak else "VmRSS:"
    line = next(line for line in status.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10
