"""Averages gradients step by step; see ``docs/design/reducer.md``."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ddp_core.exchange._errors import listed
from ddp_core.reducer._autograd import NO_BACKWARD, Accumulators, backward_number
from ddp_core.reducer._backward import Backward, History
from ddp_core.reducer._buckets import BucketBase, BucketSet
from ddp_core.reducer._failures import rebuild_failed
from ddp_core.reducer._launch import Launcher, ReducerSettings, Step
from ddp_core.reducer._misuse import GraphErrors
from ddp_core.reducer._parameters import Trained
from ddp_core.reducer._plan import BucketPlan
from ddp_core.reducer._precision import Precision
from ddp_core.reducer._step_exchange import StepExchange, UnusedGradients
from ddp_core.reducer._timeline import Timeline
from ddp_core.reducer._unused import Usage

__all__ = ["Reducer", "agree_on_reduce", "explicit_reduce", "reduce_at_point", "shadow"]


logger = logging.getLogger("ddp_core")


class Reducer:
    """Averages the gradients of one model in backward.

    Forward passes call it at their begin and end; :class:`Backward` receives gradients.

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
        self.group, self.settings = group, settings
        device = self.device = self.parameters[0].parameter.device
        self.launcher = Launcher(group, name, device)
        self.usage = Usage(len(self.parameters), settings, group, device)
        self.plan = BucketPlan(self.parameters, settings.caps, group, device)
        self.plan.static_graph = settings.static_graph
        # As in torch: if the used parameters change, one step's order says nothing about the next.
        self.plan.follows_arrival = settings.static_graph or not settings.find_unused
        # A low-precision gradient is not of the dtype that its parameter has between steps.
        as_view = settings.as_view and precision is None
        self._installed = BucketSet(
            self.parameters,
            dtype=settings.dtype,
            as_view=as_view,
            copies_at_once=precision is None,
        )
        self._installed.install(self.plan.initial())
        self._errors = GraphErrors(self.parameters, self.launcher)
        launcher, buckets = self.launcher, self.buckets
        self.usage.used.wait_for = lambda work: launcher.await_work(
            work, device, after=len(buckets) - 1
        )
        self.exchange = StepExchange(
            self.buckets,
            self.parameters,
            launcher=self.launcher,
            usage=self.usage,
            errors=self._errors,
            unused_gradients=UnusedGradients(
                self.buckets, self.usage, self.launcher, as_view=as_view
            ),
            precision=precision,
        )
        self.history = History(self.buckets)
        self.backward = Backward(
            self.exchange,
            self._installed,
            plan=self.plan,
            history=self.history,
            errors=self._errors,
            precision=precision,
        )

    @property
    def buckets(self) -> list[BucketBase]:
        """Returns the buckets in the order in which they are launched."""
        return self._installed.list

    @property
    def accumulators(self) -> Accumulators:
        """Returns autograd's nodes that write the gradients."""
        return self.backward.accumulators

    @property
    def timeline(self) -> Timeline:
        """Returns the recorded steps."""
        return self.history.timeline

    @property
    def under_way(self) -> bool:
        """Whether a backward pass has begun to reduce gradients and has not finished."""
        return self.exchange.step.expecting and bool(self.exchange.step.ready)

    # ---- around forward

    def prepare_for_forward(self) -> None:
        """Aborts an unfinished step, and rebuilds buckets, before a forward pass.

        Raises:
            RuntimeError: the step before did not reduce all its gradients.
        """
        # Before the buckets change: the error names what did not come to the old ones.
        self.check_finished()
        if self.backward.has_raised:
            self.exchange.abort()
        self.backward.unreduced.forward_begins()
        if self.backward.unreduced.in_hold:  # ranks may run different numbers of passes
            # A forward pass outside had no backward pass: torch's class would average the next.
            self.exchange.step.expecting = False
        else:
            self.launcher.abort_agreement.agree()
            self.rebuild()

    def is_recomputed(self) -> bool:
        """Whether a forward pass now belongs to the backward pass of a step under way.

        Activation checkpointing runs a forward pass again, for its activations only.
        """
        number, step = backward_number(), self.exchange.step
        if number == NO_BACKWARD or not step.expecting or self.backward.has_raised:
            return False
        step.recomputed_in = number
        return True

    def time_forward(self) -> None:
        """Begins the step's record, if it is to be recorded."""
        self.history.forward_begins(self.launcher.step)

    def set_effective_ranks(self, work: dist.Work, *, static_world_size: bool) -> None:
        """Divides gradients by the ranks with inputs, which ``work`` counts, unless static."""
        self.exchange.set_effective_ranks(work, static_world_size=static_world_size)

    def prepare_for_backward(self, outputs: Sequence[Any] = ()) -> None:
        """Begins a step, after a forward pass whose backward pass averages gradients."""
        if not self.backward.unreduced.in_hold:  # else it is a trainer's call, before `reduce`
            self.begin_step()

    def begin_step(self) -> None:
        """Begins a step, with or without a backward pass."""
        times = self.history.backward_begins()
        self.launcher.step_begins()
        self.exchange.begin(
            Step(
                expecting=True,
                complete=False,
                forward_in_pass=backward_number(),
                unused=list(self.usage.never_used),
                hook_calls_left=self.usage.calls(),
                times=times,
            )
        )

    def await_futures(self, futures: Sequence[Any]) -> None:
        """Adds futures of the buffer hook that the end of backward waits for."""
        self.exchange.await_futures(futures)

    # ---- between steps

    def rebuild(self) -> None:
        """Lays buckets out anew, once the order of gradients is known or a layout was requested."""
        self.launcher.events.compare_ranks()  # outside of the try: its error says what to do
        try:
            members = self.plan.rebuild(self._installed.members)
        except RuntimeError as error:
            raise rebuild_failed(error, self.launcher.step) from error
        if members is not None and members != self._installed.members:
            self._installed.install(members)
            logger.info("Reducer buckets have been rebuilt in this iteration.")

    def keep_registered_buckets(self) -> None:
        """Keeps buckets in registration order; all ranks call it, before the first step."""
        self.plan.follows_arrival, self.plan.splits.ignored = False, True
        self._installed.install(self.plan.initial())

    def check_finished(self) -> None:
        """Raises if the last backward pass did not reduce all its gradients."""
        step = self.exchange.step
        begun = step.ready or (self.usage.is_first_static_step and any(step.hook_calls_left))
        if begun and not step.complete and not step.is_open:
            self.exchange.report_abort()
            self._errors.unused(self.backward.missing(), finds=self.usage.finds_unused)

    def drop_step(self) -> None:
        """Aborts the step under way, if any; accumulated gradients stay."""
        if not self.exchange.step.complete:
            self.exchange.abort()

    def drop_raised_step(self) -> None:
        """Aborts, outside of backward, a step whose backward pass has raised."""
        if self.exchange.step.is_open and backward_number() == NO_BACKWARD:
            self.exchange.abort()

    def shadow(self, *, at_point: bool = False) -> None:
        """Takes part in a backward pass or a ``reduce`` with zeros, on a rank without inputs."""
        shadow(self.exchange, self.plan, at_point=at_point)

    def continue_from(self, before: Reducer) -> None:
        """Continues from another reducer of the same model, which had other ranks."""
        self.launcher.step = before.launcher.step
        self.launcher.abort_agreement.first_step = before.launcher.step
        self.history.timeline = before.timeline
        self.history.on_recorded = before.history.on_recorded
        self.exchange.optimizer = before.exchange.optimizer
        self.backward.unreduced.in_hold = before.backward.unreduced.in_hold
        # The hook's request holds for these ranks, too; the buckets need not.
        self.plan.request(before.plan.group_of, before.plan.caps)


# ---- a step without a backward pass


def reduce_at_point(backward: Backward, exchange: StepExchange, plan: BucketPlan) -> None:
    """Averages the gradients that are in ``.grad``, as the end of a backward pass would.

    Raises:
        RuntimeError: no rank has accumulated gradients, or a rank lacks some parameters' gradients.
    """
    step, unreduced = exchange.step, backward.unreduced
    missing = [i for i, entry in enumerate(exchange.parameters) if entry.parameter.grad is None]
    came = unreduced.has_new and len(missing) < len(exchange.parameters)
    try:
        with explicit_reduce(exchange.usage):
            agree_on_reduce(exchange, came=came, missing=missing)
            unreduced.allow_optimizers()
            exchange.compute_scale()
            _mark_all_ready(backward, exchange, missing, unreduced.order or plan.arrival)
            backward.finish(step)
    except BaseException:
        exchange.abort()
        raise


@contextmanager
def explicit_reduce(usage: Usage) -> Iterator[None]:
    """Makes ranks exchange which parameters they use, since no backward pass shows it."""
    usage.at_point = True
    try:
        yield
    finally:
        usage.at_point = False


def agree_on_reduce(
    exchange: StepExchange, *, came: bool = False, missing: list[int] | None = None
) -> None:
    """Decides, on all ranks alike, whether there is something to average; all ranks call it.

    Args:
        came: whether this rank has accumulated gradients.
        missing: parameters that have no gradient here.

    Raises:
        RuntimeError: there is nothing to average, or a rank lacks gradients of parameters.
    """
    launcher, usage = exchange.launcher, exchange.usage
    gone = [] if usage.finds_unused else sorted({*(missing or ())} - {*usage.never_used})
    lacks = came and bool(gone)
    device = exchange.buckets[0].buffer.device
    with launcher.message_stream():
        votes = torch.tensor([came, lacks], dtype=torch.int32, device=device)
        work = dist.all_reduce(votes, group=launcher.group, async_op=True)
        launcher.await_message(work, device, "agreeing on what to reduce")
        ranks, lacking = votes.tolist()
    if not ranks:
        raise RuntimeError(
            "reduce(): no rank has a gradient that came since gradients were averaged. Was it "
            "called twice, or after a backward pass outside of hold(), which averages by itself?"
        )
    if lacking:
        names = listed([exchange.parameters[index].name for index in gone], 20)
        raise RuntimeError(
            f"reduce(): {lacking} of the ranks have no gradient of some parameters"
            f"{f' (here {names})' if lacks else ''}. Set find_unused_parameters=True where passes "
            f"do not use all parameters"
        )


def _mark_all_ready(
    backward: Backward, exchange: StepExchange, missing: list[int], known: list[int]
) -> None:
    """Marks all gradients ready, in the order of their arrival; zeros where there is none."""
    step, usage = exchange.step, exchange.usage
    everything = range(len(exchange.parameters))
    if usage.finds_unused:
        if usage.has_stale_marks:
            usage.clear_stale_marks(missing)
        step.unused = missing
    step.unused_marked = True
    step.needed_buckets = usage.agree_on_needed(exchange.buckets, everything)
    for index in dict.fromkeys([*known, *everything]):
        backward.mark_ready(step, index)


# ---- a step without inputs


def shadow(exchange: StepExchange, plan: BucketPlan, *, at_point: bool) -> None:
    """Takes part in one backward pass, or one ``reduce``, with zero gradients."""
    exchange.begin(Step(complete=False))
    exchange.launcher.step_begins()
    try:
        if at_point:
            with explicit_reduce(exchange.usage):
                agree_on_reduce(exchange)
                _exchange_zeros(exchange, plan)
        else:
            _exchange_zeros(exchange, plan)
    except BaseException:
        exchange.report_abort()
        exchange.begin(Step())
        raise


def _exchange_zeros(exchange: StepExchange, plan: BucketPlan) -> None:
    """Issues the collectives of the other ranks' step, in the order of `Backward.finish`."""
    step, usage, launcher = exchange.step, exchange.usage, exchange.launcher
    if usage.finds_unused:
        usage.used.reset_flags()
    elif usage.is_first_static_step:
        usage.join_static_graph()
    step.needed_buckets = usage.agree_on_needed(exchange.buckets, range(len(exchange.parameters)))
    for bucket in exchange.buckets:
        bucket.clear()
        step.outcomes.append(exchange.send(bucket))
    if usage.finds_unused:
        usage.used.all_reduce()
    launcher.events.backward_finished()
    # The results are not written: at the end of `join` all ranks take the model of one that has
    # trained last.
    for bucket, outcome in zip(exchange.buckets, step.outcomes, strict=True):
        if not outcome.is_skipped:
            launcher.finish(bucket, outcome, None)
            unused = usage.globally_unused(bucket.members)
            step.unwritten += exchange.unused_gradients.in_bucket(bucket, unused)
    exchange.wait_for_futures()
    if usage.finds_unused:
        usage.used.finish_step()
    launcher.step += 1
    plan.step_ended(None)
    exchange.begin(Step())
    launcher.events.gradients_written(step.unwritten)
