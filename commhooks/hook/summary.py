"""Summarises a ledger's rows in one or two sentences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from ddp_core import RoundRecord

__all__ = ["Summary", "size_of", "summarise"]

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
        left = "style='text-align: left'"
        rows = "".join(
            f"<tr><th {left}>{escape(name)}</th><td {left}>{escape(value)}</td></tr>"
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
    """Compares the bytes on the wire with a dense exchange, and reports the exposed time.

    Args:
        rows: the rows of some steps.
        exposed: returns the seconds that each row keeps its step waiting, by ``id``.
        name: name of the scheme.
        world_size: number of ranks.
        exchange: what is dense.
    """
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    if not rows:
        return Summary(
            f"{name} on {ranks}: nothing has been exchanged yet, or it exchanges nothing."
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
            f"{size_of(wire)} on the wire per step and rank, where a dense {exchange} sends "
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
        (f"a dense {exchange} sends", size_of(dense)),
        ("share", _share(wire, dense) if dense else "nothing is sent between ranks"),
    ]
    text = f"{name} on {ranks}, {span}: {sent}."
    if known:
        facts += [
            ("communication per step", _time(busy)),
            ("not hidden by backward", _time(waited)),
        ]
        text += (
            f" Of {_time(busy)} of communication per step, backward did not hide {_time(waited)}."
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
