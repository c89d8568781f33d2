"""Sums bytes and times of collectives, and reports them as a table or in words."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from ddp_core import RoundRecord, Timestamp, needs

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Ledger", "Summary", "size_of", "summarise"]


_WORDS = {
    2: "half",
    3: "a third",
    4: "a quarter",
    5: "a fifth",
    6: "a sixth",
    8: "an eighth",
    10: "a tenth",
    100: "a hundredth",
}


class Summary(str):
    """Describes some steps of a hook in sentences; a notebook shows a table.

    A string in every other respect, so that ``print(hook.summary())`` prints the sentences.
    """

    facts: tuple[tuple[str, str], ...]

    def __new__(cls, text: str, facts: Sequence[tuple[str, str]] = ()) -> Summary:
        """Makes a summary of the sentences and of the table's rows, as names and values."""
        made = super().__new__(cls, text)
        made.facts = tuple(facts)
        return made

    def _repr_html_(self) -> str:
        """Returns the table; notebooks call this."""
        if not self.facts:
            return f"<p>{escape(self)}</p>"
        align = "style='text-align: left'"
        rows = "".join(
            f"<tr><th {align}>{escape(name)}</th><td {align}>{escape(value)}</td></tr>"
            for name, value in self.facts
        )
        return f"<table>{rows}</table>"


def summarise(
    rows: Sequence[RoundRecord],
    exposed: Callable[[Sequence[RoundRecord]], dict[int, float]],
    name: str,
    world_size: int,
    exchange: str = "all-reduce",
) -> Summary:
    """Compares the bytes sent with an uncompressed exchange, and reports the exposed time.

    Args:
        rows: the rows of some steps.
        exposed: returns the seconds that each row keeps its step waiting, by ``id``.
        name: name of the scheme.
        world_size: number of ranks.
        exchange: name of the uncompressed collective.
    """
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    if not rows and world_size == 1:
        return Summary(f"{name} on {ranks}: nothing has been exchanged: there is no other rank.")
    if not rows:
        return Summary(
            f"{name} on {ranks}: nothing has been exchanged yet: no step has ended, all passes ran "
            f"within no_sync(), or the scheme sends nothing."
        )
    steps = sorted({row.step for row in rows})
    span = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    if len(steps) < steps[-1] - steps[0] + 1:  # the other steps exchanged nothing
        span = f"{len(steps)} of {span}"
    wire = sum(row.wire_bytes for row in rows) / len(steps)
    dense = sum(row.dense_wire_bytes for row in rows) / len(steps)
    if not dense:
        sent = "nothing is sent between ranks"
    else:
        sent = (
            f"{size_of(wire)} sent per step and rank, where an uncompressed {exchange} sends "
            f"{size_of(dense)}: {_share(wire, dense)}"
        )
    # Sums of ``wire_s`` would count buckets that travel at the same time twice.
    waits = exposed(rows)
    known = [row for row in rows if not math.isnan(waits[id(row)])]
    times = max(len({row.step for row in known}), 1)
    busy, waited = _busy(known) / times, sum(waits[id(row)] for row in known) / times
    facts = [
        ("scheme", f"{name} on {ranks}"),
        ("steps", span.removeprefix("steps ").removeprefix("step ")),
        ("sent per step and rank", size_of(wire)),
        (f"uncompressed {exchange} sends", size_of(dense)),
        ("share", _share(wire, dense) if dense else "nothing is sent between ranks"),
    ]
    text = f"{name} on {ranks}, {span}: {sent}."
    if known and world_size > 1:
        facts += [
            ("communication per step", _time(busy)),
            ("exposed (not overlapped with backward)", _time(waited)),
        ]
        text += (
            f" Of {_time(busy)} of communication per step, {_time(waited)} are exposed (not "
            f"overlapped with backward)."
        )
    return Summary(text, facts)


def size_of(value: float) -> str:
    """Returns a number of bytes with a unit."""
    for unit in ("B", "kB", "MB"):
        if value < 999.5:  # what three digits round to 1000 gets the next unit
            return f"{value:.3g} {unit}"
        value /= 1e3
    return f"{value:.3g} GB"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 0.9995 else f"{1e3 * seconds:.3g} ms"


def _share(wire: float, dense: float) -> str:
    """Returns ``wire`` as a share of ``dense``, in words if a word is right to 4 %."""
    if not wire:
        return "nothing"
    ratio = dense / wire
    if ratio < 0.99:
        return f"{1 / ratio:.3g} times as much"
    if ratio < 1.01:
        return "as much"
    number = f"1/{ratio:.3g}"
    word = next((text for n, text in _WORDS.items() if abs(ratio / n - 1) < 0.04), None)
    return number if word is None else f"{word} ({number})"


def _busy(rows: Sequence[RoundRecord]) -> float:
    """Returns the seconds in which at least one exchange was under way."""
    total, until = 0.0, float("-inf")
    for row in sorted(rows, key=lambda row: row.resumed):
        total += max(row.finished - max(row.resumed, until), 0.0)
        until = max(until, row.finished)
    return total


# ---- rows


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


# Steps whose times are recorded on a GPU, where events have to be put into the streams.
_TIMED_FIRST = 10
_TIMED_EVERY = 100


class Ledger:
    """Holds rows of the latest collectives, and totals since the start.

    On a GPU times are those of its streams, and are recorded in the first 10 steps, in every
    100th, and in those that a :class:`ddp_core.Timeline` records. They are NaN in all other steps,
    and until the GPU has come to the end of a step.

    Args:
        history: number of rows kept for ``report``; older rows remain in the totals only.

    Raises:
        ValueError: ``history`` is not a whole number, or is below 1.
    """

    def __init__(self, history: int = 100_000) -> None:
        if isinstance(history, bool) or not isinstance(history, int) or history < 1:
            raise ValueError(f"Ledger(history=...) is a number of rows, 1 or more, got {history!r}")
        self._rows: deque[RoundRecord] = deque(maxlen=history)
        self._backward_end: dict[int, float | Timestamp] = {}
        self._unsettled: deque[RoundRecord] = deque(maxlen=history)
        self.steps = 0
        self.further_timed_steps: Callable[[int], bool] | None = (
            None  # further steps, see ``times``
        )
        self.dense_bytes = 0
        self.payload_bytes = 0
        self.wire_bytes = 0.0
        self.dense_wire_bytes = 0.0

    @property
    def history(self) -> int:
        """Returns the number of rows kept for ``report``."""
        return self._rows.maxlen or 0

    def add(self, row: RoundRecord) -> None:
        """Adds the row of one finished collective."""
        self._rows.append(row)
        if row.moments:
            self._unsettled.append(row)
        self.dense_bytes += row.dense_bytes
        self.payload_bytes += row.payload_bytes
        self.wire_bytes += row.wire_bytes
        self.dense_wire_bytes += row.dense_wire_bytes

    def times(self, step: int) -> bool:
        """Whether the times of this step are recorded where that is not free."""
        if self.further_timed_steps is not None and self.further_timed_steps(step):
            return True
        return step < _TIMED_FIRST or step % _TIMED_EVERY == 0

    def _settle(self) -> None:
        """Fills in the times that are known by now, without waiting."""
        while self._unsettled and self._unsettled[0].resolve():  # devices work in order
            self._unsettled.popleft()

    def record_last_launch(self, step: int, now: float | Timestamp) -> None:
        """Records the launch of a step's last bucket: waiting after that time is exposed."""
        self._settle()  # here, so that events are not kept for longer than a step
        self._backward_end[step] = now
        self.steps += 1
        # Steps come in order, so the first key is the oldest. Without rows its time is of no use.
        oldest = self._rows[0].step if self._rows else step
        while (first_step := next(iter(self._backward_end))) < oldest:
            del self._backward_end[first_step]

    def last_launch_time(self, step: int) -> float:
        """Returns the time at which a step's last bucket was launched; NaN if it is not known."""
        end = self._backward_end.get(step, math.nan)
        return end.seconds() if isinstance(end, Timestamp) else end

    def rewind(self, step: int) -> None:
        """Removes the rows from ``step`` on, from where the run continues; totals stay."""
        # Else one step would have the rows of two: twice the bytes, and waiting of the wrong run.
        self._unsettled.clear()
        rows = [row for row in self._rows if row.step < step]
        self._rows = deque(rows, maxlen=self.history)
        self._backward_end = {at: end for at, end in self._backward_end.items() if at < step}

    def report(self) -> pd.DataFrame:
        """Returns a row per step, bucket and round; times in seconds.

        ``dense_bytes`` is given in a bucket's first round only, so that sums are right.
        ``wire_bytes`` is what one rank sends, by the formula of the collective, and
        ``dense_wire_bytes`` what one rank would send without compression (in an all-reduce; where
        the host needs shards, in a reduce-scatter): compare these two. ``payload_bytes`` is what a
        rank hands to collectives, which send it several times or, on one rank, not at all.
        ``encode_s`` is the work before the collective, ``decode_s`` the work after the last
        collective. Work during a collective (:func:`ddp_core.overlapped`) is in ``wire_s``. On a
        CPU, what takes longer than the collective is in ``decode_s`` after the last one, and in no
        column after others; where the host waits for each bucket (FSDP), it is in ``wire_s``, too.
        ``exposed_s`` is the part of a row's waiting and decoding that backward did not hide: it
        came after the step's last bucket was launched, or the host waited for each bucket, and no
        other row accounts for it.
        Times that are not known are NaN: on a GPU, those of most steps, see the class.
        """
        with needs("hook.report()", "pandas"):
            import pandas as pd

        self._settle()
        rows = list(self._rows)  # at once: a thread may add rows, which ends a deque's iteration
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
                _decoding(row),
                exposed[id(row)],
            )
            for row in rows
        ]
        frame = pd.DataFrame(table, columns=list(COLUMNS))
        # Rows come in the order in which exchanges end.
        ordered: pd.DataFrame = frame.sort_values(
            ["step", "bucket", "round"], kind="stable", ignore_index=True
        )
        return ordered

    def rows_by_step(self) -> dict[int, list[RoundRecord]]:
        """Returns the stored rows by step, with the times that are known by now."""
        self._settle()
        by_step: dict[int, list[RoundRecord]] = {}
        for row in list(self._rows):
            by_step.setdefault(row.step, []).append(row)
        return by_step

    def _exposed(self, rows: Iterable[RoundRecord]) -> dict[int, float]:
        return _exposed(rows, self._backward_end)

    def last_step(self) -> dict[str, float]:
        """Returns the sums over the latest step of the columns with bytes and seconds.

        Sums of seconds that are not known are left out.
        """
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
            sums["decode_s"] += _decoding(row)
            sums["exposed_s"] += exposed[id(row)]
        return {column: value for column, value in sums.items() if not math.isnan(value)}

    def _latest(self, steps: int) -> list[RoundRecord]:
        """Returns the rows of the latest ``steps`` steps that are kept."""
        self._settle()
        rows = list(self._rows)  # at once, see ``report``
        seen: set[int] = set()
        # From the end: ``add_scalars`` asks for one step of a long history in every step.
        for begin in range(len(rows), 0, -1):
            seen.add(rows[begin - 1].step)
            if len(seen) > steps:
                return rows[begin:]
        return rows

    def summary(
        self,
        name: str,
        world_size: int,
        steps: int = 100,
        *,
        since: int = 0,
        dense: str = "all-reduce",
    ) -> Summary:
        """Describes in words what the latest ``steps`` steps sent, and how long backward waited.

        Steps that exchanged nothing do not count. A notebook shows the same as a table.

        Args:
            name: name of the scheme.
            world_size: number of ranks.
            steps: number of steps, at most; fewer if fewer are kept.
            since: leaves out the steps before this step.
            dense: name of the collective that the bytes are compared with.

        Example:
            >>> print(hook.summary())
            int8 on 4 ranks, steps 0 to 99: 12.3 MB sent per step and rank, where an uncompressed
            all-reduce sends 49.1 MB: a quarter (1/3.99). Of 20.1 ms of communication per step,
            3.2 ms are exposed (not overlapped with backward).
        """
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"summary(steps=...) is a whole number, 1 or more, got {steps!r}")
        rows = [row for row in self._latest(steps) if row.step >= since]
        return summarise(rows, self._exposed, name, world_size, dense)


def _decoding(row: RoundRecord) -> float:
    """Returns the seconds from the end of a collective to that of the work after it, or NaN."""
    seconds = row.finished - row.done
    return 0.0 if seconds < 0 else seconds


def _known(moment: Timestamp) -> float | Timestamp:
    """Returns the seconds of a timestamp if they are known, else the timestamp."""
    seconds = moment.seconds()
    return moment if math.isnan(seconds) else seconds


def _exposed(rows: Iterable[RoundRecord], ends: dict[int, float | Timestamp]) -> dict[int, float]:
    """Returns the seconds that each row keeps its step waiting, by ``id`` of the row.

    Overlapping waits are counted once. ``ends`` says when each step's last bucket was launched;
    what is known of it by now is put in.
    """
    # By ``id``, since rows have no hash. In the order of their ends: each row is charged with
    # the time since the end before it.
    exposed: dict[int, float] = {}
    covered: dict[int, float] = {}  # by step: up to when waiting is accounted for
    for row in sorted(rows, key=lambda row: (row.step, math.isnan(row.finished), row.finished)):
        end = ends.get(row.step)
        if row.waited_for:
            end = row.resumed
        if isinstance(end, Timestamp):
            end = ends[row.step] = _known(end)
        if end is None:
            exposed[id(row)] = 0.0
            continue
        if isinstance(end, Timestamp) or math.isnan(row.finished + row.resumed + end):
            exposed[id(row)] = math.nan
            continue
        begin = max(covered.get(row.step, end), row.resumed)
        exposed[id(row)] = max(row.finished - begin, 0.0)
        covered[row.step] = max(covered.get(row.step, end), row.finished)
    return exposed
