"""Handles a step's backward pass: gradients that autograd writes or will not write, and the end.

arrived(i) ... bucket full -> launched in index order -> (hook or all-reduce) -> future
end of backward -> wait for each bucket in order -> param.grad
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ddp_core.exchange._clocks import clock_of
from ddp_core.reducer._autograd import (
    NO_BACKWARD,
    Accumulators,
    backward_number,
    call_after_backward,
    is_nested,
)
from ddp_core.reducer._buckets import BucketBase, BucketSet
from ddp_core.reducer._launch import Step
from ddp_core.reducer._misuse import GraphErrors, LocalGradients
from ddp_core.reducer._plan import BucketPlan
from ddp_core.reducer._precision import Precision
from ddp_core.reducer._step_exchange import StepExchange
from ddp_core.reducer._timeline import StepTimes, Timeline

__all__ = ["Backward", "History"]


class Backward:
    """Launches buckets as their gradients arrive, and ends the step when all have.

    Args:
        exchange: the exchange of the step under way.
        installed: the buckets, to which gradients are written.
        plan, history: record in which order and when gradients arrived.
        errors: raises if gradients do not arrive as agreed.
        precision: exchanges parameters for low-precision ones, if given.
    """

    def __init__(
        self,
        exchange: StepExchange,
        installed: BucketSet,
        *,
        plan: BucketPlan,
        history: History,
        errors: GraphErrors,
        precision: Precision | None,
    ) -> None:
        self._exchange, self._location = exchange, installed.location
        self._parameters, self._usage = exchange.parameters, exchange.usage
        self._plan, self._history, self._errors = plan, history, errors
        self._precision, self._opened_in = precision, NO_BACKWARD  # number of the open pass
        self.unreduced = LocalGradients(exchange.parameters, exchange.usage, errors)
        self.accumulators = Accumulators([entry.parameter for entry in exchange.parameters], self)

    @property
    def has_raised(self) -> bool:
        """Whether the step's backward pass began, has raised, and is not the present one."""
        return self._exchange.step.is_open and self._opened_in != backward_number()

    # ---- gradients

    def arrived(self, index: int) -> None:
        """Records that the gradient of a parameter has arrived, or turned out undefined."""
        step = self._exchange.step
        if step.fast_path:
            self.mark_ready(step, index)
            return
        usage = self._usage
        if usage.records_use and self._parameters[index].parameter.grad is not None:
            usage.used.mark(index)
        if not step.is_open and (step.expecting or self._precision is not None):
            self._open(step)
        if not step.expecting:  # no_sync, hold, or a second backward pass without a forward
            try:
                self.unreduced.gradient_came(index, step)
            except BaseException:
                if self._precision is not None:  # the pass ends here
                    self._precision.restore()
                raise
            return
        if usage.is_static and not self._is_last_call(step, index):
            return
        if not step.unused_marked:
            self._mark_unused(step)
        times = self._exchange.times_of(self._location[index][0])
        if times is not None:
            times.gradient_came()
        self.mark_ready(step, index)

    def arrived_in_full_precision(self, index: int) -> None:
        """Raises if a gradient arrived for the full-precision parameter, too late to be sent."""
        if self._exchange.step.expecting and self._exchange.is_low:
            self._errors.full_precision(index)

    def begins(self) -> None:
        """Opens the step at the start of backward, if outputs pass through the sink."""
        step = self._exchange.step
        if step.expecting and not step.is_open:
            self._open(step)
        if step.expecting and not self._usage.is_first_static_step and not step.unused_marked:
            self._mark_unused(step)

    def _open(self, step: Step) -> None:
        """Opens a backward pass at its first gradient; also a reentrant pass within another."""
        step.is_open = True  # still open at the next forward: it has raised
        self._opened_in = backward_number()
        call_after_backward(self._ended)
        if step.forward_in_pass == self._opened_in != NO_BACKWARD:
            # It ran again here, for activations only: the graph is that of one under no_sync.
            step.expecting, step.complete = False, True
            self.unreduced.forward_was_recomputed()
        if not step.expecting:
            return
        self.unreduced.begin_averaging_pass()
        if self._plan.loaded:
            self._errors.loaded()
        self._exchange.compute_scale()
        # Most steps ask nothing of an arrival. That is looked up once here, not per parameter.
        step.fast_path = (
            step.times is None and not self._usage.records_use and not self._usage.is_static
        )

    def _is_last_call(self, step: Step, index: int) -> bool:
        """Whether a parameter's hook will not be called again in this step (static graph)."""
        if self._usage.counts is None:
            step.hook_calls_left[index] += 1
            step.hook_call_order.append(index)
            return False
        calls_left = step.hook_calls_left[index] = step.hook_calls_left[index] - 1
        if calls_left < 0:
            self._errors.changed([index], came=True)
        return calls_left == 0

    def _mark_unused(self, step: Step) -> None:
        """Marks the parameters ready that this backward pass will not reach."""
        usage = self._usage
        step.unused_marked = True
        if usage.finds_unused:
            step.unused = self.accumulators.out_of_reach()
            if usage.has_stale_marks:
                every = enumerate(self._parameters)
                usage.clear_stale_marks([i for i, entry in every if entry.parameter.grad is None])
        step.needed_buckets = usage.agree_on_needed(self._exchange.buckets, step.unused)
        # A bucket of nothing else is full by this, and may be launched before any gradient.
        for index in step.unused:
            self.mark_ready(step, index)

    def mark_ready(self, step: Step, index: int) -> None:
        """Marks a parameter's gradient ready, and launches buckets that are full by it."""
        step.ready.append(index)
        bucket, copies = self._location[index]
        if copies is not None:
            copies.fill_large(index, step.scale)
        bucket.pending -= 1
        if bucket.pending <= 0:
            self._exchange.launch_ready()

    # ---- the end

    def _ended(self) -> None:
        step, exchange = self._exchange.step, self._exchange
        step.is_open = step.fast_path = False
        if not step.expecting:
            if self._precision is not None:
                self._precision.restore()
            return
        try:
            if self._usage.is_static and not self._end_static(step):
                return
            if step.launched == len(exchange.buckets):
                step.was_nested = is_nested()
                self.finish(step)
        except BaseException:
            exchange.step.is_open = True  # it raises
            exchange.report_abort()
            raise

    def _end_static(self, step: Step) -> bool:
        """Whether the whole pass has ended, and not a reentrant pass within it."""
        launched_all = step.launched == len(self._exchange.buckets)
        if is_nested() and step.forward_in_pass == NO_BACKWARD and not launched_all:
            return False
        if self._usage.is_first_static_step:
            self._learn_static_graph(step)
        elif not launched_all:
            self._errors.changed(self.missing(), came=False)
        return True

    def _learn_static_graph(self, step: Step) -> None:
        """Launches everything in the first step of a static graph, and records its hook calls."""
        usage = self._usage
        contradictions = usage.record_static_graph(step.hook_calls_left)
        if contradictions:
            self._errors.changed(contradictions, came=True)
        step.unused, step.unused_marked = list(usage.never_used), True
        step.needed_buckets = usage.agree_on_needed(self._exchange.buckets, step.unused)
        # A parameter that is used several times is ready when its hook is called the last time.
        by_last_call = list(dict.fromkeys(reversed(step.hook_call_order)))[::-1]
        for index in by_last_call + step.unused:
            self.mark_ready(step, index)

    def finish(self, step: Step) -> None:
        """Waits for all buckets in order and writes the averaged gradients."""
        exchange = self._exchange
        step.expecting = False
        if step.times is not None:
            step.times.mark("backward_ended")
        exchange.launcher.events.backward_finished()
        if self._precision is not None:
            self._precision.restore()
        exchange.finish_all()
        exchange.wait_for_futures()
        if self._usage.finds_unused:
            step.used = self._usage.used.finish_step()
        self._land(step)

    def _land(self, step: Step) -> None:
        unused = set(step.unused)
        arrived = [index for index in step.ready if index not in unused]
        self._plan.step_ended(arrived + step.unused)
        self._history.gradients_written(step)
        step.outcomes = []  # their tensors are not needed any more, the step is kept
        self.unreduced.gradients_written(step)
        self._exchange.launcher.step += 1
        # The state is notified last, when the reducer is between two steps.
        self._exchange.begin(Step())
        self._exchange.launcher.events.gradients_written(step.unwritten)

    def missing(self) -> list[int]:
        """Returns the parameters whose gradients have not arrived in this step."""
        return sorted(set(range(len(self._parameters))) - set(self._exchange.step.ready))


class History:
    """Holds the recorded steps, and facts of the last one.

    Args:
        buckets: the buckets of the first step.

    Attributes:
        timeline: the recorded steps.
        on_recorded: called after each recorded step, if given.
        first_sizes: bytes of each bucket of the first step.
        sent: number of buckets that the last step has sent.
        unused: indices of the parameters that the last step's backward pass did not reach; None
            before the first step.
        same_unused: whether the unused parameters were the same in every step.
    """

    def __init__(self, buckets: Sequence[BucketBase]) -> None:
        self.timeline = Timeline()
        self.on_recorded: Callable[[], None] | None = None
        self.first_sizes = [bucket.nbytes for bucket in buckets]
        self.sent = 0
        self.unused: list[int] | None = None
        self.same_unused = True
        self._clock = clock_of(buckets[0].buffer.device)
        self._begun: StepTimes | None = None  # of the step whose forward pass has begun

    def forward_begins(self, step: int) -> None:
        """Begins a record of the step with this number, if it is to be recorded."""
        self._begun = self.timeline.begins(step, self._clock)

    def backward_begins(self) -> StepTimes | None:
        """Returns the step's record, if there is one, and ends its forward part."""
        times, self._begun = self._begun, None
        if times is not None:
            times.mark("backward_began")
        return times

    def gradients_written(self, step: Step) -> None:
        """Records a step whose gradients were averaged."""
        if self.unused is not None and self.unused != step.unused:
            self.same_unused = False
        self.unused = step.unused
        self.sent = sum(not outcome.is_skipped for outcome in step.outcomes)
        if step.times is not None:
            step.times.mark("finished")
            self.timeline.add(step.times)
            if self.on_recorded is not None:
                self.on_recorded()
