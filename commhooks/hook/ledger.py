"""Counts what every collective moved and how long it took, and says it in words."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from commhooks.hook.summary import Summary, summarise
from ddp_core import RoundRecord, needs

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Ledger"]

COLUMNS = (
    "step",
    "bucket",
    "round",
    "collective",
    "dense_bytes",
    "payload_bytes",
    "wire_bytes",
    "dense_wire_bytes",
    "encode_s",
    "wire_s",
    "decode_s",
    "exposed_s",
)


class Ledger:
    """Rows of the latest collectives, and totals since the start.

    Args:
        history: rows kept for ``report``; older ones remain in the totals only.

    Raises:
        ValueError: ``history`` is no whole number, or below 1.
    """

    def __init__(self, history: int = 100_000) -> None:
        if isinstance(history, bool) or not isinstance(history, int) or history < 1:
            raise ValueError(f"Ledger(history=...) is a number of rows, 1 or more, got {history!r}")
        self._rows: deque[RoundRecord] = deque(maxlen=history)
        self._backward_end: dict[int, float] = {}
        self.steps = 0
        self.dense_bytes = 0
        self.payload_bytes = 0
        self.wire_bytes = 0.0
        self.dense_wire_bytes = 0.0

    @property
    def history(self) -> int:
        """Rows kept for ``report``."""
        return self._rows.maxlen or 0

    def add(self, row: RoundRecord) -> None:
        """Takes in one finished collective."""
        self._rows.append(row)
        self.dense_bytes += row.dense_bytes
        self.payload_bytes += row.payload_bytes
        self.wire_bytes += row.wire_bytes
        self.dense_wire_bytes += row.dense_wire_bytes

    def launched_last(self, step: int, now: float) -> None:
        """Marks when a step's last bucket was handed over: from here on, waiting is exposed."""
        self._backward_end[step] = now
        self.steps += 1
        oldest = self._rows[0].step if self._rows else step
        while (kept := next(iter(self._backward_end))) < oldest:
            del self._backward_end[kept]

    def report(self) -> pd.DataFrame:
        """A row per step, bucket and round; times in seconds.

        ``dense_bytes`` stands on a bucket's first round only, so that sums are right.
        ``wire_bytes`` is what one rank sends, by the formula of the collective, and
        ``dense_wire_bytes`` what it would send in an all-reduce of the dense bytes: the two to
        compare. ``payload_bytes``, what is handed to collectives, is sent not at all or several
        times.
        ``encode_s`` is the work before the collective, ``decode_s`` the work after the last one.
        ``exposed_s`` is the part of a row's waiting and decoding that came after the step's last
        bucket was launched and that no other row accounts for: backward did not hide it.
        """
        with needs("hook.report()", "pandas"):
            import pandas as pd

        rows = list(self._rows)
        exposed = self._exposed(rows)
        table = [
            (
                row.step,
                row.bucket,
                row.round,
                row.collective,
                row.dense_bytes,
                row.payload_bytes,
                row.wire_bytes,
                row.dense_wire_bytes,
                row.yielded - row.resumed,
                row.done - row.issued,
                max(row.finished - row.done, 0.0),
                exposed[id(row)],
            )
            for row in rows
        ]
        frame = pd.DataFrame(table, columns=list(COLUMNS))
        ordered: pd.DataFrame = frame.sort_values(
            ["step", "bucket", "round"], kind="stable", ignore_index=True
        )
        return ordered

    def _exposed(self, rows: Iterable[RoundRecord]) -> dict[int, float]:
        """Seconds each row keeps its step waiting; overlapping waits are counted once."""
        exposed: dict[int, float] = {}
        covered: dict[int, float] = {}  # by step: up to when waiting is accounted for
        for row in sorted(rows, key=lambda row: (row.step, row.finished)):
            end = self._backward_end.get(row.step)
            if end is None:
                exposed[id(row)] = 0.0
                continue
            begin = max(covered.get(row.step, end), row.resumed)
            exposed[id(row)] = max(row.finished - begin, 0.0)
            covered[row.step] = max(covered.get(row.step, end), row.finished)
        return exposed

    def last_step(self) -> dict[str, float]:
        """Sums over the latest step, of the columns with bytes and seconds."""
        rows = self._latest(1)
        if not rows:
            return {}
        exposed = self._exposed(rows)
        sums = dict.fromkeys(COLUMNS[4:], 0.0)
        for row in rows:
            for column in COLUMNS[4:8]:
                sums[column] += getattr(row, column)
            sums["encode_s"] += row.yielded - row.resumed
            sums["wire_s"] += row.done - row.issued
            sums["decode_s"] += max(row.finished - row.done, 0.0)
            sums["exposed_s"] += exposed[id(row)]
        return sums

    def _latest(self, steps: int) -> list[RoundRecord]:
        """The rows of the latest ``steps`` steps that are kept; does not look at older ones."""
        rows = list(self._rows)  # at once, a thread may add some
        found: set[int] = set()
        for begin in range(len(rows), 0, -1):
            found.add(rows[begin - 1].step)
            if len(found) > steps:
                return rows[begin:]
        return rows

    def summary(self, name: str, world_size: int, steps: int = 100, *, since: int = 0) -> Summary:
        """Says in words what the latest ``steps`` steps sent, and how long backward waited.

        Steps that exchanged nothing do not count. A notebook shows the same as a table.

        Args:
            name: of the scheme.
            world_size: number of ranks.
            steps: so many at most; fewer if fewer are kept.
            since: leaves out the steps before that one.

        Example:
            >>> print(hook.summary())
            int8 on 4 ranks, steps 0 to 99: 12.3 MB on the wire per step and rank, where a dense
            all-reduce sends 49.1 MB: a quarter (1/3.99). Of 20.1 ms of communication per step,
            backward did not hide 3.2 ms.
        """
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"summary(steps=...) is a whole number, 1 or more, got {steps!r}")
        rows = [row for row in self._latest(steps) if row.step >= since]
        return summarise(rows, self._exposed, name, world_size)
