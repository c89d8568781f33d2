"""The reducer: collects gradients in buckets, launches them in order, waits at the end of backward.

One backward pass, see ``docs/design/reducer.md``:

    arrived(i) ... bucket full -> launch in index order -> (hook or all-reduce) -> future
    end of backward -> wait for each bucket in order -> param.grad
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from ddp_core.exchange.errors import CollectiveError
from ddp_core.exchange.task import clock
from ddp_core.reducer.accumulators import (
    NO_BACKWARD,
    Accumulators,
    backward_number,
    call_after_backward,
    is_nested,
)
from ddp_core.reducer.graph_errors import (
    changed_error,
    full_precision_error,
    late_error,
    twice_error,
    unused_error,
)
from ddp_core.reducer.in_flight import BucketExchange
from ddp_core.reducer.parameters import Trained
from ddp_core.reducer.precision import Precision
from ddp_core.reducer.step import ReducerSettings, Step
from ddp_core.reducer.timeline import StepTimes, Timeline

__all__ = ["Reducer"]

logger = logging.getLogger("ddp_core")


class Reducer(BucketExchange):
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
        super().__init__(parameters, group, settings, precision=precision, name=name)
        self.timeline = Timeline()
        self.on_recorded: Callable[[], None] | None = None  # a step's times
        self.sent = 0  # buckets, in the last step
        self.unused_parameters: list[int] | None = None  # of the last step
        self.graph_was_static = True  # they were the same in every step
        self._times: StepTimes | None = None  # of the step whose forward pass has begun
        self._opened_in = NO_BACKWARD  # number of the pass that is open
        self._landed: Step | None = None  # the last step, until the next forward
        self._landed_before: Step | None = None  # the last one at that forward
        self._warned = False  # that gradients came after it
        self._has_old_marks = False  # of a step that was abandoned
        self.initial_sizes = [bucket.nbytes for bucket in self.buckets]
        self.accumulators = Accumulators([one.parameter for one in self.parameters], self)

    # ---- autograd's side

    def arrived(self, index: int) -> None:
        """The gradient of parameter ``index`` has been accumulated (or turned out undefined)."""
        if self._plain:
            self._mark_ready(index)
            return
        usage = self.usage
        if usage.tracks and self.parameters[index].parameter.grad is not None:
            usage.used.mark(index)
        if not self._backward_open and (self._step.expecting or self.precision is not None):
            self._open_backward()
        step = self._step
        if not step.expecting:  # no_sync, or a second backward pass without a forward
            if self._landed is not None:
                self._came_late(index)
            return
        if self.settings.static_graph:
            if usage.counts is None:
                step.calls[index] += 1
                step.called.append(index)
                return
            left = step.calls[index] = step.calls[index] - 1
            if left < 0:
                self._graph_changed([index], came=True)
            if left:
                return
        if not step.unused_marked:
            self._mark_unused()
        times = self._times_of(self._place[index][0])
        if times is not None:
            times.gradient_came(clock())
        self._mark_ready(index)

    def came_elsewhere(self, index: int) -> None:
        """A gradient for the parameter as it was with full precision: too late for its bucket."""
        if self._step.expecting and self._is_low:
            name = self.parameters[index].name
            message = full_precision_error(name)
            self.launcher.report(message)
            raise RuntimeError(message)

    def begin_backward(self) -> None:
        """Called at the start of backward where outputs pass through the sink."""
        if self._step.expecting and not self._backward_open:
            self._open_backward()
        step = self._step
        if step.expecting and not self.usage.learns and not step.unused_marked:
            self._mark_unused()

    def _open_backward(self) -> None:
        """The first gradient of a backward pass, or of a reentrant one within it."""
        self._backward_open = True  # still open at the next forward: it has raised
        self._opened_in = backward_number()
        call_after_backward(self._backward_ended)
        step = self._step
        if step.prepared_in == self._opened_in != NO_BACKWARD:
            # The forward pass ran once more in this backward pass, for activations only: the graph
            # is that of a forward pass under no_sync.
            step.expecting, step.complete = False, True
            self._landed = self._landed_before
        if step.expecting and self.plan.loaded:
            message = (
                f"a state was loaded between the forward pass and backward of step "
                f"{self.launcher.step}: this step would be exchanged in other buckets than those "
                f"of the state. Load it before the forward pass"
            )
            self.launcher.report(message)
            raise RuntimeError(message)
        if step.expecting:
            self._settle_scale()
        self._plain = (
            step.expecting
            and step.times is None
            and not self.usage.tracks
            and not self.settings.static_graph
        )

    def _mark_unused(self) -> None:
        """Parameters that this backward pass will not come to count as arrived."""
        step = self._step
        step.unused_marked = True
        if self.usage.finds:
            step.unused = self.accumulators.out_of_reach()
            self._forget_old_marks()
        step.needed = self.usage.agree_on_needed(self.buckets, step.unused)
        for index in step.unused:
            self._mark_ready(index)

    def _forget_old_marks(self) -> None:
        """What an abandoned step has used counts only where its gradients were kept."""
        if self._has_old_marks:
            self._has_old_marks = False
            gone = [
                index for index, one in enumerate(self.parameters) if one.parameter.grad is None
            ]
            self.usage.used.unmark(gone)

    def _mark_ready(self, index: int) -> None:
        step = self._step
        step.marked.append(index)
        bucket, is_large = self._place[index]
        if is_large:
            bucket.take_large(index, step.scale)
        bucket.pending -= 1
        if bucket.pending <= 0:
            self._launch_ready()

    def _came_late(self, index: int) -> None:
        """A gradient after the step's were averaged; it stays this rank's own, as in torch."""
        landed = self._landed
        assert landed is not None
        name = self.parameters[index].name
        if backward_number() == landed.recomputed_in != NO_BACKWARD:
            raise RuntimeError(twice_error(name, index))
        if index in landed.unused and self.settings.static_graph:
            self._graph_changed([index], came=True)
        if self.usage.finds and not landed.used[index]:
            raise RuntimeError(late_error(name))
        if not self._warned:
            self._warned = True
            logger.warning(
                "the gradient of %s came after this step's gradients were averaged, in a backward "
                "pass that has no forward pass of its own: it stays this rank's own until the "
                "next step. To average it, add the losses and call backward once",
                name,
            )

    def _graph_changed(self, indices: Sequence[int], *, came: bool) -> None:
        """Raises on this rank, and tells the others, which would wait for it."""
        names = [self.parameters[index].name for index in indices]
        message = changed_error(names, self.rank, came=came)
        self.launcher.report(message)
        raise RuntimeError(message)

    # ---- the end of backward

    def _backward_ended(self) -> None:
        self._backward_open = self._plain = False
        step = self._step
        if not step.expecting:
            if self.precision is not None:
                self.precision.restore()
            return
        try:
            if self.settings.static_graph and not self._end_static_pass():
                return
            if step.launched == len(self.buckets):
                self._finalize()
        except BaseException:
            self._backward_open = True  # it raises
            self._tell_abandoned()
            raise

    def _end_static_pass(self) -> bool:
        """Whether the pass was the step's whole one, not a reentrant one within it."""
        step = self._step
        if is_nested() and step.prepared_in == NO_BACKWARD and step.launched < len(self.buckets):
            return False
        if self.usage.learns:
            self._learn_static_graph()
        elif step.launched < len(self.buckets):
            self._graph_changed(self._missing(), came=False)
        return True

    def _learn_static_graph(self) -> None:
        """The first step of a static graph: everything is launched now, and counted for later."""
        step, usage = self._step, self.usage
        contradictions = usage.learn(step.calls)
        if contradictions:
            self._graph_changed(contradictions, came=True)
        step.unused, step.unused_marked = list(usage.never), True
        step.needed = usage.agree_on_needed(self.buckets, step.unused)
        by_last_call = list(dict.fromkeys(reversed(step.called)))[::-1]
        for index in by_last_call + step.unused:
            self._mark_ready(index)

    def _finalize(self) -> None:
        """Waits for all buckets in order and writes the averaged gradients."""
        step = self._step
        step.expecting = False
        if step.times is not None:
            step.times.backward_ended = clock()
        self.launcher.events.no_more_buckets()
        if self.precision is not None:
            self.precision.restore()
        self._finish_all()
        self.launcher.await_futures(self._futures)
        if self.usage.finds:
            step.used = self.usage.used.finish_step()
        self._complete_step()

    def _complete_step(self) -> None:
        step = self._step
        unused = set(step.unused)
        arrived = [index for index in step.marked if index not in unused]
        self.plan.step_ended(arrived + step.unused)
        if self.unused_parameters is not None and self.unused_parameters != step.unused:
            self.graph_was_static = False
        self.unused_parameters = step.unused
        self.sent = sum(not outcome.is_skipped for outcome in step.outcomes)
        step.outcomes = []  # their tensors are not needed any more
        if step.times is not None:
            step.times.finished = clock()
            self.timeline.add(step.times)
            if self.on_recorded is not None:
                self.on_recorded()
        self.launcher.step += 1
        self._begin_step(Step())
        self._landed = step
        self.launcher.events.step_landed(step.left_alone)

    # ---- the begin of a step

    def prepare_for_forward(self) -> None:
        """Before a forward pass with gradients: no earlier step is left over, buckets are right.

        Raises:
            RuntimeError: the step before did not reduce all its gradients.
        """
        self.check_finished()
        number = backward_number()
        if self._backward_open and self._opened_in != number:  # it raised
            self._abandon()
        self._landed_before, self._landed = self._landed, None
        self.rebuild()

    def is_recomputed(self) -> bool:
        """Whether a forward pass now is a part of the backward pass of a step under way.

        Activation checkpointing runs it once more, for its activations only.
        """
        number = backward_number()
        if number == NO_BACKWARD or not self._step.expecting:
            return False
        if self._backward_open and self._opened_in != number:  # that one has raised
            return False
        self._step.recomputed_in = number
        return True

    def forget_step(self) -> None:
        """Drops the step that is under way, if any; what was accumulated stays."""
        if not self._step.complete:
            self._abandon()

    def drop_raised_step(self) -> None:
        """Outside of backward: forgets a step whose backward pass has raised."""
        if self._backward_open and backward_number() == NO_BACKWARD:
            self._abandon()

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
            Step(
                expecting=True,
                complete=False,
                prepared_in=backward_number(),
                unused=list(self.usage.never),
                calls=self.usage.calls(),
                times=times,
            )
        )

    def rebuild(self) -> None:
        """Lays buckets out anew, once the order of gradients is known or a layout was asked for."""
        number = self.launcher.step
        self.plan.compare_loaded()
        try:
            members = self.plan.rebuild([bucket.members for bucket in self.buckets])
        except RuntimeError as error:
            raise CollectiveError(
                f"agreeing on new buckets failed before step {number}: {error}. A peer died, or "
                f"the ranks do not run the same code",
                step=number,
                bucket=0,
                round=0,
            ) from error
        if members is not None and members != [bucket.members for bucket in self.buckets]:
            self._install(members)

    def check_finished(self) -> None:
        """Raises if the last backward pass did not reduce all its gradients."""
        step = self._step
        begun = step.marked or (self.usage.learns and any(step.calls))
        if not step.complete and begun and not self._backward_open:
            missing = self._missing()
            names = [self.parameters[index].name for index in missing]
            self._tell_abandoned()
            self.launcher.error = unused_error(missing, names, self.rank, finds=self.usage.finds)
            raise RuntimeError(self.launcher.error)

    def _missing(self) -> list[int]:
        """Parameters whose gradients have not come in this step."""
        return sorted(set(range(len(self.parameters))) - set(self._step.marked))

    def _abandon(self) -> None:
        """Drops a step whose backward pass raised; what it has launched must not write any more."""
        self._tell_abandoned()
        if self.precision is not None:
            self.precision.restore()
        if self.optimizer is not None:
            self._finish_abandoned()
        for bucket, outcome in zip(self.buckets, self._step.outcomes, strict=False):
            self.launcher.settle(bucket, outcome)
        self.launcher.settle_futures(self._futures)
        self._has_old_marks = True
        self._begin_step(Step())

    def _finish_abandoned(self) -> None:
        """Steps what was launched, as some ranks have already: parameters stay equal."""
        self._step.unused_known = False
        with contextlib.suppress(CollectiveError):  # the step has raised already
            self._finish_all()

    # ---- what others ask

    @property
    def under_way(self) -> bool:
        """Whether a backward pass has begun to reduce gradients and has not finished."""
        return self._step.expecting and bool(self._step.marked)

    def follow(self, before: Reducer) -> None:
        """Goes on where another reducer of the same model (with other ranks) has stopped."""
        self.launcher.step, self.timeline = before.launcher.step, before.timeline
        self.optimizer = before.optimizer
        self.plan.request(before.plan.group_of, before.plan.caps)
