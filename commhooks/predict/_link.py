"""Measures the network of a job with the collectives that training issues, and fits a fabric."""

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
    "MAKE_REQUEST",
    "Case",
    "Layout",
    "LinkReport",
    "Part",
    "SizeTrial",
    "Timing",
    "fit_fabric",
    "link_report",
    "measure_link",
    "measure_overlap",
    "model_seconds",
    "overlap_of",
]


class Case(NamedTuple):
    """Describes a collective to measure; ``part`` is an index into the parts of the ranks."""

    part: int
    collective: str
    nbytes: int


class SizeTrial(NamedTuple):
    """Holds the first measurements of all collectives of one size.

    Attributes:
        cases: the collectives.
        bursts: how often each is to be repeated in a row.
        seconds: time of each.
        elapsed_s: seconds from the start of the whole measurement to the end of these.
    """

    cases: list[Case]
    bursts: list[int]
    seconds: list[float]
    elapsed_s: float

    @property
    def cost(self) -> float:
        """Returns the seconds that a round of measurements of this size takes."""
        return sum(
            seconds * burst for seconds, burst in zip(self.seconds, self.bursts, strict=True)
        )


def _rows(tensor: torch.Tensor, ranks: int) -> torch.Tensor:
    """Returns a tensor with a row per rank, of about as many bytes as ``tensor``."""
    return tensor.new_zeros(ranks, max(1, tensor.numel() // ranks))


MAKE_REQUEST: dict[str, Callable[[torch.Tensor, int], Collective]] = {
    "all_reduce": lambda tensor, ranks: AllReduce(tensor, "sum"),
    "all_gather": lambda tensor, ranks: AllGather(tensor),
    "all_to_all": lambda tensor, ranks: AllToAll(_rows(tensor, ranks)),
}


# ---- overlap of two messages


_SMALL_NUMEL = 256  # entries of a small message
# A burst of repetitions takes about this many seconds: where latency is a processor's work, a
# single message takes 0.2 or 3 ms, depending on the scheduler.
_OVERLAP_BURST_S, _OVERLAP_BURST = 20e-3, 20
_MIN_PAIRS, _MAX_PAIRS = 3, 9
_OVERLAP_SHARE = 0.2  # of the budget of the whole measurement


def measure_overlap(
    group: Any, max_over_ranks: Callable[[Sequence[float]], list[float]], budget_s: float
) -> float:
    """Measures the share of the latency that two messages share, from 0 to 1.

    The measurement is a collective of the ranks of ``group``.

    Args:
        group: the ranks, over Gloo.
        max_over_ranks: returns the largest values of all ranks, position by position.
        budget_s: seconds of the whole measurement, of which this takes a fifth.
    """
    (alone,) = max_over_ranks([_seconds(group, 1, 1)])
    burst = max(1, min(_OVERLAP_BURST, round(_OVERLAP_BURST_S / max(alone, 1e-9))))
    pairs: list[tuple[float, float]] = []
    took = 0.0
    while len(pairs) < _MIN_PAIRS or (len(pairs) < _MAX_PAIRS and took < _OVERLAP_SHARE * budget_s):
        alone, both = max_over_ranks([_seconds(group, count, burst) for count in (1, 2)])
        pairs.append((alone, both))
        took += burst * (alone + both)
    return overlap_of(pairs)


def overlap_of(pairs: Sequence[tuple[float, float]]) -> float:
    """Returns the share of the latency that two messages share, from pairs of times.

    Args:
        pairs: seconds of one message, and of two at once.
    """
    return min(max(2 - statistics.median(both / alone for alone, both in pairs), 0.0), 1.0)


def _seconds(group: Any, count: int, burst: int) -> float:
    """Returns the seconds of ``count`` small all-reduces that are issued together."""
    requests = [
        [AllReduce(torch.zeros(_SMALL_NUMEL), "sum") for _ in range(count)] for _ in range(burst)
    ]
    AllReduce(torch.zeros(1), "sum").issue(group).wait()  # all ranks begin at the same time
    begin = time.perf_counter()
    for concurrent in requests:
        for work in [request.issue(group) for request in concurrent]:
            work.wait()
    return (time.perf_counter() - begin) / burst


# ---- latency and bandwidth


COLLECTIVES = ("all_reduce", "all_gather", "all_to_all")
Part = Literal["inside", "between", "all"]
# The ranges in which a link is searched, as powers of ten: seconds, and bytes per second.
_LATENCY_RANGE, _BANDWIDTH_RANGE = (-7.0, 0.0), (4.0, 13.0)
_GRID_POINTS, _GRID_REFINEMENTS = 19, 5


@dataclass(frozen=True)
class Layout:
    """Describes the number of ranks, and of ranks per node."""

    ranks: int
    per_node: int


class Timing(NamedTuple):
    """Holds the measured time of a collective.

    Attributes:
        part: the ranks that took part: those of a node, one of each node, or all.
        collective: name of the collective.
        nbytes: bytes that each rank passed to the collective.
        seconds: median over rounds of the slowest rank's time.
        low_s, high_s: first and third quartile of the rounds.
    """

    part: Part
    collective: str
    nbytes: int
    seconds: float
    low_s: float
    high_s: float


def fit_fabric(
    layout: Layout, times: Sequence[Timing], library: Library, *, overlap: float = 0.0
) -> Fabric:
    """Returns the fabric whose modelled times are nearest to the measured ones.

    The distance is the sum of absolute logarithms of ratios: small and large sizes count alike, and
    a few outliers have no influence. The latency between nodes is that of collectives with one rank
    per node. The bandwidth is that of these or of collectives of all ranks, whichever is higher: a
    single rank may not saturate several network cards, and all ranks together may be limited by the
    link inside a node.

    Args:
        layout: number of ranks, and of ranks per node.
        times: the measurements.
        library: the library that carried the messages.
        overlap: share of the latency that concurrent messages share.
    """
    one_node = layout.per_node == layout.ranks
    template = Fabric(
        "measured", Link(0.0, 1.0), library=library, overlap=overlap, source="commhooks link"
    )

    def inside(link: Link) -> Fabric:
        return replace(template, between=link, inside=link, ranks_per_node=layout.per_node)

    if one_node:
        intra_node = _fit_link(layout, times, "inside", inside)
        return replace(inside(intra_node), source=COPIED)
    if layout.per_node == 1:
        link = _fit_link(
            layout, times, "between", lambda candidate: replace(template, between=candidate)
        )
        return replace(template, between=link)
    intra_node = _fit_link(layout, times, "inside", inside)

    def between(link: Link) -> Fabric:
        return replace(template, between=link, inside=intra_node, ranks_per_node=layout.per_node)

    one_rank_per_node = _fit_link(layout, times, "between", between)
    all_ranks = _fit_link(layout, times, "all", between)
    bandwidth = max(one_rank_per_node.bandwidth, all_ranks.bandwidth)
    return between(Link(one_rank_per_node.latency, bandwidth))


def model_seconds(layout: Layout, timing: Timing, fabric: Fabric) -> float:
    """Returns the seconds that the model of ``fabric`` gives for a measured collective."""
    sizes = [timing.nbytes]
    return float(_model_seconds(layout, timing.part, timing.collective, sizes, fabric)[0])


def _model_seconds(
    layout: Layout, part: Part, collective: str, sizes: Sequence[int], fabric: Fabric
) -> np.ndarray:
    ranks, per_node = layout.ranks, layout.per_node
    if part == "inside":
        return collective_seconds(collective, sizes, ranks=per_node, fabric=fabric)
    leaders = range(0, ranks, per_node) if part == "between" and per_node > 1 else None
    return collective_seconds(
        collective, sizes, ranks=ranks, fabric=fabric, part=leaders, alone=True
    )


def _fit_link(
    layout: Layout, times: Sequence[Timing], part: Part, fabric_of: Callable[[Link], Fabric]
) -> Link:
    """Returns the link that fits the times of a part best; the slowest if several fit equally."""
    groups = []
    for collective in COLLECTIVES:
        chosen = [
            timing for timing in times if (timing.part, timing.collective) == (part, collective)
        ]
        if chosen:
            seconds = np.array([timing.seconds for timing in chosen])
            groups.append((collective, [timing.nbytes for timing in chosen], np.log(seconds)))

    def distance(latency: float, bandwidth: float) -> float:
        fabric = fabric_of(Link(10.0**latency, 10.0**bandwidth))
        return sum(
            float(np.abs(np.log(_model_seconds(layout, part, name, sizes, fabric)) - logs).sum())
            for name, sizes, logs in groups
        )

    # A grid search, refined around its best point: the model switches algorithms by size, so its
    # times cannot be differentiated.
    latencies, bandwidths = (
        np.linspace(*_LATENCY_RANGE, _GRID_POINTS),
        np.linspace(*_BANDWIDTH_RANGE, _GRID_POINTS),
    )
    best = math.inf, 0.0, 0.0
    for _ in range(_GRID_REFINEMENTS):
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
_MAX_GATHERED_NBYTES = 2**30  # an all-gather's result has the bytes of all ranks
# Small messages are repeated for about this many seconds per measurement: a single one would
# measure how far apart the ranks leave the barrier before it.
_BURST_S, _BURST = 2e-3, 20
_MIN_ROUNDS, _MAX_ROUNDS = 3, 15
# Sizes grow until the largest message takes this many times as long as the smallest: only then does
# it show the bandwidth. For that the budget may be exceeded, by up to the second factor.
_SHOWS_BANDWIDTH, _MAX_OVER_BUDGET = 3.0, 2.0
_numbers = itertools.count()  # numbers the measurements of this process, equally on all ranks


@dataclass(frozen=True)
class LinkReport:
    """Holds a measured fabric and the measurements.

    Attributes:
        fabric: the fit.
        layout: number of ranks, and of ranks per node.
        times: measured times by part of the ranks, collective and size.
        device: "cpu" or "cuda".
        rounds: number of times that each collective was measured.
        seconds: duration of the whole measurement.
    """

    fabric: Fabric
    layout: Layout
    times: tuple[Timing, ...]
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
        return {
            **about,
            "rounds": self.rounds,
            "times": [timing._asdict() for timing in self.times],
        }

    @property
    def fit_error(self) -> float:
        """Returns the median factor between modelled and measured times; 1 is perfect."""
        pairs = [
            (model_seconds(self.layout, timing, self.fabric), timing.seconds)
            for timing in self.times
        ]
        return statistics.median(max(pair) / min(pair) for pair in pairs)


def measure_link(
    group: dist.ProcessGroup | None = None,
    *,
    budget_s: float = 10.0,
    device: Literal["cpu", "cuda"] | None = None,
    timeout_s: float = 120.0,
) -> Fabric:
    """Measures the fabric between the ranks of a group; all ranks call it, between two steps.

    The measurement makes its own process groups on the same backend: the order of collectives in
    the job's groups does not change.

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
    progress: Callable[[float], None] = lambda seconds: None,
) -> LinkReport:
    """Measures as :func:`measure_link`, and returns the measurements as well.

    Args:
        group, budget_s, device, timeout_s: see there.
        progress: called after each round with the seconds so far.
    """
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
        return _Measurement(whole, _device(whole, device), budget_s, timeout_s).run(progress)
    except RuntimeError as error:
        if isinstance(error, MissingRankError):
            raise
        raise MissingRankError(
            f"measure_link: a rank did not come within {timeout_s:g} s, or ended; all ranks of "
            f"the group call it, between two steps: {error}"
        ) from error


def _device(group: dist.ProcessGroup, name: str | None) -> torch.device:
    cuda = torch.device("cuda")
    has_nccl = torch.cuda.is_available() and not is_gloo(backend_for(group, cuda))
    if name is None:
        name = "cuda" if has_nccl and backend_for(group, cuda) is not None else "cpu"
    if name == "cuda" and not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise ValueError("measure_link(device='cuda'): there is no GPU here, or no NCCL")
    return torch.device(name)


class _PartGroup(NamedTuple):
    """Holds the process group of a part of the ranks; None if this rank is not in the part."""

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
        self._node = self._node_of_each_rank(dist.get_rank())
        per_node = max(self._node.count(node) for node in self._node)
        self._layout = Layout(self._size, min(per_node, self._size))
        self._parts = self._make_parts()

    def run(self, progress: Callable[[float], None]) -> LinkReport:
        everyone = self._parts[-1].group
        # Measure in rounds, until the budget is used.
        cases, bursts = self._choose_sizes()
        rounds: list[list[float]] = []
        took = 0.0
        while len(rounds) < _MIN_ROUNDS or (
            len(rounds) < _MAX_ROUNDS and took * (1 + 1 / len(rounds)) < self._budget
        ):
            local_seconds = [
                self._seconds(case, burst) for case, burst in zip(cases, bursts, strict=True)
            ]
            *agreed, took = self._max_over_ranks(
                [*local_seconds, time.perf_counter() - self._begin]
            )
            rounds.append(agreed)
            progress(took)
        # Fit the model.
        times = [_timing(self._parts[case.part].part, case, [seconds[index] for seconds in rounds])
                 for index, case in enumerate(cases)]  # fmt: skip
        if self._device.type == "cpu":
            overlap = measure_overlap(everyone, self._max_over_ranks, self._budget)
            fit = fit_fabric(self._layout, times, "gloo", overlap=overlap)
        else:
            fit = fit_fabric(self._layout, times, "nccl")
        # All ranks take rank 0's fit: two processors may round differently.
        links = [link and [link.latency, link.bandwidth] for link in (fit.between, fit.inside)]
        if self._rank == 0:
            self._store.set("fit", json.dumps(links))
        between, inside = json.loads(self._store.get("fit"))
        fit = replace(
            fit,
            between=Link(*between),
            inside=inside and Link(*inside),
            cpu_s_per_byte=self._cpu_s_per_byte(cases),
        )
        # Close the groups.
        seconds = time.perf_counter() - self._begin
        # No rank leaves before all have the fit.
        AllReduce(self._zeros(4), "sum").issue(everyone).wait()
        for part in self._parts:
            if part.group is not None:
                part.group.shutdown()
        return LinkReport(fit, self._layout, tuple(times), self._device.type, len(rounds), seconds)

    # ---- ranks

    def _node_of_each_rank(self, global_rank: int) -> list[str]:
        """Returns the node of each rank, by torchrun's number of ranks per node."""
        local = os.environ.get("LOCAL_WORLD_SIZE")
        node = socket.gethostname() if local is None else f"node {global_rank // int(local)}"
        self._store.set(f"node of {self._rank}", node)
        return [self._store.get(f"node of {rank}") for rank in range(self._size)]

    def _make_parts(self) -> list[_PartGroup]:
        """Returns the parts that are measured; the last part has all ranks."""
        everyone = list(range(self._size))
        same_node = [rank for rank in everyone if self._node[rank] == self._node[self._rank]]
        leaders = [self._node.index(node) for node in dict.fromkeys(self._node)]
        if len(leaders) == 1:
            return [self._make_part("inside", everyone, "all")]
        if len(leaders) == self._size:
            return [self._make_part("between", everyone, "all")]
        return [
            self._make_part("inside", same_node, f"inside {self._node[self._rank]}"),
            self._make_part("between", leaders, "between"),
            self._make_part("all", everyone, "all"),
        ]

    def _make_part(self, part: Part, ranks: list[int], name: str) -> _PartGroup:
        if self._rank not in ranks or len(ranks) < 2:
            return _PartGroup(part, len(ranks), None)
        arguments = (ranks.index(self._rank), len(ranks), f"commhooks/link/{name}")
        timeout = timedelta(seconds=self._timeout_s)
        # One second more than the backend's own timeout, whose error names the missing rank.
        group = self._store.store.call(
            lambda store: private_group(store, *arguments, self._device, timeout),
            self._timeout_s + 1,
        )
        return _PartGroup(part, len(ranks), group)

    def _max_over_ranks(self, values: Sequence[float]) -> list[float]:
        """Returns the largest of all ranks' values, position by position."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self._device)
        AllReduce(tensor, "max").issue(self._parts[-1].group).wait()
        return [float(value) for value in tensor.tolist()]

    # ---- times

    def _choose_sizes(self) -> tuple[list[Case], list[int]]:
        """Measures once, from small to large, and chooses the sizes that fit into the budget.

        Returns the cases to measure, and how often to repeat each in a row. These first times are
        not part of the result: the first message of a kind opens connections and allocates memory.
        """
        by_nbytes: dict[int, SizeTrial] = {}
        rounds = _MIN_ROUNDS + 1
        # Every second size first: up to 16 times as long as the one before, here and in each round.
        for nbytes in _SIZES[::2]:
            size = by_nbytes[nbytes] = self._try_size(nbytes)
            seconds = sum(size.seconds)
            cost = sum(measured.cost for measured in by_nbytes.values()) + 16 * seconds
            fits = size.elapsed_s + 16 * seconds + rounds * cost <= self._budget
            # Sizes at which only the latency shows would leave the bandwidth unknown.
            shows_bandwidth = seconds >= _SHOWS_BANDWIDTH * sum(by_nbytes[_SIZES[0]].seconds)
            if not fits and (shows_bandwidth or size.elapsed_s > _MAX_OVER_BUDGET * self._budget):
                break
        for before, nbytes in zip(_SIZES[::2], _SIZES[1::2], strict=False):
            known = list(by_nbytes.values())
            if before not in by_nbytes:
                break
            cost = sum(measured.cost for measured in known) + 4 * by_nbytes[before].cost
            if known[-1].elapsed_s + 4 * by_nbytes[before].cost + rounds * cost > self._budget:
                break
            by_nbytes[nbytes] = self._try_size(nbytes)
        sizes = [by_nbytes[nbytes] for nbytes in sorted(by_nbytes)]
        cases = [case for size in sizes for case in size.cases]
        return cases, [burst for size in sizes for burst in size.bursts]

    def _try_size(self, nbytes: int) -> SizeTrial:
        """Measures all collectives of one size once, to choose the sizes."""
        cases = [
            Case(part, collective, nbytes)
            for part, group_part in enumerate(self._parts)
            for collective in COLLECTIVES
            if collective != "all_gather" or nbytes * group_part.size <= _MAX_GATHERED_NBYTES
        ]
        *seconds, elapsed_s = self._max_over_ranks(
            [*(self._seconds(case, 1) for case in cases), time.perf_counter() - self._begin]
        )
        bursts = [
            max(1, min(_BURST, round(_BURST_S / max(duration, 1e-9)))) for duration in seconds
        ]
        return SizeTrial(cases, bursts, seconds, elapsed_s)

    def _seconds(self, case: Case, burst: int) -> float:
        """Returns the mean seconds of a collective in a burst; 0 on a rank that takes no part."""
        part = self._parts[case.part]
        if part.group is None:
            return 0.0
        make_request = MAKE_REQUEST[case.collective]
        requests = [make_request(self._zeros(case.nbytes), part.size) for _ in range(burst)]
        AllReduce(self._zeros(4), "sum").issue(part.group).wait()  # all begin at the same time
        self._synchronize()
        begin = time.perf_counter()
        for request in requests:
            request.issue(part.group).wait()
        self._synchronize()
        return (time.perf_counter() - begin) / burst

    def _cpu_s_per_byte(self, cases: Sequence[Case]) -> float:
        """Returns the processor time per byte that a rank sends, or 0."""
        if self._device.type != "cpu":
            return 0.0
        nbytes = min(max(case.nbytes for case in cases), 2**22)
        request = AllReduce(self._zeros(nbytes), "sum")
        per_byte = []
        for _ in range(3):
            begin = time.process_time()
            request.issue(self._parts[-1].group).wait()
            per_byte.append((time.process_time() - begin) / request.wire_nbytes(self._size))
        return self._max_over_ranks([statistics.median(per_byte)])[0]

    def _zeros(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes // 4, device=self._device)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def _timing(part: Part, case: Case, seconds: Sequence[float]) -> Timing:
    low, _, high = statistics.quantiles(seconds, n=4)
    return Timing(part, case.collective, case.nbytes, statistics.median(seconds), low, high)
