"""Measures the fabric of a job by collectives as training issues them, and fits a model."""

from __future__ import annotations

import itertools
import json
import math
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from commhooks.errors import MissingRankError, RegistrationError
from commhooks.predict._collectives import collective_seconds
from commhooks.predict._fabric import COPIED, Fabric, Library, Link
from ddp_core import AllGather, AllReduce, AllToAll
from ddp_core.exchange._collectives import Collective
from ddp_core.exchange._lane_groups import backend_for, is_gloo, private_group
from ddp_core.exchange._shared_store import PrefixedStore

__all__ = [
    "COLLECTIVES",
    "REQUESTS",
    "Cell",
    "Layout",
    "LinkReport",
    "Part",
    "Size",
    "Time",
    "fitted",
    "link_report",
    "measure_link",
    "measured_overlap",
    "modelled",
    "shared",
]


class Cell(NamedTuple):
    """Describes a collective that is measured."""

    part: int
    collective: str
    nbytes: int


class Size(NamedTuple):
    """Holds the first measurements of one size, and the seconds since the begin."""

    cells: list[Cell]
    bursts: list[int]
    seconds: list[float]
    took: float

    @property
    def cost(self) -> float:
        """Returns the seconds of one round."""
        return sum(
            seconds * burst for seconds, burst in zip(self.seconds, self.bursts, strict=True)
        )


def _rows(tensor: torch.Tensor, ranks: int) -> torch.Tensor:
    """Returns a tensor with a row per rank, of about as many bytes together."""
    return tensor.new_zeros(ranks, max(1, tensor.numel() // ranks))


REQUESTS: dict[str, Callable[[torch.Tensor, int], Collective]] = {
    "all_reduce": lambda tensor, ranks: AllReduce(tensor, "sum"),
    "all_gather": lambda tensor, ranks: AllGather(tensor),
    "all_to_all": lambda tensor, ranks: AllToAll(_rows(tensor, ranks)),
}


# ---- messages at the same time


_NUMEL = 256  # of a small message
# Repetitions in a row take about this long: where latency is a processor's work,
# one message alone takes 0.2 or 3 ms, as the scheduler has it.
_BURST_S, _BURST = 20e-3, 20
_AT_LEAST, _AT_MOST = 3, 9
_BUDGET = 0.2  # share of the whole measurement's


def measured_overlap(
    group: Any, highest: Callable[[Sequence[float]], list[float]], budget_s: float
) -> float:
    """Measures the share of the latency that two messages share, from 0 to 1.

    The measurement is a collective of the ranks of ``group``.

    Args:
        group: the ranks, over Gloo.
        highest: returns the largest of all ranks, value by value.
        budget_s: seconds of the whole measurement.
    """
    (alone,) = highest([_seconds(group, 1, 1)])
    burst = max(1, min(_BURST, round(_BURST_S / max(alone, 1e-9))))
    pairs: list[tuple[float, float]] = []
    took = 0.0
    while len(pairs) < _AT_LEAST or (len(pairs) < _AT_MOST and took < _BUDGET * budget_s):
        alone, both = highest([_seconds(group, count, burst) for count in (1, 2)])
        pairs.append((alone, both))
        took += burst * (alone + both)
    return shared(pairs)


def shared(pairs: Sequence[tuple[float, float]]) -> float:
    """Returns the share of the latency that two messages share, from pairs of times.

    Args:
        pairs: seconds of one message, and of two at once.
    """
    return min(max(2 - statistics.median(both / alone for alone, both in pairs), 0.0), 1.0)


def _seconds(group: Any, count: int, burst: int) -> float:
    """Returns the seconds of ``count`` small all-reduces that are issued together."""
    requests = [[AllReduce(torch.zeros(_NUMEL), "sum") for _ in range(count)] for _ in range(burst)]
    AllReduce(torch.zeros(1), "sum").issue(group).wait()  # all ranks begin at the same time
    begin = time.perf_counter()
    for some in requests:
        for work in [request.issue(group) for request in some]:
            work.wait()
    return (time.perf_counter() - begin) / burst


# ---- latency and bandwidth


COLLECTIVES = ("all_reduce", "all_gather", "all_to_all")
Part = Literal["inside", "between", "all"]
# The range in which links are searched, as powers of ten: seconds, and bytes per second.
_LATENCY, _BANDWIDTH = (-7.0, 0.0), (4.0, 13.0)
_POINTS, _ZOOMS = 19, 5


@dataclass(frozen=True)
class Layout:
    """Describes the number of ranks, and of ranks per node."""

    ranks: int
    per_node: int


class Time(NamedTuple):
    """Holds a measured time of a collective.

    Attributes:
        part: the ranks that took part: those of a node, one of each node, or all.
        collective: name of the collective.
        nbytes: bytes that each rank passed to the collective.
        seconds: median over rounds of the slowest rank's time.
        low_s, high_s: the middle half of the rounds is between them.
    """

    part: Part
    collective: str
    nbytes: int
    seconds: float
    low_s: float
    high_s: float


def fitted(
    layout: Layout, times: Sequence[Time], library: Library, *, overlap: float = 0.0
) -> Fabric:
    """Returns the fabric whose modelled times are nearest to the measured ones.

    The distance is the sum of absolute logarithms of ratios: small and large sizes count alike, and
    a few outliers have no influence. Between nodes, one rank per node shows the latency; the
    bandwidth is the higher one of these ranks' and of all ranks', since several network cards need
    several ranks, and all ranks together may be bound by the link inside a node.

    Args:
        layout: of the ranks.
        times: the measurements.
        library: the library that carried the messages.
        overlap: of latencies, see :class:`commhooks.predict.Fabric`.
    """
    one_node = layout.per_node == layout.ranks
    empty = Fabric(
        "measured", Link(0.0, 1.0), library=library, overlap=overlap, source="commhooks link"
    )

    def inside(link: Link) -> Fabric:
        return replace(empty, between=link, inside=link, ranks_per_node=layout.per_node)

    if one_node:
        here = _nearest(layout, times, "inside", inside)
        return replace(inside(here), source=COPIED)
    if layout.per_node == 1:
        link = _nearest(
            layout, times, "between", lambda candidate: replace(empty, between=candidate)
        )
        return replace(empty, between=link)
    here = _nearest(layout, times, "inside", inside)

    def between(link: Link) -> Fabric:
        return replace(empty, between=link, inside=here, ranks_per_node=layout.per_node)

    few = _nearest(layout, times, "between", between)
    whole = _nearest(layout, times, "all", between)
    return between(Link(few.latency, max(few.bandwidth, whole.bandwidth)))


def modelled(layout: Layout, time: Time, fabric: Fabric) -> float:
    """Returns the modelled time of a measurement."""
    return float(_modelled(layout, time.part, time.collective, [time.nbytes], fabric)[0])


def _modelled(
    layout: Layout, part: Part, collective: str, sizes: Sequence[int], fabric: Fabric
) -> np.ndarray:
    ranks, per_node = layout.ranks, layout.per_node
    if part == "inside":
        return collective_seconds(collective, sizes, ranks=per_node, fabric=fabric)
    leaders = range(0, ranks, per_node) if part == "between" and per_node > 1 else None
    return collective_seconds(
        collective, sizes, ranks=ranks, fabric=fabric, part=leaders, alone=True
    )


def _nearest(
    layout: Layout, times: Sequence[Time], part: Part, fabric_of: Callable[[Link], Fabric]
) -> Link:
    """Returns the best link of a part; the slowest if several fit equally."""
    groups = []
    for collective in COLLECTIVES:
        some = [time for time in times if (time.part, time.collective) == (part, collective)]
        if some:
            seconds = np.array([time.seconds for time in some])
            groups.append((collective, [time.nbytes for time in some], np.log(seconds)))

    def distance(latency: float, bandwidth: float) -> float:
        fabric = fabric_of(Link(10.0**latency, 10.0**bandwidth))
        return sum(
            float(np.abs(np.log(_modelled(layout, part, name, sizes, fabric)) - logs).sum())
            for name, sizes, logs in groups
        )

    # A grid, and finer ones around its best point: whatever algorithms the model chooses by size,
    # there is nothing to differentiate.
    latencies, bandwidths = np.linspace(*_LATENCY, _POINTS), np.linspace(*_BANDWIDTH, _POINTS)
    best = math.inf, 0.0, 0.0
    for _ in range(_ZOOMS):
        best = min(
            (distance(latency, bandwidth), bandwidth, latency)
            for latency in latencies
            for bandwidth in bandwidths
        )
        _, bandwidth, latency = best
        step, factor = latencies[1] - latencies[0], bandwidths[1] - bandwidths[0]
        latencies = np.linspace(latency - step, latency + step, 7)
        bandwidths = np.linspace(bandwidth - factor, bandwidth + factor, 7)
    return Link(10.0 ** float(best[2]), 10.0 ** float(best[1]))


# ---- measuring


_SIZES = tuple(2**power for power in range(10, 27, 2))  # 1 KiB to 64 MiB
_LARGEST_RESULT = 2**30  # bytes: an all-gather's result has those of all ranks
# Small messages are sent several times per measurement, for about this long: one alone would
# measure how far apart the ranks leave the barrier before it.
_BURST_S, _BURST = 2e-3, 20
_ROUNDS_AT_LEAST, _ROUNDS_AT_MOST = 3, 15
# The largest message takes so many times as long as the smallest one, if that can be had in so many
# times the budget.
_SHOWS, _PATIENCE = 3.0, 2.0
_numbers = itertools.count()  # of the measurements in this process, equal on all ranks


@dataclass(frozen=True)
class LinkReport:
    """Holds a measured fabric and the measurements.

    Attributes:
        fabric: the fit.
        layout: number of ranks, and of ranks per node.
        times: measured times by part of the ranks, collective and size.
        device: "cpu" or "cuda".
        rounds: number of measurements of each.
        seconds: duration of the whole measurement.
    """

    fabric: Fabric
    layout: Layout
    times: tuple[Time, ...]
    device: str
    rounds: int
    seconds: float

    @property
    def measured(self) -> dict[str, Any]:
        """Returns the measurements in JSON's types, for :func:`commhooks.predict.save_fabric`."""
        about = {
            "ranks": self.layout.ranks,
            "per_node": self.layout.per_node,
            "device": self.device,
        }
        return {**about, "rounds": self.rounds, "times": [time._asdict() for time in self.times]}

    @property
    def fit_error(self) -> float:
        """Returns the median factor between modelled and measured times; 1 is perfect."""
        pairs = [(modelled(self.layout, time, self.fabric), time.seconds) for time in self.times]
        return statistics.median(max(pair) / min(pair) for pair in pairs)


def measure_link(
    group: dist.ProcessGroup | None = None,
    *,
    budget_s: float = 10.0,
    device: Literal["cpu", "cuda"] | None = None,
    timeout_s: float = 120.0,
) -> Fabric:
    """Measures the fabric between the ranks of a group; all ranks call it, between two steps.

    Messages travel in process groups of its own, over the same library: the order of collectives
    in the job's groups is not touched.

    Args:
        group: the ranks; the default group if None.
        budget_s: approximate seconds that the measurement may take; sizes that would take too long
            are left out.
        device: of the tensors: "cpu" over Gloo or "cuda" over NCCL; the group's device by default.
        timeout_s: seconds after which a missing rank is an error.

    Returns:
        The fabric, the same on all ranks.

    Raises:
        MissingRankError: a rank did not call it in time, or ended.
        RegistrationError: there is no process group, or one rank only.

    Example:
        >>> save_fabric(measure_link(), "link.json")
    """
    return link_report(group, budget_s=budget_s, device=device, timeout_s=timeout_s).fabric


def link_report(
    group: dist.ProcessGroup | None = None,
    *,
    budget_s: float = 10.0,
    device: Literal["cpu", "cuda"] | None = None,
    timeout_s: float = 120.0,
) -> LinkReport:
    """Measures as :func:`measure_link`, and returns the measurements as well."""
    if not dist.is_available() or not dist.is_initialized():
        raise RegistrationError(
            "measure_link: no process group; call torch.distributed.init_process_group first"
        )
    if not budget_s > 0 or not timeout_s > 0:
        raise ValueError(
            f"measure_link(budget_s=..., timeout_s=...): seconds above 0, got {budget_s!r} and "
            f"{timeout_s!r}"
        )
    whole: Any = dist.group.WORLD if group is None else group
    if whole.size() < 2:
        raise RegistrationError("measure_link: one rank has no link; start two or more")
    try:
        return _Measurement(whole, _device(whole, device), budget_s, timeout_s).run()
    except RuntimeError as error:
        if isinstance(error, MissingRankError):
            raise
        raise MissingRankError(
            f"measure_link: a rank did not come within {timeout_s:g} s, or ended; all ranks of "
            f"the group call it, between two steps: {error}"
        ) from error


def _device(group: dist.ProcessGroup, asked: str | None) -> torch.device:
    cuda = torch.device("cuda")
    has_nccl = torch.cuda.is_available() and not is_gloo(backend_for(group, cuda))
    if asked is None:
        asked = "cuda" if has_nccl and backend_for(group, cuda) is not None else "cpu"
    if asked == "cuda" and not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise ValueError("measure_link(device='cuda'): there is no GPU here, or no NCCL")
    return torch.device(asked)


class _Own(NamedTuple):
    """Describes a part of the ranks; ``group`` is None if this rank is not in it."""

    part: Part
    size: int
    group: Any


class _Measurement:
    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, budget_s: float, timeout_s: float
    ) -> None:
        self._begin, self._budget = time.perf_counter(), budget_s
        self._rank, self._size, self._device = group.rank(), group.size(), device
        self._timeout_s = timeout_s
        self._store = PrefixedStore(group, "measure_link", next(_numbers), timeout_s)
        self._node = self._nodes(dist.get_rank())
        per_node = max(self._node.count(node) for node in self._node)
        self._layout = Layout(self._size, min(per_node, self._size))
        self._parts = self._make_parts()

    def run(self) -> LinkReport:
        everyone = self._parts[-1].group
        # Measure in rounds, until the budget is used.
        cells, bursts = self._grow()
        rounds: list[list[float]] = []
        took = 0.0
        while len(rounds) < _ROUNDS_AT_LEAST or (
            len(rounds) < _ROUNDS_AT_MOST and took * (1 + 1 / len(rounds)) < self._budget
        ):
            local_seconds = [
                self._seconds(cell, burst) for cell, burst in zip(cells, bursts, strict=True)
            ]
            *agreed, took = self._highest([*local_seconds, time.perf_counter() - self._begin])
            rounds.append(agreed)
        # Fit the model.
        times = [_time(self._parts[cell.part].part, cell, [seconds[index] for seconds in rounds])
                 for index, cell in enumerate(cells)]  # fmt: skip
        if self._device.type == "cpu":
            overlap = measured_overlap(everyone, self._highest, self._budget)
            fit = fitted(self._layout, times, "gloo", overlap=overlap)
        else:
            fit = fitted(self._layout, times, "nccl")
        # Rank 0's numbers: two processors may round differently.
        links = [link and [link.latency, link.bandwidth] for link in (fit.between, fit.inside)]
        if self._rank == 0:
            self._store.set("fit", json.dumps(links))
        between, inside = json.loads(self._store.get("fit"))
        fit = replace(
            fit,
            between=Link(*between),
            inside=inside and Link(*inside),
            cpu_s_per_byte=self._core_seconds(cells),
        )
        # Close the groups.
        seconds = time.perf_counter() - self._begin
        AllReduce(self._zeros(4), "sum").issue(everyone).wait()  # no rank leaves before all have it
        for part in self._parts:
            if part.group is not None:
                part.group.shutdown()
        return LinkReport(fit, self._layout, tuple(times), self._device.type, len(rounds), seconds)

    # ---- ranks

    def _nodes(self, global_rank: int) -> list[str]:
        """Returns the node of each rank, by torchrun's number of ranks per node."""
        local = os.environ.get("LOCAL_WORLD_SIZE")
        node = socket.gethostname() if local is None else f"node {global_rank // int(local)}"
        self._store.set(f"node of {self._rank}", node)
        return [self._store.get(f"node of {rank}") for rank in range(self._size)]

    def _make_parts(self) -> list[_Own]:
        """Returns the parts that are measured; the last part has all ranks."""
        whole = range(self._size)
        mates = [rank for rank in whole if self._node[rank] == self._node[self._rank]]
        leaders = [self._node.index(node) for node in dict.fromkeys(self._node)]
        if len(leaders) == 1:
            return [self._own("inside", list(whole), "all")]
        if len(leaders) == self._size:
            return [self._own("between", list(whole), "all")]
        return [
            self._own("inside", mates, f"inside {self._node[self._rank]}"),
            self._own("between", leaders, "between"),
            self._own("all", list(whole), "all"),
        ]

    def _own(self, part: Part, ranks: list[int], name: str) -> _Own:
        if self._rank not in ranks or len(ranks) < 2:
            return _Own(part, len(ranks), None)
        size, place = len(ranks), (ranks.index(self._rank), len(ranks), f"commhooks/link/{name}")
        timeout = timedelta(seconds=self._timeout_s)
        # A second more, in which the backend says which rank did not come.
        group = self._store.store.call(
            lambda store: private_group(store, *place, self._device, timeout), self._timeout_s + 1
        )
        return _Own(part, size, group)

    def _highest(self, values: Sequence[float]) -> list[float]:
        """Returns the largest of all ranks' values, position by position."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self._device)
        AllReduce(tensor, "max").issue(self._parts[-1].group).wait()
        return [float(value) for value in tensor.tolist()]

    # ---- times

    def _grow(self) -> tuple[list[Cell], list[int]]:
        """Measures once, from small to large, and chooses the sizes that fit into the budget.

        Returns the cells to measure, and how often each in a row. These first times do not count:
        the first message of a kind opens connections and allocates memory.
        """
        by_nbytes: dict[int, Size] = {}
        rounds = _ROUNDS_AT_LEAST + 1
        # Every second size first: up to 16 times as long as the one before, here and in each round.
        for nbytes in _SIZES[::2]:
            size = by_nbytes[nbytes] = self._measured(nbytes)
            seconds = sum(size.seconds)
            cost = sum(measured.cost for measured in by_nbytes.values()) + 16 * seconds
            fits = size.took + 16 * seconds + rounds * cost <= self._budget
            # Sizes at which only the latency shows would leave the bandwidth open.
            shows = seconds >= _SHOWS * sum(by_nbytes[_SIZES[0]].seconds)
            if not fits and (shows or size.took > _PATIENCE * self._budget):
                break
        for before, nbytes in zip(_SIZES[::2], _SIZES[1::2], strict=False):
            known = list(by_nbytes.values())
            if before not in by_nbytes:
                break
            cost = sum(measured.cost for measured in known) + 4 * by_nbytes[before].cost
            if known[-1].took + 4 * by_nbytes[before].cost + rounds * cost > self._budget:
                break
            by_nbytes[nbytes] = self._measured(nbytes)
        sizes = [by_nbytes[nbytes] for nbytes in sorted(by_nbytes)]
        cells = [cell for size in sizes for cell in size.cells]
        return cells, [often for size in sizes for often in size.bursts]

    def _measured(self, nbytes: int) -> Size:
        """Measures all collectives of one size once."""
        cells = [
            Cell(part, collective, nbytes)
            for part, group_part in enumerate(self._parts)
            for collective in COLLECTIVES
            if collective != "all_gather" or nbytes * group_part.size <= _LARGEST_RESULT
        ]
        *seconds, took = self._highest(
            [*(self._seconds(cell, 1) for cell in cells), time.perf_counter() - self._begin]
        )
        bursts = [
            max(1, min(_BURST, round(_BURST_S / max(duration, 1e-9)))) for duration in seconds
        ]
        return Size(cells, bursts, seconds, took)

    def _seconds(self, cell: Cell, burst: int) -> float:
        """Returns the seconds of one collective; 0 on a rank that does not take part."""
        part = self._parts[cell.part]
        if part.group is None:
            return 0.0
        make = REQUESTS[cell.collective]
        requests = [make(self._zeros(cell.nbytes), part.size) for _ in range(burst)]
        AllReduce(self._zeros(4), "sum").issue(part.group).wait()  # all begin at the same time
        self._settle()
        begin = time.perf_counter()
        for request in requests:
            request.issue(part.group).wait()
        self._settle()
        return (time.perf_counter() - begin) / burst

    def _core_seconds(self, cells: Sequence[Cell]) -> float:
        """Returns the processor time per byte that a rank sends, or 0."""
        if self._device.type != "cpu":
            return 0.0
        nbytes = min(max(cell.nbytes for cell in cells), 2**22)
        request = AllReduce(self._zeros(nbytes), "sum")
        per_byte = []
        for _ in range(3):
            begin = time.process_time()
            request.issue(self._parts[-1].group).wait()
            per_byte.append((time.process_time() - begin) / request.wire_nbytes(self._size))
        return self._highest([statistics.median(per_byte)])[0]

    def _zeros(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes // 4, device=self._device)

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def _time(part: Part, cell: Cell, seconds: Sequence[float]) -> Time:
    low, _, high = statistics.quantiles(seconds, n=4)
    return Time(part, cell.collective, cell.nbytes, statistics.median(seconds), low, high)
