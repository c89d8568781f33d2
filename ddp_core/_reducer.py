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

from ddp_core._bucket import GradBucket
from ddp_core._errors import CollectiveError, PeerError
from ddp_core._failures import FailureBoard, failed, wait_for_future, wait_for_work
from ddp_core._flat import FlatBucket, empty_sparse
from ddp_core._layout import BucketCaps, BucketGroup, agree_on, arrange
from ddp_core._parameters import Trained
from ddp_core._precision import Precision
from ddp_core._task import RoundRecord, clock
from ddp_core._timeline import BucketTimes, StepTimes, Timeline
from ddp_core._unused import UsedMap, unused_error

__all__ = ["CommHook", "Reducer", "ReducerSettings"]

CommHook = Callable[[Any, Any], Any]  # (state, bucket) -> Future[Tensor]


@dataclass
class ReducerSettings:
    """How a reducer works; see the arguments of DistributedDataParallel."""

    caps: BucketCaps
    find_unused: bool = False
    static_graph: bool = False
    as_view: bool = False
    skip_unused: bool = False
    dtype: torch.dtype | None = None  # of the buckets; the parameters' own by default


class _Outcome:
    """What a launched bucket is waited for: a work handle, a hook's future, or nothing."""

    __slots__ = ("future", "skipped", "work")

    def __init__(self, work: dist.Work | None = None, future: Any = None) -> None:
        self.work, self.future = work, future
        self.skipped = work is None and future is None

    def is_done(self) -> bool:
        """Whether waiting for it would return at once."""
        if self.future is not None:
            return bool(self.future.done())
        return self.work is None or self.work.is_completed()


class Reducer:
    """Averages the gradients of one model in backward.

    Args:
        parameters: those that require a gradient, in registration order; the same on all ranks.
        group: ranks to average over.
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
        self.group = group
        self.settings = settings
        self.device = self.parameters[0].parameter.device
        self.precision = precision
        self.timeline = Timeline()
        self.hook: tuple[CommHook, Any] | None = None
        self.group_of: BucketGroup | None = None  # the layout that a scheme asked for
        self.splits: list[list[int]] = []  # the buckets that the compiler chose
        self.on_finished: Callable[[FlatBucket], None] | None = None  # optimizer in backward
        self.step = 0  # synchronised backward passes
        self.rebuilt = False
        self.arrival: list[int] = []  # of the last complete step
        self.unused_parameters: list[int] | None = None  # of the last step
        self.graph_was_static = True  # they were the same in every step
        self._board = FailureBoard(group, name)
        self._attempt = 0
        self._lock = threading.RLock()  # parameters on several devices: several autograd threads
        self._used = UsedMap(len(self.parameters), group, self.device)
        self._relayout = False
        self._install(arrange(self.parameters, self._initial_limits()))
        self._static_counts: list[int] | None = None  # hook calls per step, once they are known
        self._effective: dist.Work | None = None  # number of ranks that have input (join)
        self._futures: list[Any] = []  # of the buffer hook, awaited with the gradients
        self._expecting = False
        self._times: StepTimes | None = None
        self._outcomes: list[_Outcome] = []
        self._order: list[int] = []  # of arrival
        self._unused: list[int] = []
        self._divisor: int | None = None
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
            node = alias.grad_fn.next_functions[0][0]
            self._nodes.append(node)
            self._handles.append(node.register_hook(_arrival_hook(me, index)))  # type: ignore[union-attr]

    def unwatch(self) -> None:
        """Removes the hooks from the gradient accumulators."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._nodes = [], []

    def arrived(self, index: int) -> None:
        """The gradient of parameter ``index`` has been accumulated (or turned out undefined)."""
        with self._lock:
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
            self._order.append(index)
            if not self._unused_marked:
                self._mark_unused()
            self._mark_ready(index)

    def begin_backward(self) -> None:
        """Called at the start of backward where outputs pass through the sink."""
        with self._lock:
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

    def _mark_unused(self) -> None:
        """Parameters that this backward pass will not reach count as arrived."""
        self._unused_marked = True
        if self._finds_unused:
            executes = torch._C._will_engine_execute_node
            self._unused = [i for i, node in enumerate(self._nodes) if not executes(node)]
        for index in self._unused:
            self._mark_ready(index)

    def _mark_ready(self, index: int) -> None:
        if self._ready[index]:
            raise RuntimeError(_twice(self.parameters[index].name, index))
        self._ready[index] = 1
        bucket, slot = self._place[index]
        if self._times is not None and bucket.pending == len(bucket.members):
            self._times_of(bucket).first_ready = clock()
        if bucket.large[slot] and self.precision is None:
            bucket.take_large(slot, bucket.parameters[slot].grad, self._scale)
        bucket.pending -= 1
        if not bucket.pending:
            if self._times is not None:
                self._times_of(bucket).last_ready = clock()
            self._launch_ready()

    # ---- launching

    def _launch_ready(self) -> None:
        """Launches, in index order, all buckets whose turn has come."""
        while self._next < len(self.buckets) and not self.buckets[self._next].pending:
            bucket = self.buckets[self._next]
            self._next += 1
            self._launch(bucket)
        if self._next == len(self.buckets) and self._finds_unused:
            self._used.all_reduce()

    def _launch(self, bucket: FlatBucket) -> None:
        number = bucket.number
        if self.settings.skip_unused and all(index in self._unused for index in bucket.members):
            self._outcomes.append(_Outcome())
            return
        if self.precision is None:
            grads = [parameter.grad for parameter in bucket.parameters]
        else:
            grads = [self.precision.gradient(parameter) for parameter in bucket.parameters]
        bucket.fill(grads, None if self.hook is not None else self.divisor())
        times = self._times_of(bucket) if self._times is not None else None
        if times is not None:
            times.launched = clock()
        try:
            if self.hook is None:
                outcome = self._all_reduce(bucket, times)
            else:
                last = number == len(self.buckets) - 1
                outcome = self._run_hook(bucket.as_grad_bucket(is_last=last), times)
        except Exception as error:
            self._expecting = False
            self._report(number, error)
            raise
        self._outcomes.append(outcome)
        if self.on_finished is not None:
            self._finish_early()

    def _finish_early(self) -> None:
        """Buckets that are averaged already, while backward goes on (optimizer in backward)."""
        while self._finished < len(self._outcomes):
            members = self.buckets[self._finished].members
            if self._tracks_use and not self._used.all_used(members):  # other ranks' map is needed
                return
            outcome = self._outcomes[self._finished]
            if not outcome.is_done():
                return
            self._finish(self._finished)
            self._finished += 1

    def _report(self, number: int, error: Exception) -> None:
        """Tells the other ranks, which would wait for this one; hearsay is not passed on."""
        if not isinstance(error, PeerError):
            text = f"step {self.step}, bucket {number}: {type(error).__name__}: {error}"
            self._board.report(self._attempt, text)

    def _all_reduce(self, bucket: FlatBucket, times: BucketTimes | None = None) -> _Outcome:
        work: dist.Work | None
        work = dist.all_reduce(bucket.buffer, group=self.group, async_op=True)
        if times is not None and work is not None:
            nbytes = times.nbytes
            record = RoundRecord(self.step, times.bucket, 0, "all_reduce", nbytes, nbytes, 0.0)
            record.issued = times.launched
            times.rounds.append(record)
            work.get_future().add_done_callback(_stamp(times, record))
        return _Outcome(work=work)

    def _run_hook(self, bucket: GradBucket, times: BucketTimes | None = None) -> _Outcome:
        assert self.hook is not None
        hook, state = self.hook
        if times is not None:
            bucket.note = times.rounds.append
        future = hook(state, bucket)
        if not isinstance(future, torch._C.Future):
            name = getattr(hook, "__qualname__", type(hook).__qualname__)
            raise TypeError(
                f"the communication hook {name} returns a torch.futures.Future[Tensor], got "
                f"{type(future).__name__}"
            )
        if times is not None:
            future.add_done_callback(_stamp(times, None))
        return _Outcome(future=future)

    def divisor(self) -> int:
        """What sums are divided by: the ranks, or those that still have input."""
        if self._divisor is not None:
            return self._divisor
        divisor = self.group.size()
        if self._effective is not None:
            self._effective.wait()
            divisor = int(self._effective.get_future().value()[0].item())
        self._divisor = divisor
        return divisor

    @property
    def _scale(self) -> float | None:
        return None if self.hook is not None else 1.0 / self.divisor()

    # ---- the end of backward

    def _backward_ended(self) -> None:
        with self._lock:
            self._backward_open = False
            if not self._expecting:
                if self.precision is not None:
                    self.precision.restore()
                return
            if self.settings.static_graph and self._static_counts is None:
                self._learn_static_graph()
            if self._next == len(self.buckets):
                self._finalize()

    def _learn_static_graph(self) -> None:
        """The first step of a static graph: everything is launched now, and counted for later."""
        self._static_counts = list(self._calls)
        self._unused_marked = True
        self._unused = [index for index, calls in enumerate(self._calls) if not calls]
        self._used.all_reduce()
        for index in range(len(self.parameters)):
            self._mark_ready(index)

    def _finalize(self) -> None:
        """Waits for all buckets in order and writes the averaged gradients."""
        self._expecting = False
        if self._times is not None:
            self._times.backward_ended = clock()
        finished = 0
        try:
            if self.precision is not None:
                self.precision.restore()
            for number in range(self._finished, len(self.buckets)):
                finished = number
                self._finish(number)
            finished = len(self.buckets)
            for future in self._futures:
                wait_for_future(future, self._board, self._attempt)
            if self._finds_unused:
                self._used.finish_step()
        except Exception as error:
            self._backward_open = True  # it raises
            if finished == len(self.buckets):
                raise
            self._report(finished, error)
            raise failed(error, "the exchange", self.step, finished) from error
        self._complete_step()

    def _finish(self, number: int) -> None:
        """Waits for one bucket and writes its averaged gradients."""
        bucket, outcome = self.buckets[number], self._outcomes[number]
        if outcome.skipped:
            return
        times = self._times_of(bucket) if self._times is not None else None
        if times is not None:
            times.wait_began = clock()
        if outcome.future is not None:
            result = wait_for_future(outcome.future, self._board, self._attempt)
            if self._effective is not None and self.divisor() != self.group.size():
                # Hooks average over all ranks; those without input contributed zeros.
                result = result * (self.group.size() / self.divisor())
        else:
            assert outcome.work is not None
            wait_for_work(outcome.work, bucket.buffer.device, self._board, self._attempt)
            result = bucket.buffer
        if times is not None:
            times.wait_ended = clock()
        unused = None
        if self._finds_unused or self.settings.static_graph:
            unused = self._used.globally_unused(bucket.members)
        bucket.scatter(result, unused)
        if self.on_finished is not None:
            self.on_finished(bucket)

    def _complete_step(self) -> None:
        order = [*self._order, *self._unused]
        if len(order) == len(self.parameters):
            self.arrival = order
        if self.unused_parameters is not None and self.unused_parameters != self._unused:
            self.graph_was_static = False
        self.unused_parameters = list(self._unused)
        if self._times is not None:
            self._times.finished = clock()
            self.timeline.add(self._times)
        self.step += 1
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
        self._attempt += 1
        self._expecting = True
        self._unfinished = True
        if self._times is not None:
            self._times.backward_began = clock()

    def time_forward(self) -> None:
        """Begins the step's record, if it is to be recorded."""
        self._times = self.timeline.begins(self.step)

    def rebuild(self) -> bool:
        """Lays buckets out anew, once the order of gradients is known or a layout was asked for.

        All ranks do it in the same forward pass; they take rank 0's buckets.
        """
        by_arrival = self.rebuilds and not self.rebuilt and bool(self.arrival)
        if not by_arrival and not self._relayout:
            return False
        order = self.arrival or None
        buckets = self._arranged(order)
        try:
            buckets = agree_on(buckets, len(self.parameters), self.group, self.device)
        except Exception as error:
            raise CollectiveError(
                f"agreeing on new buckets failed before step {self.step}: {error}. A peer died, "
                f"or the ranks do not run the same code",
                step=self.step,
                bucket=0,
                round=0,
            ) from error
        self._install(buckets)
        self._relayout = False
        self.rebuilt = self.rebuilt or by_arrival
        return True

    def request_layout(self, group_of: BucketGroup | None) -> None:
        """Buckets hold parameters of one group each from the next step on; None: as usual."""
        self.group_of = group_of
        self._relayout = True

    def push_arrival(self) -> None:
        """Takes registration order for this rank's arrival order (it has no input: join)."""
        if self.rebuilds and not self.rebuilt and not self.arrival:
            self.arrival = list(range(len(self.parameters)))

    @property
    def rebuilds(self) -> bool:
        """Whether buckets follow the order in which gradients arrived."""
        return self.settings.static_graph or not self.settings.find_unused

    @property
    def needs_sink(self) -> bool:
        """Whether outputs pass through the sink, see :mod:`ddp_core._sink`."""
        return self._finds_unused or (self.settings.static_graph and self._static_counts is None)

    @property
    def under_way(self) -> bool:
        """Whether a backward pass has begun to reduce gradients and has not finished."""
        return self._expecting and any(self._ready)

    def check_finished(self) -> None:
        """Raises if the last backward pass did not reduce all its gradients."""
        if self._unfinished and any(self._ready) and not self._backward_open:
            missing = [index for index, ready in enumerate(self._ready) if not ready]
            names = [self.parameters[index].name for index in missing]
            rank = self.group.rank()
            raise RuntimeError(unused_error(missing, names, rank, self._finds_unused))

    @property
    def _finds_unused(self) -> bool:
        return self.settings.find_unused and not self.settings.static_graph

    @property
    def _tracks_use(self) -> bool:
        return self._finds_unused or (self.settings.static_graph and self._static_counts is None)

    def _initial_limits(self) -> Sequence[int]:
        return self.settings.caps.initial(rebuilds=self.rebuilds)

    def _arranged(self, order: Sequence[int] | None) -> list[list[int]]:
        limits = self.settings.caps.limits if order is not None else self._initial_limits()
        splits = [] if self.group_of is not None else self.splits
        return arrange(self.parameters, limits, order=order, group_of=self.group_of, splits=splits)

    def take_splits(self, chosen: Sequence[Sequence[int]]) -> None:
        """The compiler split a graph there; its splits become buckets when buckets are rebuilt.

        Args:
            chosen: ids of parameters by split, in the order of backward.
        """
        if self.rebuilt or self.step:  # one rank's later recompilation must not move buckets
            return
        index_of = {id(one.parameter): index for index, one in enumerate(self.parameters)}
        new = [[index_of[i] for i in split if i in index_of] for split in chosen]
        # Graphs are compiled in the order of forward, so a later one is earlier in backward. A
        # shared parameter is ready at its last use in backward.
        owner: dict[int, int] = {}
        splits = [*(split for split in new if split), *self.splits]
        for number, split in enumerate(splits):
            owner.update(dict.fromkeys(split, number))
        self.splits = [
            [index for index in dict.fromkeys(split) if owner[index] == number]
            for number, split in enumerate(splits)
        ]
        self.splits = [split for split in self.splits if split]
        if not self.rebuilds:
            self._relayout = True

    def _install(self, members: Sequence[Sequence[int]]) -> None:
        settings = self.settings
        self.buckets: list[FlatBucket] = []  # the old ones go first: not both at a time
        self._place: dict[int, tuple[FlatBucket, int]] = {}
        for number, one in enumerate(members):
            bucket = FlatBucket(
                one, self.parameters, number=number, dtype=settings.dtype, as_view=settings.as_view
            )
            bucket.adopt_gradients()
            self.buckets.append(bucket)
            self._place.update({index: (bucket, slot) for slot, index in enumerate(one)})

    def _reset(self) -> None:
        """Accounting of a new step."""
        self._next = 0  # the bucket that is launched next
        self._finished = 0  # buckets that were finished early
        self._outcomes = []
        self._ready = bytearray(len(self.parameters))
        self._order = []
        self._unused_marked = False
        if not (self.settings.static_graph and self._static_counts is not None):
            self._unused = []
        self._backward_open = False
        self._unfinished = False
        self._divisor = None
        self._calls = list(self._static_counts or [0] * len(self.parameters))
        for bucket in self.buckets:
            bucket.reset()

    def _abandon(self) -> None:
        """Drops a step whose backward pass raised; what it has launched must not write any more."""
        for outcome in self._outcomes:
            try:
                if outcome.future is not None:
                    wait_for_future(outcome.future, self._board, self._attempt)
                elif outcome.work is not None:
                    wait_for_work(outcome.work, self.device, self._board, self._attempt)
            except Exception:  # it was reported when it happened, or belongs to the raised error
                continue
        self._used.forget_step()
        if self.precision is not None:
            self.precision.restore()
        self._expecting = False
        self._futures = []
        self._effective = None
        self._reset()

    def _times_of(self, bucket: FlatBucket) -> BucketTimes:
        assert self._times is not None
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
        self._divisor = self.group.size()
        self._attempt += 1
        outcomes = []
        for number, bucket in enumerate(self.buckets):
            if bucket.sparse:
                bucket.buffer = empty_sparse(bucket.parameters[0])
            else:
                bucket.buffer.zero_()
            if self.hook is None:
                outcomes.append(self._all_reduce(bucket))
            else:
                last = number == len(self.buckets) - 1
                outcomes.append(self._run_hook(bucket.as_grad_bucket(is_last=last)))
        if self._finds_unused:
            self._used.forget_step()
            self._used.all_reduce()
        for outcome in outcomes:
            if outcome.future is not None:
                wait_for_future(outcome.future, self._board, self._attempt)
            elif outcome.work is not None:
                wait_for_work(outcome.work, self.device, self._board, self._attempt)
        if self._finds_unused:
            self._used.finish_step()
        self.step += 1

    def await_futures(self, futures: Sequence[Any]) -> None:
        """Futures that are waited for at the end of backward (buffer hook)."""
        self._futures.extend(futures)


def _arrival_hook(reducer: weakref.ref[Reducer], index: int) -> Callable[[object, object], None]:
    # Autograd's nodes are invisible to the garbage collector: what they hold strongly is never
    # freed while they live.
    def hook(_inputs: object, _outputs: object) -> None:
        me = reducer()
        if me is not None:
            me.arrived(index)

    return hook


def _stamp(times: BucketTimes, record: RoundRecord | None) -> Callable[[object], None]:
    def stamp(_: object) -> None:
        times.decoded = clock()
        if record is not None:
            record.done = record.finished = times.decoded
        elif not times.rounds:  # a hook that does not tell its rounds
            times.rounds.append(
                RoundRecord(
                    0,
                    times.bucket,
                    0,
                    "hook",
                    times.nbytes,
                    times.nbytes,
                    0.0,
                    issued=times.launched,
                    done=times.decoded,
                    finished=times.decoded,
                )
            )

    return stamp


def _twice(name: str, index: int) -> str:
    return (
        f"Expected to mark a variable ready only once. Parameter at index {index} with name {name} "
        f"has been marked as ready twice. This means that its gradient came twice in one backward "
        f"pass: it is used outside of the module's forward, or by several reentrant backward "
        f"passes (activation checkpointing with use_reentrant=True of a shared layer, or with "
        f"find_unused_parameters=True). Set static_graph=True if the graph does not change between "
        f"steps, or use_reentrant=False"
    )
