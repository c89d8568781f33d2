"""The reducer: collects gradients in buckets, launches them in order, waits at the end of backward.

One backward pass, see ``docs/design/reducer.md``:

    arrived(i) ... bucket full -> launch in index order -> (hook or all-reduce) -> future
    end of backward -> wait for each bucket in order -> param.grad
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

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
        self._effective: dist.Work | None = None  # counts the ranks that have input (join)
        self._futures: list[Any] = []  # of the buffer hook, awaited with the gradients
        self._times: StepTimes | None = None
        devices = {one.parameter.device for one in self.parameters}
        # Autograd has a thread per device.
        self._lock = threading.RLock() if len(devices) > 1 else None
        self._expecting = False
        self._outcomes: list[Outcome] = []
        self._marked: list[int] = []  # parameters that count as arrived, in that order
        self._scale: float | None = None  # of gradients that go into a bucket; None: a hook scales
        self._unused: list[int] = []
        self._divisor = 0  # not known yet
        self._calls: list[int] = []  # of the hooks in this step (static graph)
        self._install(self.plan.initial())
        self.initial_sizes = [bucket.nbytes for bucket in self.buckets]
        self._reset()
        self._nodes: list[Any] = []  # a parameter does not keep its node alive
        self._handles: list[Any] = []
        self.watch()

    # ---- autograd's side

    def watch(self) -> None:
        """Puts a hook on every parameter's gradient accumulator (anew)."""
        self.unwatch()
        me = weakref.ref(self)
        for index, one in enumerate(self.parameters):
            with torch.enable_grad():
                alias = one.parameter.view_as(one.parameter)
            assert alias.grad_fn is not None
            node: Any = alias.grad_fn.next_functions[0][0]
            self._nodes.append(node)
            self._handles.append(node.register_hook(_arrival_hook(me, index, self._lock)))

    def unwatch(self) -> None:
        """Removes the hooks from the gradient accumulators."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._nodes = [], []

    def arrived(self, index: int) -> None:
        """The gradient of parameter ``index`` has been accumulated (or turned out undefined)."""
        if self._plain:
            # What `_mark_ready` does, without the call: this runs for every parameter and step.
            self._marked.append(index)
            bucket, is_large = self._place[index]
            if is_large:
                bucket.take_large(index, self._scale)
            bucket.pending -= 1
            if bucket.pending <= 0:
                self._launch_ready()
            return
        if self._tracks_use and self.parameters[index].parameter.grad is not None:
            self._used.mark(index)
        if not self._expecting:  # no_sync, or a second backward pass without a forward
            if self.precision is not None and not self._backward_open:
                self._queue_callback()
            return
        if not self._backward_open:
            self._queue_callback()
        if self.settings.static_graph:
            if self._static_counts is None:
                self._calls[index] += 1
                return
            self._calls[index] -= 1
            if self._calls[index]:
                return
        if not self._unused_marked:
            self._mark_unused()
        times = self._times_of(self._place[index][0])
        if times is not None:
            times.gradient_came(clock())
        self._mark_ready(index)

    def begin_backward(self) -> None:
        """Called at the start of backward where outputs pass through the sink."""
        if not self._expecting:
            return
        if not self._backward_open:
            self._queue_callback()
        if self._finds_unused and not self._unused_marked:
            self._mark_unused()

    def _queue_callback(self) -> None:
        # Called when the current backward pass has succeeded; still open at the next forward means
        # that it raised. A reentrant inner pass has callbacks of its own.
        self._backward_open = True
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._backward_ended)
        self._scale = None if self.launcher.hook is not None else 1.0 / self.divisor()
        # From now on an arrival is nothing but an arrival.
        self._plain = (
            self._expecting
            and self._times is None
            and not self._tracks_use
            and not self.settings.static_graph
        )

    def _mark_unused(self) -> None:
        """Parameters that this backward pass will not reach count as arrived."""
        self._unused_marked = True
        if self._finds_unused:
            executes = torch._C._will_engine_execute_node
            self._unused = [i for i, node in enumerate(self._nodes) if not executes(node)]
        for index in self._unused:
            self._mark_ready(index)

    def _mark_ready(self, index: int) -> None:
        self._marked.append(index)
        bucket, is_large = self._place[index]
        if is_large:
            bucket.take_large(index, self._scale)
        bucket.pending -= 1
        if bucket.pending <= 0:
            self._launch_ready()

    # ---- launching

    def _launch_ready(self) -> None:
        """Launches, in index order, all buckets whose turn has come."""
        if len(set(self._marked)) != len(self._marked):
            index = next(i for i in self._marked if self._marked.count(i) > 1)
            raise RuntimeError(twice_error(self.parameters[index].name, index))
        while self._next < len(self.buckets) and not self.buckets[self._next].pending:
            bucket = self.buckets[self._next]
            self._next += 1
            self._outcomes.append(self._launch(bucket))
            if self.on_finished is not None:
                self._finish_early()
        if self._next == len(self.buckets) and self._finds_unused:
            self._used.all_reduce()

    def _launch(self, bucket: FlatBucket) -> Outcome:
        if self.settings.skip_unused and set(bucket.members) <= set(self._unused):
            return Outcome()
        if self.precision is None:
            grads = [parameter.grad for parameter in bucket.parameters]
        else:
            grads = [self.precision.gradient(parameter) for parameter in bucket.parameters]
        bucket.fill(grads, None if self._scale is None else self.divisor())
        try:
            return self.launcher.launch(
                bucket, is_last=bucket is self.buckets[-1], times=self._times_of(bucket)
            )
        except Exception:
            self._expecting = self._plain = False
            raise

    def divisor(self) -> int:
        """What sums are divided by: the ranks, or those that still have input."""
        if self._divisor:
            return self._divisor
        self._divisor = self.group.size()
        if self._effective is not None:
            self._effective.wait()
            self._divisor = int(self._effective.get_future().value()[0].item())
        return self._divisor

    # ---- the end of backward

    def _backward_ended(self) -> None:
        self._backward_open = self._plain = False
        if not self._expecting:
            if self.precision is not None:
                self.precision.restore()
            return
        try:
            if self.settings.static_graph and self._static_counts is None:
                self._learn_static_graph()
            if self._next == len(self.buckets):
                self._finalize()
        except Exception:
            self._backward_open = True  # it raises
            raise

    def _learn_static_graph(self) -> None:
        """The first step of a static graph: everything is launched now, and counted for later."""
        self._static_counts = list(self._calls)
        self._unused_marked = True
        self._counting = True  # it is not known in which order they came
        self._scale = None if self.launcher.hook is not None else 1.0 / self.divisor()
        self._unused = [index for index, calls in enumerate(self._calls) if not calls]
        self._used.all_reduce()
        for index in range(len(self.parameters)):
            self._mark_ready(index)

    def _finalize(self) -> None:
        """Waits for all buckets in order and writes the averaged gradients."""
        self._expecting = False
        if self._times is not None:
            self._times.backward_ended = clock()
        if self.precision is not None:
            self.precision.restore()
        while self._finished < len(self.buckets):
            self._finish_next()
        self.launcher.await_futures(self._futures)
        if self._finds_unused:
            self._used.finish_step()
        self._complete_step()

    def _finish_early(self) -> None:
        """Buckets that are averaged already, while backward goes on (optimizer in backward)."""
        while self._finished < len(self._outcomes):
            members = self.buckets[self._finished].members
            if self._tracks_use and not self._used.all_used(members):  # other ranks' map is needed
                return
            if not self._outcomes[self._finished].is_done():
                return
            self._finish_next()

    def _finish_next(self) -> None:
        """Waits for the next bucket and writes its averaged gradients."""
        bucket, outcome = self.buckets[self._finished], self._outcomes[self._finished]
        if not outcome.is_skipped:
            result = self.launcher.finish(bucket, outcome, self._times_of(bucket))
            if outcome.future is not None and self.divisor() != self.group.size():
                # Hooks average over all ranks; those without input contributed zeros.
                result = result * (self.group.size() / self.divisor())
            unused = None
            if self._finds_unused or self.settings.static_graph:
                unused = self._used.globally_unused(bucket.members)
            bucket.scatter(result, unused)
            if self.on_finished is not None:
                self.on_finished(bucket)
        self._finished += 1

    def _complete_step(self) -> None:
        unused = set(self._unused)
        if not self._counting:
            self.plan.take_arrival([i for i in self._marked if i not in unused] + self._unused)
        if self.unused_parameters is not None and self.unused_parameters != self._unused:
            self.graph_was_static = False
        self.unused_parameters = list(self._unused)
        if self._times is not None:
            self._times.finished = clock()
            self.timeline.add(self._times)
        self.launcher.step += 1
        self._unfinished = False
        self._outcomes = []
        self._futures = []
        self._effective = None

    # ---- the begin of a step

    def prepare_forward(self) -> None:
        """Before a forward pass with gradients: no earlier step is left over, buckets are right.

        Raises:
            RuntimeError: the step before did not reduce all its gradients.
        """
        self.check_finished()
        if self._backward_open:  # the backward pass before raised
            self._abandon()
        self.rebuild()

    def prepare_backward(self) -> None:
        """After a forward pass whose backward pass averages gradients."""
        self._reset()
        self.launcher.attempt += 1
        self._expecting = self._unfinished = True
        if self._times is not None:
            self._times.backward_began = clock()

    def time_forward(self) -> None:
        """Begins the step's record, if it is to be recorded."""
        self._times = self.timeline.begins(self.launcher.step)

    def rebuild(self) -> None:
        """Lays buckets out anew, once the order of gradients is known or a layout was asked for."""
        step = self.launcher.step
        try:
            members = self.plan.rebuild()
        except RuntimeError as error:
            raise CollectiveError(
                f"agreeing on new buckets failed before step {step}: {error}. A peer died, or the "
                f"ranks do not run the same code",
                step=step,
                bucket=0,
                round=0,
            ) from error
        if members is not None:
            self._install(members)

    def check_finished(self) -> None:
        """Raises if the last backward pass did not reduce all its gradients."""
        if self._unfinished and self._marked and not self._backward_open:
            missing = sorted(set(range(len(self.parameters))) - set(self._marked))
            names = [self.parameters[index].name for index in missing]
            rank = self.group.rank()
            raise RuntimeError(unused_error(missing, names, rank, finds=self._finds_unused))

    def _abandon(self) -> None:
        """Drops a step whose backward pass raised; what it has launched must not write any more."""
        for bucket, outcome in zip(self.buckets, self._outcomes, strict=False):
            self.launcher.settle(bucket, outcome)
        self._used.forget_step()
        if self.precision is not None:
            self.precision.restore()
        self._expecting = False
        self._futures = []
        self._effective = None
        self._reset()

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

    def _reset(self) -> None:
        """Accounting of a new step."""
        self._next = 0  # the bucket that is launched next
        self._finished = 0  # buckets whose gradients are written
        self._outcomes = []
        self._marked = []
        self._unused_marked = self._counting = False
        if not self.settings.static_graph or self._static_counts is None:
            self._unused = []
        self._backward_open = False  # a backward pass is under way, or has raised
        self._unfinished = False
        self._plain = False
        self._divisor = 0
        self._calls = list(self._static_counts or [0] * len(self.parameters))
        for bucket in self.buckets:
            bucket.reset()

    # ---- what follows from the settings

    @property
    def under_way(self) -> bool:
        """Whether a backward pass has begun to reduce gradients and has not finished."""
        return self._expecting and bool(self._marked)

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
        if self._times is None:
            return None
        if len(self._times.buckets) != len(self.buckets):
            self._times.buckets = [
                BucketTimes(number, one.nbytes) for number, one in enumerate(self.buckets)
            ]
        return self._times.buckets[bucket.number]

    # ---- uneven inputs and buffers

    def set_effective_ranks(self, work: dist.Work, *, static_world_size: bool) -> None:
        """``work`` counts the ranks that have input; gradients are divided by it, unless static."""
        self._effective = None if static_world_size else work

    def shadow(self) -> None:
        """Takes part in one backward pass with zero gradients (this rank has no more input)."""
        self._reset()
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


def _arrival_hook(
    reducer: weakref.ref[Reducer], index: int, lock: Any
) -> Callable[[object, object], None]:
    # Autograd's nodes are invisible to the garbage collector: what they hold strongly is never
    # freed while they live.
    def hook(_inputs: object, _outputs: object) -> None:
        me = reducer()
        if me is not None:
            me.arrived(index)

    def locked(inputs: object, outputs: object) -> None:
        with lock:
            hook(inputs, outputs)

    return hook if lock is None else locked
