"""Runs a model's steps with four variants of communication in turn, and times them."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commhooks.core._bucket import Bucket, Result, SchemeExchange
from commhooks.core._scheme import Scheme
from commhooks.core._traits import Traits
from commhooks.errors import RegistrationError
from commhooks.hook import HookState, register
from commhooks.wrappers import Schedule
from commhooks.wrappers._make import make
from ddp_core import AllReduce
from ddp_core.exchange._shared_store import PrefixedStore, group_timeout_s

__all__ = [
    "BLOCK",
    "LEAST_STEPS",
    "VARIANTS",
    "WARM_UP",
    "BucketTransfer",
    "Facts",
    "InterleavedRun",
    "ScalarAllReduce",
    "most_counted",
    "steps_needed",
]

# Dense; the baseline of every comparison; one value per bucket, which is what no compression goes
# below; nothing at all.
VARIANTS = ("none", "bf16", "one", "noop")
# Steps before the first turn: buckets are rebuilt after the first, and allocators fill. They are
# dense, and the ledger records the times of these ten on a GPU, too.
WARM_UP = 10
LEAST_STEPS = 10  # of each variant that count: with fewer, noise is not known
# Steps of one kind in a row. The first does not count: without communication ranks drift apart in
# time, and the step after waits for the slowest.
BLOCK = 6
_TURN = len(VARIANTS) * BLOCK
_SETTLED = 3  # steps after which buckets are what they will be
_MEETING = 120.0  # seconds, of ranks that end the same step
_numbers = itertools.count()  # of the measurements in this process, equal on all ranks


def steps_needed(counted: int) -> int:
    """Returns how many steps a script begins until ``counted`` of each variant are known.

    The last one begins when the measurement ends, and gives the step before its time.
    """
    return WARM_UP + math.ceil(counted / (BLOCK - 1)) * _TURN + 1


def most_counted(steps: int) -> int:
    """Returns the most steps of each variant that a script of ``steps`` steps can count."""
    return max(steps - 1 - WARM_UP, 0) // _TURN * (BLOCK - 1)


@dataclass(frozen=True)
class Facts:
    """Describes a job.

    Attributes:
        world_size: number of ranks.
        backend: backend of the process group.
        device: "cpu" or the name of the GPU.
        dense_nbytes: bytes of all gradients.
        buckets: number of buckets of a step.
        turns: number of turns of each variant.
    """

    world_size: int
    backend: str
    device: str
    dense_nbytes: int
    buckets: int
    turns: int


class BucketTransfer(NamedTuple):
    """Describes when a bucket is sent, and for how long.

    Attributes:
        ready_s: begin of the transfer, relative to the begin of the last one: 0 or less.
        dense_s: duration of the transfer.
        fixed_s: duration of the transfer of one value in its place.
    """

    ready_s: float
    dense_s: float
    fixed_s: float


@dataclass(frozen=True)
class ScalarAllReduce(Scheme):
    """Exchanges one value of a bucket, and returns the local gradient."""

    traits = Traits(rounds=1, returns="local")

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        yield AllReduce(bucket.gradient[:1].clone())
        return Result(bucket.gradient)


class InterleavedRun:
    """Measures the steps of one model; all ranks call ``step_begins`` in the same steps.

    The model gets a hook whose scheme depends on the step: ranks change it without messages.

    Args:
        ddp: the model; it has no hook.
        steps: number of steps of each variant that count.
        deadline: a time of ``time.time()`` before which rank 0 ends the measurement, after a whole
            turn. None: all turns run.
    """

    def __init__(
        self, ddp: DistributedDataParallel, steps: int, *, deadline: float | None = None
    ) -> None:
        self._wanted = math.ceil(steps / (BLOCK - 1))
        self._deadline, self._ended = deadline, False
        self._hook = register(ddp, _schedule(self._wanted))
        # On a GPU times cost a little: the last step of each block suffices.
        self._hook.ledger.further_timed_steps = lambda step: (step - WARM_UP) % BLOCK == BLOCK - 1
        self._hook.fixed_group_reason = (
            "its steps are being measured (headroom); change the ranks after that"
        )
        self._group = ddp.process_group
        limit = min(_MEETING, group_timeout_s(self._group))
        self._store = PrefixedStore(self._group, "headroom", next(_numbers), limit)
        self._cuda = ddp.device_type == "cuda" if hasattr(ddp, "device_type") else False
        self._marks: list[Any] = []
        self._turns = 0

    @property
    def step(self) -> int:
        """Returns the number of synchronised backward passes so far."""
        return self._hook.step

    @property
    def turns(self) -> int:
        """Returns how many turns each variant has."""
        return self._turns

    @property
    def turns_to_come(self) -> int:
        """Returns how many turns of each variant are still to run."""
        return self._wanted - self._turns

    @property
    def warms_up(self) -> bool:
        """Whether the steps are those before the first turn."""
        return self.step < WARM_UP

    @property
    def steps_to_come(self) -> int:
        """Returns the number of steps until all turns have run."""
        return WARM_UP + self._wanted * len(VARIANTS) * BLOCK - self.step

    def step_begins(self) -> bool:
        """Marks the begin of a step, before its first forward pass; returns whether all have run.

        Further forward passes of a step are not marked.
        """
        step = self._hook.step
        if self._ended or step < len(self._marks):
            return self._ended
        # Steps that no forward pass began (a second backward pass) have no time of their own.
        self._marks += [None] * (step - len(self._marks))
        self._marks.append(_now(self._cuda))
        turns, within = divmod(step - WARM_UP, len(VARIANTS) * BLOCK)
        if within == 0 and turns > self._turns:
            self._turns = turns
            self._ended = turns >= self._wanted or self._past(turns)
        return self._ended

    def _past(self, turns: int) -> bool:
        """Whether rank 0 expects the next turn to end after the deadline."""
        if self._deadline is None:
            return False
        key = f"continues after {turns}"
        if self._hook.rank == 0:
            # The next turn takes as long as this one.
            seconds = _seconds(self._marks[-1 - len(VARIANTS) * BLOCK], self._marks[-1])
            self._store.set(key, "no" if time.time() + seconds > self._deadline else "yes")
        return self._store.get(key) == "no"

    def results(self) -> tuple[list[dict[str, list[float]]], Facts, list[BucketTransfer]]:
        """Returns step times by turn and variant, facts, and bucket transfers; on all ranks.

        The duration of a step is that of its slowest rank.

        Raises:
            RegistrationError: no round has ended, or steps have no time of their own.
        """
        if not self._turns:
            raise RegistrationError("headroom: no round has ended, so there is nothing to compare")
        if self._cuda:
            torch.cuda.synchronize()
        local_seconds = [_seconds(begin, end) for begin, end in itertools.pairwise(self._marks)]
        rank, size = self._hook.rank, self._hook.world_size
        travel, dense_nbytes = _travel(self._hook)
        self._store.set(f"times of {rank}", json.dumps([local_seconds, travel]))
        if rank == 0:
            everyone = [json.loads(self._store.get(f"times of {number}")) for number in range(size)]
            slowest = [
                max(step) for step in zip(*(seconds[0] for seconds in everyone), strict=True)
            ]
            travels = [
                [BucketTransfer(*fields) for fields in transfers] for _, transfers in everyone
            ]
            self._store.set("result", json.dumps([slowest, _of_all(travels)]))
        slowest, agreed = json.loads(self._store.get("result"))
        facts = Facts(
            world_size=size,
            backend=dist.get_backend(self._group),
            device=torch.cuda.get_device_name() if self._cuda else "cpu",
            dense_nbytes=dense_nbytes,
            buckets=len(agreed),
            turns=self._turns,
        )
        return _by_turn(slowest, self._turns), facts, [BucketTransfer(*fields) for fields in agreed]

    def leave(self) -> None:
        """Returns when all ranks have called it, rank 0 last: its process may hold the store."""
        rank, size = self._hook.rank, self._hook.world_size
        self._hook.close()
        self._store.set(f"rank {rank} parts", "")
        for number in range(size) if rank == 0 else ():
            self._store.get(f"rank {number} parts")


def _schedule(turns: int) -> Scheme:
    # Dense before and after: who trains on after ``headroom`` gets averages.
    parts: list[tuple[int, Scheme]] = [(0, make("none"))]
    for block in range(turns * len(VARIANTS)):
        kind = VARIANTS[block % len(VARIANTS)]
        scheme = ScalarAllReduce() if kind == "one" else make(kind)
        parts.append((WARM_UP + block * BLOCK, scheme))
    parts.append((WARM_UP + turns * len(VARIANTS) * BLOCK, make("none")))
    return Schedule(parts)


def _by_turn(seconds: Sequence[float], turns: int) -> list[dict[str, list[float]]]:
    """Sorts step times by turn and variant; drops the first step of each block.

    Raises:
        RegistrationError: a block has no step with a time.
    """
    by_turn: list[dict[str, list[float]]] = []
    for turn in range(turns):
        by_turn.append({})
        for place, kind in enumerate(VARIANTS):
            begin = WARM_UP + (turn * len(VARIANTS) + place) * BLOCK
            known = [s for s in seconds[begin + 1 : begin + BLOCK] if not math.isnan(s)]
            if not known:
                raise RegistrationError(
                    "headroom: steps have no time of their own, since no forward pass through the "
                    "DistributedDataParallel began them"
                )
            by_turn[-1][kind] = known
    return by_turn


def _travel(hook: HookState) -> tuple[list[BucketTransfer], int]:
    """Returns the bucket transfers of this rank, and the bytes of all gradients.

    Buckets travel one after the other: a bucket that waits for the previous one is not under way.
    """
    begun: dict[int, list[float]] = {}
    seconds: dict[tuple[int, str], list[float]] = {}  # by bucket and kind
    nbytes: dict[int, int] = {}
    for step, rows in hook.ledger.rows_by_step().items():
        if step < _SETTLED or math.isnan(sum(row.resumed + row.issued + row.done for row in rows)):
            continue  # the buckets of the first steps; times of a GPU that were not recorded
        last, free, kind = max(row.resumed for row in rows), -math.inf, _kind(step)
        for row in sorted(rows, key=lambda row: row.issued):
            if kind == "none":
                begun.setdefault(row.bucket, []).append(row.resumed - last)
            took = max(row.done - max(row.issued, free), 0.0)
            seconds.setdefault((row.bucket, kind), []).append(took)
            nbytes[row.bucket] = row.dense_bytes
            free = max(free, row.done)
    travels = [
        BucketTransfer(
            statistics.median(begun[bucket]),
            _lower(seconds[bucket, "none"]),
            _lower(seconds.get((bucket, "one"), [0.0])),
        )
        for bucket in sorted(begun)
    ]
    return travels, sum(nbytes[bucket] for bucket in begun)


def _kind(step: int) -> str:
    """Returns the variant of communication in a step."""
    return "none" if step < WARM_UP else VARIANTS[(step - WARM_UP) // BLOCK % len(VARIANTS)]


def _lower(seconds: Sequence[float]) -> float:
    """Returns the lower quartile: longer times include waiting for another rank."""
    return statistics.quantiles(seconds, n=4)[0] if len(seconds) > 1 else seconds[0]


def _of_all(travels: Sequence[Sequence[BucketTransfer]]) -> list[BucketTransfer]:
    """Returns each bucket's transfer from the rank that waited least; rank 0 gives the begin."""
    return [
        BucketTransfer(
            ranks[0].ready_s,
            min(travel.dense_s for travel in ranks),
            min(travel.fixed_s for travel in ranks),
        )
        for ranks in zip(*travels, strict=False)
    ]


def _now(cuda: bool) -> Any:
    """Returns the present time of the GPU's current stream, or of the host."""
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(begin: Any, end: Any) -> float:
    """Returns the seconds between two times; NaN if one is missing."""
    if begin is None or end is None:
        return math.nan
    if isinstance(begin, float):
        return float(end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
