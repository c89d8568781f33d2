"""Defines the cells of the study: lines, periods and codecs, and the share of time computing."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pandas as pd

import commhooks
from commhooks.predict import DEVICES, Device, Fabric, Link, Workload, predict_step
from commhooks.predict._models import model
from experiments.tools.local_steps import predict_local

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
OVERLAPPED = ("bf16", "int4", "eden:bits=2")
QUICK_S = 2.0  # an exchange that takes longer is measured once
# So that periods of the goals take some seconds, and the processor's part is below a tenth.
DILATION = {50.0: 2.0, 200.0: 6.0, 1000.0: 20.0, 5000.0: 20.0}
_DENSE = ("none", "bf16")
# Of a cable between namespaces; the share of a rate that is not headers (1448 of 1514 bytes).
_LATENCY_S, _TCP = 60e-6, 1448 / 1514
_PUBLISHED = Path(__file__).parent.parent / "predictions" / "published" / "diloco.csv"
_NAMES = {50.0: "50m", 200.0: "200m", 1000.0: "1g", 5000.0: "5g"}


class Line(NamedTuple):
    """Describes the cable of a host.

    Attributes:
        mbit: rate in Mbit/s, in each direction.
        round_trip_ms: time to another host and back, beside that of the bytes.
        loss: share of packets that get lost.
        dilation: everything but the processor is slowed down by this factor: rate, delay and the
            sleeps of a step. The line and the steps stay in proportion, and ranks of an accelerator
            whose arithmetic is as many times as fast are measured in slow motion.
    """

    mbit: float
    round_trip_ms: float = 0.0
    loss: float = 0.0
    dilation: float = 1.0

    @property
    def compute_s(self) -> float:
        """Returns the seconds that a step sleeps."""
        return COMPUTE_S * self.dilation

    def __str__(self) -> str:
        text = f"{self.mbit:g} Mbit/s"
        if self.round_trip_ms:
            text += f", {self.round_trip_ms:g} ms, {self.loss:.1%} lost"
        return text + (f", {self.dilation:g}-fold slow motion" if self.dilation > 1 else "")


FAR = (30.0, 0.001)  # milliseconds of a round trip, share of packets lost


@dataclass(frozen=True)
class Cell:
    """Describes one measurement.

    Attributes:
        plan: "ddp" (an exchange of gradients in every step), "blocking" (DiLoCo) or "overlapped"
            (DiLoCo in fragments, each applied as late as possible).
        codec: a scheme with its options, as "eden:bits=2".
        every: steps between two exchanges of a parameter.
    """

    plan: str
    codec: str
    every: int

    @property
    def delay(self) -> int:
        """Returns the steps between sending and applying: as many as DiLoCo allows."""
        return self.every - 1 if self.plan == "overlapped" else 0


def lines(kinds: set[str]) -> dict[Line, list[Cell]]:
    """Returns the cells of each line.

    Args:
        kinds: "near" (all codecs and periods), "fast" (the periods of the goals, in slow motion),
            "far" (the same, with long round trips and losses).
    """
    cells_of = {Line(mbit): _cells(mbit) for mbit in GOALS} if "near" in kinds else {}
    for kind, there in (("fast", (0.0, 0.0)), ("far", FAR)):
        if kind in kinds:
            for mbit, every in GOALS.items():
                line = Line(mbit, *there, dilation=DILATION[mbit])
                codecs = ("int4" if mbit >= 5000 else "eden:bits=2", "powersgd:rank=4")
                cells_of[line] = [Cell("overlapped", codec, every) for codec in codecs]
    return cells_of


def _cells(mbit: float) -> list[Cell]:
    # bf16 is many times too large for a slow line.
    overlapped = [codec for codec in OVERLAPPED if codec != "bf16" or mbit >= 1000]
    return [
        *(Cell("overlapped", codec, every) for codec in overlapped for every in PERIODS),
        *(Cell("blocking", codec, every) for codec in BLOCKING for every in PERIODS),
        *(Cell("ddp", codec, 1) for codec in _DENSE),
    ]


def source(cell: Cell) -> Cell:
    """Returns the cell whose measured exchange gives the time of ``cell``: usually itself.

    While a blocking exchange is under way nothing else happens, and no step lies in it: a period
    takes ``every`` sleeps and the exchange. So it is measured for one period. Where they overlap,
    steps lie in the exchange, and each cell is run.
    """
    return replace(cell, every=PERIODS[1]) if cell.plan == "blocking" else cell


def share(every: int, periods: int, seconds: float, compute_s: float = COMPUTE_S) -> float:
    """Returns the share of the time that is spent computing.

    Args:
        every: steps of a period.
        periods: number of periods.
        seconds: of all of them, with their exchanges.
        compute_s: seconds that a step computes.
    """
    if not seconds > 0:
        raise ValueError(f"share(seconds=...) is above 0, got {seconds!r}")
    return every * periods * compute_s / seconds


def made(codec: str) -> commhooks.Scheme:
    """Returns a scheme from a name with options, such as "eden:bits=2"."""
    name, _, options = codec.partition(":")
    pairs = (option.split("=") for option in options.split(",") if option)
    return commhooks.make(name, **{key: json.loads(value) for key, value in pairs})


@cache
def workload(compute_s: float = COMPUTE_S) -> Workload:
    """Returns a step of the model: 30.8 M parameters, 25 ms without communication."""
    layers = model("diloco-30m").layers
    return Workload("30.8 M", layers, forward_s=compute_s / 3, backward_s=2 * compute_s / 3)


def predicted_share(line: Line, cell: Cell, device: Device) -> float:
    """Returns the prediction of :mod:`commhooks.predict` before the run, for ``line``."""
    latency = _LATENCY_S + line.round_trip_ms / 2e3 * line.dilation
    link = Link(latency, line.mbit / line.dilation * 1e6 / 8 * _TCP)
    fabric = Fabric("stated", between=link)
    scheme, work, compute_s = made(cell.codec), workload(line.compute_s), line.compute_s
    if cell.plan == "ddp":
        step = predict_step(scheme, work, ranks=HOSTS, fabric=fabric, device=device)
        return compute_s / step.step_s
    return predict_local(
        scheme,
        work,
        every=cell.every,
        ranks=HOSTS,
        fabric=fabric,
        device=device,
        delay=cell.delay,
    ).utilisation


def waiting_s(line: Line, cell: Cell) -> float:
    """Returns the approximate seconds of a period that are not spent computing."""
    utilisation = predicted_share(line, cell, DEVICES["cpu"])
    return cell.every * line.compute_s * (1 / utilisation - 1)


def planned_periods(line: Line, cell: Cell, periods: int) -> tuple[int, int]:
    """Returns how many periods to run before the clock starts, and how many with it.

    Exchanges of seconds are measured once, blocking ones without one before: what the first costs
    more (memory, connections) is small beside them. Where exchange and steps overlap, the exchange
    under way when the clock starts makes up for the one when it stops.
    """
    long = waiting_s(line, cell) > QUICK_S
    return (0 if long and cell.plan != "overlapped" else 1), (1 if long else periods)


def planned_s(line: Line, cell: Cell, periods: int) -> float:
    """Returns the approximate seconds that a cell takes."""
    count = sum(planned_periods(line, cell, periods))
    return count * (cell.every * line.compute_s + waiting_s(line, cell))


def dense_share(line: Line, cell: Cell) -> float | None:
    """Returns the share of a dense run in the published grid, or None if the cell is not there."""
    if line != Line(line.mbit) or cell.plan == "overlapped" or cell.codec != "none":
        return None
    rows = pd.read_csv(_PUBLISHED)
    algorithm = "ddp" if cell.plan == "ddp" else "diloco"
    rows = rows[
        (rows.algorithm == algorithm)
        & (rows.period == cell.every)
        & (rows.rate == _NAMES.get(line.mbit))
    ]
    return float(rows.utilisation.mean()) if len(rows) else None
