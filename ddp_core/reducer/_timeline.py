"""Records when each bucket's gradients arrived, travelled, and were waited for."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_core.exchange._clocks import HOST, Clock, Timed, Timestamp, set_time
from ddp_core.exchange._errors import needs
from ddp_core.exchange._task import RoundRecord

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

__all__ = ["BucketTimes", "StepTimes", "Timeline"]


@dataclass(slots=True)
class BucketTimes(Timed):
    """Holds the times of one bucket in one step; 0 where unknown.

    Times are ``clock``'s: ``time.perf_counter`` on the CPU, and on a GPU the clock of the streams
    on which backward and exchanges run, NaN until they are reached, see ``Timed.resolve``.
    """

    bucket: int
    nbytes: int
    first_ready: float = 0.0  # its first gradient
    last_ready: float = 0.0  # its last one
    launched: float = 0.0  # the hook, or the all-reduce, was called
    rounds: list[RoundRecord] = field(default_factory=list)
    decoded: float = 0.0  # the averaged gradient was there
    wait_began: float = 0.0  # the end of backward came to this bucket
    wait_ended: float = 0.0
    clock: Clock = HOST
    moments: dict[str, Timestamp] = field(default_factory=dict, repr=False)

    def mark(self, name: str) -> None:
        """Sets the attribute of this name to the present time."""
        set_time(self, name, self.clock.now())

    def gradient_came(self) -> None:
        """Records that a gradient of the bucket has arrived."""
        now = self.clock.now()
        if not self.first_ready:
            set_time(self, "first_ready", now)
        set_time(self, "last_ready", now)

    def resolve(self) -> bool:
        # No shortcut: each of them fills in what is known.
        return all([Timed.resolve(self), *(record.resolve() for record in self.rounds)])

    @property
    def exposed(self) -> float:
        """Returns the seconds that backward waited for the bucket."""
        return self.wait_ended - self.wait_began


@dataclass(slots=True)
class StepTimes(Timed):
    """Holds the times of one synchronised step, as :class:`BucketTimes` does of a bucket."""

    step: int
    forward_began: float = 0.0
    backward_began: float = 0.0  # forward ended
    backward_ended: float = 0.0  # all gradients were computed
    finished: float = 0.0  # all gradients were averaged
    buckets: list[BucketTimes] = field(default_factory=list)
    clock: Clock = HOST
    moments: dict[str, Timestamp] = field(default_factory=dict, repr=False)

    def mark(self, name: str) -> None:
        """Sets the attribute of this name to the present time."""
        set_time(self, name, self.clock.now())

    def resolve(self) -> bool:
        return all([Timed.resolve(self), *(bucket.resolve() for bucket in self.buckets)])


COLUMNS = (
    "step",
    "bucket",
    "round",
    "collective",
    "nbytes",
    "payload_bytes",
    "first_ready",
    "last_ready",
    "launched",
    "round_began",
    "round_ended",
    "decoded",
    "exposed",
)


class Timeline:
    """Holds the latest recorded steps.

    Args:
        first: number of steps that are recorded from the beginning.
        every: later, one step in this number is recorded (torch's statistics: 10 and 100).
        keep: number of records that are kept.

    Example:
        >>> ddp_model.timeline.every = 1
        >>> train(ddp_model)
        >>> ddp_model.timeline.frame().groupby("step").exposed.sum()
    """

    def __init__(self, *, first: int = 10, every: int = 100, keep: int = 100) -> None:
        self.first, self.every = first, every
        self.steps: deque[StepTimes] = deque(maxlen=keep)

    def begins(self, step: int, clock: Clock = HOST) -> StepTimes | None:
        """Returns a record for this step, or None if the step is not recorded."""
        if step >= self.first and step % self.every:
            return None
        times = StepTimes(step, clock=clock)
        times.mark("forward_began")
        return times

    def add(self, times: StepTimes) -> None:
        """Adds a finished step's record."""
        self.steps.append(times)

    def clear(self) -> None:
        """Drops all records."""
        self.steps.clear()

    def frame(self) -> pd.DataFrame:
        """Returns a row per step, bucket and round; times in milliseconds since forward began.

        Columns: step, bucket, round, collective, nbytes (of the bucket), payload_bytes (of the
        round), first_ready, last_ready, launched, round_began, round_ended, decoded, and exposed:
        how long backward waited for the bucket (in its last round's row, else 0).

        On a GPU these are times of its streams, NaN where they are not known yet: the GPU is still
        at work, which :func:`torch.cuda.synchronize` waits for.
        """
        with needs("Timeline.frame()", "pandas"):
            import pandas as pd

        for times in self.steps:
            times.resolve()
        rows = [row for times in self.steps for row in _rows(times)]
        frame: pd.DataFrame = pd.DataFrame(rows, columns=list(COLUMNS))
        return frame

    def chrome_trace(self, path: str | Path) -> None:
        """Writes the steps as a trace for chrome://tracing or Perfetto: a track per activity.

        Steps that a GPU has not completed are left out.
        """
        events = [event for times in self.steps if times.resolve() for event in _events(times)]
        tracks = sorted({event["tid"] for event in events})
        names = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": track, "args": {"name": track}}
            for track in tracks
        ]
        Path(path).write_text(json.dumps({"traceEvents": names + events, "displayTimeUnit": "ms"}))

    def plot(self, path: str | Path | None = None, step: int = -1) -> Axes:
        """Draws one step: a line per bucket, from its first gradient to its averaged one.

        Args:
            path: picture to write.
            step: which one of the recorded steps; the latest by default.

        Raises:
            MissingPackageError: matplotlib is not installed.
        """
        with needs("Timeline.plot()", "matplotlib"):
            from matplotlib.figure import Figure

        if not self.steps:
            raise ValueError("Timeline.plot: no step was recorded yet; train one, then plot")
        times = self.steps[step]
        if not times.resolve():
            raise ValueError(
                f"Timeline.plot: the device is still at work on step {times.step}, so its times "
                f"are not known yet; call torch.cuda.synchronize() before, or plot another step"
            )
        figure = Figure(figsize=(9, 1.5 + 0.3 * len(times.buckets)), layout="constrained")
        axes = figure.subplots()
        _draw(axes, times)
        if path is not None:
            figure.savefig(path)
        return axes


def _rows(times: StepTimes) -> Iterator[tuple[Any, ...]]:
    def since(moment: float) -> float:
        return round((moment - times.forward_began) * 1e3, 4) if moment else float("nan")

    for bucket in times.buckets:
        for record in bucket.rounds:
            last = record is bucket.rounds[-1]
            yield (
                times.step,
                bucket.bucket,
                record.round,
                record.collective,
                bucket.nbytes,
                record.payload_bytes,
                since(bucket.first_ready),
                since(bucket.last_ready),
                since(bucket.launched),
                since(record.issued),
                since(record.done),
                since(bucket.decoded),
                round(bucket.exposed * 1e3, 4) if last else 0.0,
            )


def _events(times: StepTimes) -> Iterator[dict[str, Any]]:
    def event(track: str, name: str, began: float, ended: float) -> dict[str, Any]:
        return {
            "ph": "X",
            "name": name,
            "pid": 0,
            "tid": track,
            "ts": began * 1e6,
            "dur": max(ended - began, 0.0) * 1e6,
            "args": {"step": times.step},
        }

    yield event("step", f"forward {times.step}", times.forward_began, times.backward_began)
    yield event("step", f"backward {times.step}", times.backward_began, times.backward_ended)
    for bucket in times.buckets:
        name = f"bucket {bucket.bucket}"
        yield event("gradients", name, bucket.first_ready, bucket.last_ready)
        for record in bucket.rounds:
            label = f"{name} {record.collective}"
            yield event(f"round {record.round}", label, record.issued, record.done)
        if bucket.exposed > 0:
            yield event("exposed wait", name, bucket.wait_began, bucket.wait_ended)


def _draw(axes: Axes, times: StepTimes) -> None:
    def span(row: float, began: float, ended: float, color: str, height: float = 0.6) -> None:
        axes.barh(
            row,
            (ended - began) * 1e3,
            left=(began - times.forward_began) * 1e3,
            height=height,
            color=color,
        )

    # Of Okabe and Ito, distinct to all eyes; later rounds are lighter.
    forward, gradients, exposed = "#7F7F7F", "#0072B2", "#D55E00"
    wire = ("#56B4E9", "#8FCDF1", "#C6E5F8")
    span(-1, times.forward_began, times.backward_began, forward)
    span(-1, times.backward_began, times.backward_ended, gradients)
    for bucket in times.buckets:
        span(bucket.bucket, bucket.first_ready, bucket.last_ready, gradients)
        for record in bucket.rounds:
            color = wire[min(record.round, len(wire) - 1)]
            span(bucket.bucket, record.issued, record.done, color)
        span(bucket.bucket, bucket.wait_began, bucket.wait_ended, exposed, height=0.2)
    labels = ["forward, backward", *(f"bucket {bucket.bucket}" for bucket in times.buckets)]
    axes.set_yticks([-1, *(bucket.bucket for bucket in times.buckets)], labels)
    axes.invert_yaxis()
    axes.set_xlabel(f"milliseconds in step {times.step}")
    legend = {
        "forward": forward,
        "gradients arrive": gradients,
        "collective, by round": wire[0],
        "backward waits": exposed,
    }
    handles = [axes.barh(0, 0, color=color, label=label) for label, color in legend.items()]
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
