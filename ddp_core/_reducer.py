"""The reducer: collects gradients in buckets, launches them in order, waits at the end of backward.

One backward pass, see ``docs/design/reducer.md``:

    arrived(i) ... bucket full -> launch in index order -> (hook or all-reduce) -> future
    end of backward -> wait for each bucket in order -> param.grad
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist

from ddp_core._accumulators import Accumulators, call_after_backward
from ddp_core._errors import CollectiveError
from ddp_core._flat import FlatBucket, empty_sparse
from ddp_core._launch import Launcher, Outcome
from ddp_core._layout import BucketCaps
from ddp_core._parameters import Trained
from ddp_core._plan import BucketPlan
from ddp_core._precision import Precision
from ddp_core._task import clock
from ddp_core._timeline import BucketTimes, StepTimes, Timeline
from ddp_core._unused import UsedMap, twice_error, unused_error

__all__ = ["Reducer", "ReducerSettings"]


@dataclass
class ReducerSettings:
    """How a reducer works; see the arguments of DistributedDataParallel."""

    caps: BucketCaps
    find_unused: bool = False
    static_graph: bool = False
    as_view: bool = False
    skip_unused: bool = False
    dtype: torch.dtype | None = None  # of the buckets; the parameters' own by default


@dataclass(slots=True)
class _Step:
    """The accounting of one synchronised step; the next one has a new one."""

    expecting: bool = False  # gradients are to be reduced
    complete: bool = True  # they have been
    marked: list[int] = field(default_factory=list)  # parameters that count as arrived, in order
    unused: list[int] = field(default_factory=list)  # those that backward does not come to
    unused_marked: bool = False
    calls: list[int] = field(default_factory=list)  # of the hooks (static graph)
    scale: float | None = None  # of gradients that go into a bucket; None: the hook scales
    divisor: int = 0  # not known yet
    launched: int = 0  # buckets
    finished: int = 0  # buckets
    outcomes: list[Outcome] = field(default_factory=list)
    times: StepTimes | None = None


class Reducer:
    """Averages the gradients of one model in backward.

    Args:
        parameters: those that require a gradient, in registration order; the same on all ranks.
        group: ranks to average over.
        precision: exchanges parameters for low-precision ones, if given.
        name: of this reducer, the same on all ranks; distinguishes reducers of one group.
    """

    def __init__(
        self,
        parameters: Sequence[Trained],
        group: dist.ProcessGroup,
        settings: ReducerSettings,
        *,
        precision: Precision | None = None,
        name: str = "",
    ) -> None:
        self.parameters = list(parameters)
        self.group, self.settings, self.precision = group, settings, precision
        self.device = self.parameters[0].parameter.device
        self.timeline = Timeline()
        self.launcher = Launcher(group, name)
        self.plan = BucketPlan(self.parameters, settings.caps, group, self.device)
        self.plan.follows_arrival = settings.static_graph or not settings.find_unused
        self.on_finished: Callable[[FlatBucket], None] | None = None  # optimizer in backward
        self.unused_parameters: list[int] | None = None  # of the last step
        self.graph_was_static = True  # they were the same in every step
        self.buckets: list[FlatBucket] = []
        self._used = UsedMap(len(self.parameters), group, self.device)
        self._static_counts: list[int] | None = None  # hook calls per step, once they are known
        self._static_unused: list[int] = []
        self._effective: dist.Work | None = None  # counts the ranks that have input (join)
        self._futures: list[Any] = []  # of the buffer hook, awaited with the gradients
        self._times: StepTimes | None = None  # of the step whose forward pass has begun
        self._gradient = attrgetter("grad") if precision is None else precision.gradient
        self._step = _Step()
        self._plain = False  # an arrival is nothing but an arrival
        self._backward_open = False  # a backward pass is under way, or has raised
        self._install(self.plan.initial())
        self.initial_sizes = [bucket.nbytes for bucket in self.buckets]
        self.accumulators = Accumulators([one.parameter for one in self.parameters], self)

    # ---- autograd's side

    def arrived(self, index: int) -> None:
        """The gradient of parameter ``index`` has been accumulated (or turned out undefined)."""
        if self._plain:
            self._mark_ready(index)
            return
        step = self._step
        if self._tracks_use and self.parameters[index].parameter.grad is not None:
            self._used.mark(index)
        if not step.expecting:  # no_sync, or a second backward pass without a forward
            if self.precision is not None and not self._backward_open:
                self._open_backward()
            return
        if not self._backward_open:
            self._open_backward()
        if self.settings.static_graph:
            if self._static_counts is None:
                step.calls[index] += 1
                return
            step.calls[index] -= 1
            if step.calls[index]:
                return
        if not step.unused_marked:
            self._mark_unused()
        times = self._times_of(self._place[index][0])
        if times is not None:
            times.gradient_came(clock())
        self._mark_ready(index)

    def begin_backward(self) -> None:
        """Called at the start of backward where outputs pass through the sink."""
        if not self._step.expecting:
            return
        if not self._backward_open:
            self._open_backward()
        if self._finds_unused and not self._step.unused_marked:
            self._mark_unused()

    def _open_backward(self) -> None:
        """The first gradient of a backward pass, or of a reentrant one within it."""
        self._backward_open = True  # still open at the next forward: it has raised
        call_after_backward(self._backward_ended)
        step = self._step
        if step.expecting:
            self._settle_scale()
        self._plain = (
            step.expecting
            and step.times is None
            and not self._tracks_use
            and not self.settings.static_graph
        )

    def _mark_unused(self) -> None:
        """Parameters that this backward pass will not come to count as arrived."""
        step = self._step
        step.unused_marked = True
        if self._finds_unused:
            step.unused = self.accumulators.out_of_reach()
        for index in step.unused:
            self._mark_ready(index)

    def _mark_ready(self, index: int) -> None:
        step = self._step
        step.marked.append(index)
        bucket, is_large = self._place[index]
        if is_large:
            bucket.take_large(index, step.scale)
        bucket.pending -= 1
        if bucket.pending <= 0:
            self._launch_ready()

    # ---- launching

    def _launch_ready(self) -> None:
        """Launches, in index order, all buckets whose turn has come."""
        step = self._step
        if len(set(step.marked)) != len(step.marked):
            index = next(i for i in step.marked if step.marked.count(i) > 1)
            raise RuntimeError(twice_error(self.parameters[index].name, index))
        while step.launched < len(self.buckets) and not self.buckets[step.launched].pending:
            bucket = self.buckets[step.launched]
            step.launched += 1
            step.outcomes.append(self._launch(bucket))
            if self.on_finished is not None:
                self._finish_early()
        if step.launched == len(self.buckets) and self._finds_unused:
            self._used.all_reduce()

    def _launch(self, bucket: FlatBucket) -> Outcome:
        step = self._step
        if self.settings.skip_unused and set(bucket.members) <= set(step.unused):
            return Outcome()
        gradients = [self._gradient(parameter) for parameter in bucket.parameters]
        bucket.fill(gradients, None if step.scale is None else step.divisor)
        try:
            is_last = bucket is self.buckets[-1]
            return self.launcher.launch(bucket, is_last=is_last, times=self._times_of(bucket))
        except Exception:
            step.expecting = self._plain = False
            raise

    def _settle_scale(self) -> None:
        """Sums are divided by the number of ranks, or of those that still have input."""
        step = self._step
        step.divisor = self.group.size()
        if self._effective is not None:
            self._effective.wait()
            step.divisor = int(self._effective.get_future().value()[0].item())
        step.scale = None if self.launcher.hook is not None else 1.0 / step.divisor

    # ---- the end of backward

    def _backward_ended(self) -> None:
        self._backward_open = self._plain = False
        step = self._step
        if not step.expecting:
            if self.precision is not None:
                self.precision.restore()
            return
        try:
            if self.settings.static_graph and self._static_counts is None:
                self._learn_static_graph()
            if step.launched == len(self.buckets):
                self._finalize()
        except Exception:
            self._backward_open = True  # it raises
            raise

    def _learn_static_graph(self) -> None:
        """The first step of a static graph: everything is launched now, and counted for later."""
        step = self._step
        self._static_counts = list(step.calls)
        self._static_unused = [index for index, calls in enumerate(step.calls) if not calls]
        step.unused, step.unused_marked = list(self._static_unused), True
        self._used.all_reduce()
        for index in range(len(self.parameters)):
            self._mark_ready(index)

    def _finalize(self) -> None:
        """Waits for all buckets in order and writes the averaged gradients."""
        step = self._step
        step.expecting = False
        if step.times is not None:
            step.times.backward_ended = clock()
        if self.precision is not None:
            self.precision.restore()
        while step.finished < len(self.buckets):
            self._finish_next()
        self.launcher.await_futures(self._futures)
        if self._finds_unused:
            self._used.finish_step()
        self._complete_step()

    def _finish_early(self) -> None:
        """Buckets that are averaged already, while backward goes on (optimizer in backward)."""
        step = self._step
        while step.finished < len(step.outcomes):
            members = self.buckets[step.finished].members
            if self._tracks_use and not self._used.all_used(members):  # other ranks' map is needed
                return
            if not step.outcomes[step.finished].is_done():
                return
            self._finish_next()

    def _finish_next(self) -> None:
        """Waits for the next bucket and writes its averaged gradients."""
        step = self._step
        bucket, outcome = self.buckets[step.finished], step.outcomes[step.finished]
        if not outcome.is_skipped:
            result = self.launcher.finish(bucket, outcome, self._times_of(bucket))
            if outcome.future is not None and step.divisor != self.group.size():
                # Hooks average over all ranks; those without input contributed zeros.
                result = result * (self.group.size() / step.divisor)
            unused = None
            if self._finds_unused or self.settings.static_graph:
                unused = self._used.globally_unused(bucket.members)
            bucket.scatter(result, unused)
            if self.on_finished is not None:
                self.on_finished(bucket)
        step.finished += 1

    def _complete_step(self) -> None:
        step = self._step
        unused = set(step.unused)
        arrived = [index for index in step.marked if index not in unused]
        if step.calls != self._static_counts:  # else the order is not the one in which they came
            self.plan.take_arrival(arrived + step.unused)
        if self.unused_parameters is not None and self.unused_parameters != step.unused:
            self.graph_was_static = False
        self.unused_parameters = step.unused
        if step.times is not None:
            step.times.finished = clock()
            self.timeline.add(step.times)
        self.launcher.step += 1
        self._begin_step(_Step())

    # ---- the begin of a step

    def prepare_for_forward(self) -> None:
        """Before a forward pass with gradients: no earlier step is left over, buckets are right.

        Raises:
            RuntimeError: the step before did not reduce all its gradients.
        """
        self.check_finished()
        if self._backward_open:  # the backward pass before raised
            self._abandon()
        self.rebuild()

    def time_forward(self) -> None:
        """Begins the step's record, if it is to be recorded."""
        self._times = self.timeline.begins(self.launcher.step)

    def prepare_for_backward(self, outputs: Sequence[Any] = ()) -> None:
        """After a forward pass whose backward pass averages gradients.

        Args:
            outputs: not looked at; trainers that drive a reducer themselves pass them to torch's.
        """
        times, self._times = self._times, None
        if times is not None:
            times.backward_began = clock()
        self.launcher.attempt += 1
        self._begin_step(
            _Step(
                expecting=True,
                complete=False,
                unused=list(self._static_unused),
                calls=list(self._static_counts or [0] * len(self.parameters)),
                times=times,
            )
        )

    def _begin_step(self, step: _Step) -> None:
        self._step = step
        self._backward_open = self._plain = False
        if step.complete:
            self._effective, self._futures = None, []
        for bucket in self.buckets:
            bucket.reset()

    def rebuild(self) -> None:
        """Lays buckets out anew, once the order of gradients is known or a layout was asked for."""
        number = self.launcher.step
        try:
            members = self.plan.rebuild()
        except RuntimeError as error:
            raise CollectiveError(
                f"agreeing on new buckets failed before step {number}: {error}. A peer died, or "
                f"the ranks do not run the same code",
                step=number,
                bucket=0,
                round=0,
            ) from error
        if members is not None:
            self._install(members)

    def check_finished(self) -> None:
        """Raises if the last backward pass did not reduce all its gradients."""
        step = self._step
        if not step.complete and step.marked and not self._backward_open:
            missing = sorted(set(range(len(self.parameters))) - set(step.marked))
            names = [self.parameters[index].name for index in missing]
            rank = self.group.rank()
            raise RuntimeError(unused_error(missing, names, rank, finds=self._finds_unused))

    def _abandon(self) -> None:
        """Drops a step whose backward pass raised; what it has launched must not write any more."""
        for bucket, outcome in zip(self.buckets, self._step.outcomes, strict=False):
            self.launcher.settle(bucket, outcome)
        self._used.forget_step()
        if self.precision is not None:
            self.precision.restore()
        self._begin_step(_Step())

    def _install(self, members: Sequence[Sequence[int]]) -> None:
        settings = self.settings
        self.buckets.clear()  # the old ones go first: not both at a time
        self._place: dict[int, tuple[FlatBucket, bool]] = {}  # and whether it is copied at once
        for number, one in enumerate(members):
            bucket = FlatBucket(
                one, self.parameters, number=number, dtype=settings.dtype, as_view=settings.as_view
            )
            bucket.adopt_gradients()
            self.buckets.append(bucket)
            for index in one:
                self._place[index] = bucket, self.precision is None and bucket.is_large(index)

    # ---- what follows from the settings

    @property
    def under_way(self) -> bool:
        """Whether a backward pass has begun to reduce gradients and has not finished."""
        return self._step.expecting and bool(self._step.marked)

    @property
    def needs_sink(self) -> bool:
        """Whether outputs pass through the sink, see :mod:`ddp_core._sink`."""
        return self._tracks_use

    @property
    def _finds_unused(self) -> bool:
        return self.settings.find_unused and not self.settings.static_graph

    @property
    def _tracks_use(self) -> bool:
        return self._finds_unused or (self.settings.static_graph and self._static_counts is None)

    def _times_of(self, bucket: FlatBucket) -> BucketTimes | None:
        times = self._step.times
        if times is None:
            return None
        if len(times.buckets) != len(self.buckets):
            times.buckets = [
                BucketTimes(number, one.nbytes) for number, one in enumerate(self.buckets)
            ]
        return times.buckets[bucket.number]

    # ---- uneven inputs and buffers

    def set_effective_ranks(self, work: dist.Work, *, static_world_size: bool) -> None:
        """``work`` counts the ranks that have input; gradients are divided by it, unless static."""
        self._effective = None if static_world_size else work

    def shadow(self) -> None:
        """Takes part in one backward pass with zero gradients (this rank has no more input)."""
        self._begin_step(_Step())
        self.launcher.attempt += 1
        outcomes = []
        for bucket in self.buckets:
            if bucket.sparse:
                bucket.buffer = empty_sparse(bucket.parameters[0])
            else:
                bucket.buffer.zero_()
            is_last = bucket is self.buckets[-1]
            outcomes.append(self.launcher.launch(bucket, is_last=is_last, times=None))
        if self._finds_unused:
            self._used.forget_step()
            self._used.all_reduce()
        for bucket, outcome in zip(self.buckets, outcomes, strict=True):
            self.launcher.finish(bucket, outcome, None)
        if self._finds_unused:
            self._used.finish_step()
        self.launcher.step += 1
        self.plan.assume_arrival()

    def await_futures(self, futures: Sequence[Any]) -> None:
        """Futures that are waited for at the end of backward (buffer hook)."""
        self._futures.extend(futures)
