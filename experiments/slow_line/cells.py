"""Defines the cells of the study: lines, periods and codecs, and the share of time computing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pandas as pd

import commhooks
from commhooks.predict import DEVICES, Device, Fabric, Link, Workload, predict_step
from commhooks.predict.local import predict_local
from commhooks.predict.models import model

__all__ = [
    "COMPUTE_S",
    "GOALS",
    "HOSTS",
    "Cell",
    "Line",
    "dense_share",
    "lines",
    "made",
    "planned_periods",
    "planned_s",
    "predicted_share",
    "share",
    "source",
    "workload",
]

HOSTS, COMPUTE_S = 4, 0.025
PERIODS = (8, 32, 128)
# The goal, 90 % of the time computing, is for one period at each rate (Mbit/s).
GOALS = {50.0: 128, 200.0: 32, 1000.0: 8, 5000.0: 8}
BLOCKING = ("none", "bf16", "int8", "int4", "eden:bits=2", "powersgd:rank=4")
STREAMING = ("bf16", "int4", "eden:bits=2", "powersgd:rank=4")
FRAGMENTS = 2
# Seconds of an exchange from which on it is measured once, and for one period.
QUICK_S, LONG_S = 2.0, 5.0
_DENSE = ("none", "bf16")
_PUBLISHED = Path(__file__).parent.parent / "predictions" / "published" / "diloco.csv"
_NAMES = {50.0: "50m", 200.0: "200m", 1000.0: "1g", 5000.0: "5g"}


class Line(NamedTuple):
    """Describes the cable of a host.

    Attributes:
        mbit: rate in Mbit/s, in each direction.
        round_trip_ms: time to another host and back, beside that of the bytes.
        loss: share of packets that get lost.
    """

    mbit: float
    round_trip_ms: float = 0.0
    loss: float = 0.0


FAR = (30.0, 0.001)  # milliseconds of a round trip, share of packets lost


@dataclass(frozen=True)
class Cell:
    """Describes one measurement.

    Attributes:
        plan: "ddp" (an exchange of gradients in every step), "blocking" (DiLoCo) or "streaming"
            (DiLoCo in fragments, each applied as late as possible).
        codec: a scheme with its options, as "eden:bits=2".
        every: steps between two exchanges of a parameter.
    """

    plan: str
    codec: str
    every: int

    @property
    def fragments(self) -> int:
        """Returns the number of parts of the model."""
        return FRAGMENTS if self.plan == "streaming" else 1

    @property
    def delay(self) -> int:
        """Returns the steps between sending and applying: as many as DiLoCo allows."""
        return self.every // FRAGMENTS - 1 if self.plan == "streaming" else 0


def lines(*, far: bool) -> dict[Line, list[Cell]]:
    """Returns the cells of each line, those with a long round trip and losses last."""
    found = {Line(mbit): _cells(mbit) for mbit in GOALS}
    if far:
        for mbit, every in GOALS.items():
            some = [Cell("streaming", codec, every) for codec in ("int4", "eden:bits=2")]
            some += [Cell("streaming", "powersgd:rank=4", every), Cell("blocking", "int4", every)]
            found[Line(mbit, *FAR)] = some
    return found


def _cells(mbit: float) -> list[Cell]:
    # bf16 is many times too large for a slow line, in fragments too.
    streaming = [codec for codec in STREAMING if codec != "bf16" or mbit >= 1000]
    return [
        *(Cell("streaming", codec, every) for codec in streaming for every in PERIODS),
        *(Cell("blocking", codec, every) for codec in BLOCKING for every in PERIODS),
        *(Cell("ddp", codec, 1) for codec in _DENSE),
    ]


def source(line: Line, cell: Cell) -> Cell:
    """Returns the cell whose measured exchange gives the time of ``cell``: mostly itself.

    While a blocking exchange is under way nothing else happens, and no step lies in it: a period
    takes ``every`` sleeps and the exchange. So exchanges of many seconds are measured for one
    period only. In streaming the steps do lie in the exchange, and each cell is run.
    """
    if cell.plan == "blocking" and waiting_s(line, cell) > LONG_S:
        return Cell(cell.plan, cell.codec, PERIODS[0])
    return cell


def share(every: int, periods: float, seconds: float) -> float:
    """Returns the share of the time that is spent computing.

    Args:
        every: steps of a period.
        periods: number of periods.
        seconds: of all of them, with their exchanges.
    """
    if not seconds > 0:
        raise ValueError(f"share(seconds=...) is above 0, got {seconds!r}")
    return every * periods * COMPUTE_S / seconds


def made(codec: str) -> commhooks.Scheme:
    """Returns a scheme from a name with options, as "eden:bits=2"."""
    name, _, options = codec.partition(":")
    pairs = (option.split("=") for option in options.split(",") if option)
    return commhooks.make(name, **{key: json.loads(value) for key, value in pairs})


@cache
def workload() -> Workload:
    """Returns a step of the model: 30.8 M parameters, 25 ms without communication."""
    layers = model("diloco-30m").layers
    return Workload("30.8 M", layers, forward_s=COMPUTE_S / 3, backward_s=2 * COMPUTE_S / 3)


def predicted_share(cell: Cell, fabric: Fabric, device: Device) -> float:
    """Returns what :mod:`commhooks.predict` says before the run."""
    scheme = made(cell.codec)
    if cell.plan == "ddp":
        step = predict_step(scheme, workload(), ranks=HOSTS, fabric=fabric, device=device)
        return COMPUTE_S / step.step_s
    return predict_local(
        scheme,
        workload(),
        every=cell.every,
        ranks=HOSTS,
        fabric=fabric,
        device=device,
        fragments=cell.fragments,
        delay=cell.delay,
    ).utilisation


def waiting_s(line: Line, cell: Cell) -> float:
    """Returns about how many seconds of a period are not spent computing."""
    link = Link(60e-6 + line.round_trip_ms / 2e3, line.mbit * 1e6 / 8 * 0.95)
    utilisation = predicted_share(cell, Fabric("planned", between=link), DEVICES["cpu"])
    return cell.every * COMPUTE_S * (1 / utilisation - 1)


def planned_periods(line: Line, cell: Cell, periods: int) -> tuple[int, int]:
    """Returns how many periods to run before the clock starts, and how many with it.

    Exchanges of seconds are measured once, blocking ones without one before: what the first costs
    more (memory, connections) is small beside them. In streaming the exchange that is under way
    when the clock starts makes up for the one when it stops.
    """
    long = waiting_s(line, cell) > QUICK_S
    return (0 if long and cell.plan != "streaming" else 1), (1 if long else periods)


def planned_s(line: Line, cell: Cell, periods: int) -> float:
    """Returns about how many seconds a cell takes."""
    count = sum(planned_periods(line, cell, periods)) + (0.5 if cell.plan == "streaming" else 0)
    return count * (cell.every * COMPUTE_S + waiting_s(line, cell))


def dense_share(line: Line, cell: Cell) -> float | None:
    """Returns the share in the published grid of dense runs, or None for a cell it has not."""
    if line.round_trip_ms or line.loss or cell.plan == "streaming" or cell.codec != "none":
        return None
    rows = pd.read_csv(_PUBLISHED)
    algorithm = "ddp" if cell.plan == "ddp" else "diloco"
    rows = rows[
        (rows.algorithm == algorithm)
        & (rows.period == cell.every)
        & (rows.rate == _NAMES.get(line.mbit))
    ]
    return float(rows.utilisation.mean()) if len(rows) else None
