"""Runs a scheme over the buckets of each step, for one rank, and commits memory per step.

Knows no process group and no DDP, so that simulated ranks and real ranks share it.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from commhooks.checkpoint._placement import ShardSpec
from commhooks.core._bucket import Bucket, Result, SchemeExchange
from commhooks.core._dense import Dense
from commhooks.core._layout import Layout, Span
from commhooks.core._memory import Memory
from commhooks.core._names import is_padding, parameter_name
from commhooks.core._scheme import Scheme, checked_result, slots_of, walk
from commhooks.core._settings import check_seed
from commhooks.core._slot import Counters, StepInfo
from commhooks.core._traits import Exact
from commhooks.errors import SchemeError
from commhooks.hook._parameters import Parameters
from commhooks.kernels import all_finite
from commhooks.kernels.runtime.op import current_mode
from commhooks.verify._measure import Measurement, Observer, ShardMeasurement
from commhooks.wrappers._feedback import unwrap_flush, with_flush
from commhooks.wrappers._guard import Guard
from commhooks.wrappers._parts import join_parts, parts_of
from ddp_core import AllReduce, Exchange
from ddp_core._torch import sparse_values

__all__ = ["Engine", "ExactParameters", "replicated_parameters"]


# ---- parameters that no scheme may round


def replicated_parameters(scheme: Scheme, parameters: Parameters) -> frozenset[str]:
    """Returns the names of parameters that tensor-parallel ranks replicate and the scheme rounds.

    A parameter is replicated if it is not cut between ranks between which another one is. With two
    dimensions of tensor parallelism that includes parameters that are cut along one of them.
    """
    cuts = parameters.cuts
    every = frozenset().union(*(cut.shard_groups for cut in cuts.values()))
    if not every or _rounds_alone(unwrap_flush(scheme)):
        return frozenset()
    return frozenset(
        name
        for name in parameters.shapes
        if not is_padding(name)
        and cuts.get(parameter_name(name), ShardSpec()).shard_groups != every
    )


def _rounds_alone(scheme: Scheme) -> bool:
    """Whether a scheme rounds every entry independently of the others, and equal entries equally.

    Asks all schemes inside: wrappers with feedback, and those around them, count as exact.
    """
    for inside in walk(scheme):
        traits = inside.traits
        if not isinstance(traits.error, Exact):
            return False
        # Random draws are numbered by entry, and pieces may differ in size. A guard judges buckets.
        if getattr(inside, "stochastic", False) or isinstance(inside, Guard):
            return False
        # Updates are no rounded means, whatever their traits say; gossip sums in full precision.
        if traits.returns == "update" and traits.agrees:
            return False
    return True


class ExactParameters:
    """Averages replicated parameters without compression, and the others by a scheme.

    The exact ones travel in a message of their own. In one with the others, whose sizes may differ
    between ranks of tensor parallelism, their sums could be in another order and have other bits.

    Args:
        names: names of the replicated parameters, as in the layouts of buckets.

    Attributes:
        rounds: number of collectives per bucket besides those of the scheme.
    """

    def __init__(self, names: Collection[str] = ()) -> None:
        self._names = frozenset(names)
        self.rounds = int(bool(names))
        self._positions: dict[Layout, tuple[list[int], list[int]]] = {}

    def exchange(self, scheme: Scheme, bucket: Bucket) -> SchemeExchange:
        """Exchanges a bucket in two parts: exact parameters, and the others by ``scheme``."""
        exact, compressed = self._split(bucket.layout)
        dense = with_flush(Dense())  # sends what another scheme has kept of them
        if not exact or not compressed:
            return (yield from (dense if exact else scheme).exchange(bucket))
        parts = parts_of(bucket, [(dense, exact), (scheme, compressed)])
        for part in parts:
            part.result = yield from part.exchange
        return join_parts(parts, bucket)

    def _split(self, layout: Layout) -> tuple[list[int], list[int]]:
        """Returns the positions of the exact parameters, and of the others."""
        if layout not in self._positions:
            exact: list[int] = []
            compressed: list[int] = []
            for position, name in enumerate(layout.names):
                (exact if name in self._names else compressed).append(position)
            self._positions[layout] = exact, compressed
        return self._positions[layout]


# ---- one rank


@dataclass(eq=False)
class _Step:
    """Holds the facts of a step under way."""

    memory: Memory
    launched: set[Hashable] = field(default_factory=set)
    finished: int = 0
    closed: bool = False
    failed: bool = False
    finite: list[Tensor] = field(default_factory=list)
    sharded: bool = False  # some flags are of this rank's shards, so ranks may differ
    counters: Counters = field(default_factory=dict)
    unused: Collection[str] = ()
    measured: list[Measurement] = field(default_factory=list)


class Engine:
    """Runs one rank's scheme, and holds its memory and step counter.

    A step is one synchronised backward pass. It opens with its first bucket, is closed by ``end``
    (or by a bucket with ``is_last``), and is over when the exchange of its last bucket is. Then
    memory is committed if every bucket arrived finite on every rank.
    """

    def __init__(self, scheme: Scheme, *, rank: int, world_size: int, seed: int = 0) -> None:
        current_mode()  # raises now, rather than in a step, or never if no op runs
        self.memory = Memory()  # before the scheme, which says what may be kept in it
        self.scheme, self.rank, self.world_size = scheme, rank, world_size
        self.seed = check_seed(seed)
        self.step = self.skipped = 0  # skipped: number of steps whose writes were dropped
        self.observer: Observer | None = None
        self.outer: Engine | None = None  # averages the means of this one further
        self.records_finite = False  # for an engine that averages before this one
        self.counts = True  # steps that are not finite, where no memory depends on that
        self.exactly = ExactParameters()  # the parameters that no scheme may round
        self._lock = threading.Lock()  # backward's thread ends steps, the lanes' finishes exchanges
        self._open: _Step | None = None

    @property
    def scheme(self) -> Scheme:
        """Returns the scheme that runs; it is replaced between steps only."""
        return self._scheme

    @scheme.setter
    def scheme(self, scheme: Scheme) -> None:
        # Used for every bucket, and computed from all wrappers: kept.
        self._scheme, self.traits = scheme, scheme.traits
        self._averages = self.traits.averages
        slots = slots_of(scheme)
        self.keeps_memory = bool(slots)
        self.memory.declared = frozenset(slot.key for slot in slots)

    def at(self, step: int) -> Engine:
        """Returns an engine for one step of parameters that no other engine has at that time."""
        engine = copy.copy(self)
        engine.step, engine.skipped, engine.observer = step, 0, None
        engine._lock, engine._open = threading.Lock(), None
        return engine

    @property
    def under_way(self) -> bool:
        """Whether a step has begun and is not over."""
        return self._open is not None

    def begin_bucket(self, bucket: Hashable, *, is_last: bool = False) -> None:
        """Counts a bucket, before its exchange starts.

        A bucket that was launched in this step already, or that comes after the last bucket,
        belongs to the next step: the open step was aborted.

        Args:
            bucket: the bucket's number, or another key that is different for each bucket of a step.
            is_last: closes the step.
        """
        with self._lock:
            step = self._open
            if step is None or step.closed or bucket in step.launched:
                # A staging area per step: exchanges of an aborted step may still run and write.
                step = self._open = _Step(self.memory.for_step())
            step.launched.add(bucket)
            step.closed = is_last

    def end(self, unused: Collection[str] = ()) -> None:
        """Closes the open step: all buckets have come, and the averages are in ``.grad``.

        Args:
            unused: names of parameters whose gradient was not replaced by the average, since
                no rank has used them; their memory stays as it was.
        """
        with self._lock:
            step = self._open
            if step is None:
                return
            step.closed, step.unused = True, unused
            over = self._settle(step)
        if over:
            _report_step(self, step)

    def abort(self) -> None:
        """Drops the open step and all its writes, after its backward pass raised."""
        with self._lock:
            self._open = None

    def bucket(
        self,
        gradient: Tensor,
        layout: Layout | Callable[[], Layout],
        shards: Sequence[Span] | None = None,
        output: Tensor | None = None,
    ) -> Bucket:
        """Returns the ``Bucket`` that a scheme gets in the current step."""
        step = self._open
        bucket = Bucket(
            gradient,
            layout,
            memory=self.memory if step is None else step.memory,
            step=self.step,
            rank=self.rank,
            world_size=self.world_size,
            seed=self.seed,
            shards=shards,
            output=output,
        )
        if step is not None:
            bucket.counters = step.counters
        return bucket

    def step_info(self, dtype: torch.dtype, step: int) -> StepInfo:
        """Returns the facts of a step for initial values of parameters of ``dtype``."""
        return StepInfo(
            memory=self.memory,
            step=step,
            rank=self.rank,
            world_size=self.world_size,
            seed=self.seed,
            dtype=dtype,
        )

    def exchange(
        self,
        grad: Tensor,
        find_layout: Layout | Callable[[], Layout],
        number: int = 0,
        *,
        shards: Sequence[Span] | None = None,
        output: Tensor | None = None,
        agree: bool = False,
        run: Callable[[Bucket], SchemeExchange] | None = None,
    ) -> Exchange:
        """Exchanges one launched bucket and returns the tensor that replaces ``grad``.

        Args:
            number: number of the bucket, for reports.
            shards: begin and end of the entries whose mean each rank needs; None: all of them.
            output: may take the result; by default the gradient's own memory.
            run: exchanges the bucket; by default the scheme's ``exchange``.
            agree: agrees on whether the bucket is finite, in a round of its own, since no call of
                :meth:`agreement` follows.
        """
        # A generator: this runs when the driver asks for the first collective.
        step, finite = self._open, None
        assert step is not None, "begin_bucket comes before"
        try:
            # What a scheme takes goes to the scheme; other gradients are averaged uncompressed.
            if grad.is_sparse:
                mean = yield from _exchange_sparse(grad, self._scheme)
                values = sparse_values(mean)
            elif run is None and not grad.is_floating_point():
                mean = yield from _exchange_complex(grad, self._scheme)
                values = torch.view_as_real(mean)
            else:
                bucket = self.bucket(grad, find_layout, shards, output)
                measurement = None
                if self.observer is not None:
                    measurement = _measure(self, self.observer, step, number, bucket)
                if run is None:
                    run = self._scheme.exchange
                    # Else the layout, which most schemes never need, is not looked up.
                    if self.exactly.rounds:
                        run = partial(self.exactly.exchange, self._scheme)
                result = yield from run(bucket)
                mean = values = _checked(self._scheme, result, bucket.output)
                finite = result.finite
                if measurement is not None:
                    measurement.finish(mean, step.memory)

            # Note whether the mean is finite, which decides what the step commits.
            if self.checks_finite(values):
                # The mean has the same bits on every rank, so the verdict needs no message.
                step.finite.append(all_finite(values) if finite is None else finite)
                step.sharded |= shards is not None
                if agree and step.sharded:
                    yield from _agree_on_finite(step)
            return mean
        except BaseException:  # also GeneratorExit, with which a driver closes an exchange
            step.failed = True
            raise
        finally:
            self._finish(step)

    def checks_finite(self, mean: Tensor) -> bool:
        """Whether a mean is checked for NaN and infinity: for memory, or for the skipped steps."""
        if self.keeps_memory or self.records_finite:
            return True
        is_wide = mean.is_floating_point() and mean.element_size() > 1
        return is_wide and self.counts and self._averages and mean.is_cpu

    @property
    def needs_agreement(self) -> bool:
        """Whether the ranks, which have shards, have to agree on whether the step was finite."""
        return self._open is not None and self._open.sharded

    @property
    def has_verdict(self) -> bool:
        """Whether means of the open step were checked, on every rank alike."""
        return self._open is not None and bool(self._open.finite)

    def agreement(self) -> Exchange:
        """Agrees by one all-reduce on whether the open step was finite, before ``end`` commits."""
        step = self._open
        assert step is not None, "a step is open"
        return (yield from _agree_on_finite(step, self.outer))

    def _finish(self, step: _Step) -> None:
        over = False
        with self._lock:
            step.finished += 1
            if step is self._open:  # an aborted step commits nothing
                over = self._settle(step)
        if over:
            _report_step(self, step)

    def _settle(self, step: _Step) -> bool:
        """Commits the step if it is closed and all its exchanges are over, and says whether."""
        if not step.closed or step.finished < len(step.launched):
            return False
        if step.finite and not step.failed:
            self.skipped += _commit(step)
        self.step += 1
        self._open = None
        return True


def _checked(scheme: Scheme, result: Result, grad: Tensor) -> Tensor:
    """Returns the mean in the gradient's shape and dtype, or raises SchemeError."""
    mean = checked_result(scheme, result).mean
    if mean.numel() != grad.numel():
        raise SchemeError(
            f"{type(scheme).__name__}.exchange: the bucket has {grad.numel()} entries, "
            f"the mean has shape {tuple(mean.shape)}"
        )
    if mean.dtype != grad.dtype or mean.shape != grad.shape:
        return grad.copy_(mean.view(grad.shape))
    return mean


def _agree_on_finite(step: _Step, outer: Engine | None = None) -> Exchange:
    if outer is not None and outer._open is not None:
        # Gradients are finite where the means of the hook that has these means are, too.
        step.finite += outer._open.finite
    good = _verdicts(step.finite)[-1]
    worst = yield AllReduce((~good).to(torch.float32).view(1), "max")
    step.finite, step.sharded = [worst[0] == 0], False
    return worst


def _measure(
    engine: Engine, observer: Observer, step: _Step, number: int, bucket: Bucket
) -> Measurement | None:
    """Begins to measure a bucket, if an observer wants that."""
    if not observer.wants(engine.step, engine.scheme):
        return None
    arguments = (number, bucket.layout, bucket.raw, engine.scheme, engine.step)
    measurement = (
        Measurement(*arguments)
        if bucket.shards is None
        else ShardMeasurement(*arguments, bucket.shards, engine.rank)
    )
    # In the order of launches, which is the same on all ranks; exchanges may end in another.
    step.measured.append(measurement)
    return measurement


def _report_step(engine: Engine, step: _Step) -> None:
    if engine.observer is not None and step.measured and not step.failed:
        engine.observer.on_step_end(engine.step - 1, engine.scheme, step.measured)


def _commit(step: _Step) -> int:
    """Commits the memory of a step, if it was finite; returns the number of steps it dropped."""
    goods = _verdicts(step.finite)
    for good in goods:
        part = step.memory if len(goods) == 1 else step.memory.writes_on(good.device)
        part.commit(good, step.unused)
    # On a GPU the count would make the host wait for the device in every step.
    return int(goods[0].device.type == "cpu" and not goods[0].item())


def _verdicts(flags: list[Tensor]) -> list[Tensor]:
    """Returns the verdict of a step on every device that has a flag, the CPU's first."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for flag in flags:
        by_device.setdefault(flag.device, []).append(flag)
    verdicts = [
        group[0] if len(group) == 1 else torch.stack(group).all() for group in by_device.values()
    ]
    if len(verdicts) == 1:
        return verdicts
    # A module on several devices. A copy to the CPU is waited for, since the host decides there.
    devices = sorted(by_device, key=lambda device: (device.type != "cpu", str(device)))
    return [
        torch.stack([good.to(to, non_blocking=to.type != "cpu") for good in verdicts]).all()
        for to in devices
    ]


def _exchange_sparse(grad: Tensor, scheme: Scheme) -> Exchange:
    """Averages a sparse gradient as indices and values, uncompressed."""
    if not scheme.traits.rounds:  # not ``averages``: a schedule with local steps has others, too
        return grad
    result = yield AllReduce(grad)
    return result


def _exchange_complex(grad: Tensor, scheme: Scheme) -> Exchange:
    """Averages a complex gradient as pairs of reals, uncompressed."""
    if not scheme.traits.rounds:
        return grad
    if not grad.is_complex():
        raise SchemeError(f"gradients are floating point or complex, got {grad.dtype}")
    yield AllReduce(torch.view_as_real(grad))  # in place, through the view
    return grad
