"""Draws the exchanges of a step over time, and writes them as a Chrome trace."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from commhooks.hook._ledger import Ledger
from commhooks.report._style import BLUE, GREEN, ORANGE
from ddp_core import RoundRecord, needs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Span", "chrome_trace", "draw", "spans"]

COLOURS = {"encode": ORANGE, "collective": BLUE, "decode": GREEN}


class Span(NamedTuple):
    """Holds a period in which a bucket was encoded, travelled or was decoded.

    Attributes:
        bucket: the index of the bucket.
        kind: "encode", "collective" or "decode".
        name: of the collective, with its round; else the kind.
        begin, end: seconds, of ``time.perf_counter`` or of the streams of a GPU.
    """

    bucket: int
    kind: str
    name: str
    begin: float
    end: float


def spans(rows: Sequence[RoundRecord]) -> list[Span]:
    """Returns the periods of a step's buckets, without those that are empty or unknown."""
    drawn = []
    for row in rows:
        collective = f"{row.collective}, round {row.round}"
        drawn.append(Span(row.bucket, "encode", "encode", row.resumed, row.yielded))
        drawn.append(Span(row.bucket, "collective", collective, row.issued, row.done))
        drawn.append(Span(row.bucket, "decode", "decode", row.done, row.finished))
    return [span for span in drawn if span.end > span.begin]  # NaN is above nothing


def draw(ledger: Ledger, path: str | Path | None = None, step: int | None = None) -> Axes:
    """Draws the exchanges of a step: a line per bucket.

    Args:
        ledger: of the hook.
        path: picture to write, of the type that its name ends with.
        step: the number of the step; the latest with known times by default.

    Raises:
        MissingPackageError: matplotlib is not installed.
        ValueError: no such step is kept, or its times are not known.
    """
    with needs("hook.plot()", "matplotlib"):
        from matplotlib.figure import Figure

    known = {at: drawn for at, rows in ledger.rows_by_step().items() if (drawn := spans(rows))}
    if not known:
        raise ValueError("hook.plot: no step with known times is kept; train one, then plot")
    if step is None:
        step = max(known)
    if step not in known:
        raise ValueError(
            f"hook.plot(step={step}): its times are not kept; steps {_ranges(sorted(known))} are"
        )
    drawn = known[step]
    buckets = sorted({span.bucket for span in drawn})
    figure = Figure(figsize=(6.4, 1.5 + 0.32 * len(buckets)), layout="constrained")
    axes = figure.subplots()
    _draw(axes, drawn, ledger.last_launch_time(step))
    axes.set_yticks(buckets, [f"bucket {bucket}" for bucket in buckets])
    axes.set_xlabel(f"milliseconds in step {step}, since its first bucket began")
    if path is not None:
        figure.savefig(path)
    return axes


def _draw(axes: Axes, drawn: Sequence[Span], last_launch: float) -> None:
    zero = min(span.begin for span in drawn)
    for span in drawn:
        axes.barh(
            span.bucket,
            1e3 * (span.end - span.begin),
            left=1e3 * (span.begin - zero),
            height=0.62,
            color=COLOURS[span.kind],
        )
    handles: list[Any] = [
        axes.barh(0, 0, color=colour, label=kind) for kind, colour in COLOURS.items()
    ]
    if not math.isnan(last_launch):
        label = "backward ends"
        line = axes.axvline(1e3 * (last_launch - zero), color="black", linestyle="--", label=label)
        handles.append(line)
    axes.invert_yaxis()
    axes.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False, fontsize=8
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def chrome_trace(ledger: Ledger, path: str | Path, *, rank: int = 0) -> None:
    """Writes all kept steps as a trace for Perfetto and chrome://tracing.

    Args:
        ledger: of the hook.
        path: JSON file to write.
        rank: number of the process in the trace; traces of several ranks can be joined.
    """
    events = list(_events(ledger.rows_by_step(), rank))
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
    Path(path).write_text(text, encoding="utf-8")


def _events(steps: Mapping[int, Sequence[RoundRecord]], rank: int) -> Iterator[dict[str, object]]:
    yield _named("process_name", rank, 0, f"rank {rank}")
    named: set[int] = set()
    for step, rows in steps.items():
        for span in spans(rows):
            if span.bucket not in named:
                named.add(span.bucket)
                yield _named("thread_name", rank, span.bucket, f"bucket {span.bucket}")
            yield {
                "ph": "X",
                "cat": span.kind,
                "name": span.name,
                "pid": rank,
                "tid": span.bucket,
                "ts": 1e6 * span.begin,
                "dur": 1e6 * (span.end - span.begin),
                "args": {"step": step},
            }


def _named(event: str, rank: int, track: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": event, "pid": rank, "tid": track, "args": {"name": name}}


def _ranges(steps: Sequence[int]) -> str:
    return f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else str(steps[0])
