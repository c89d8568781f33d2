"""One step's buckets: launched in order, waited for in order, written to ``.grad``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ddp_core.reducer.flat import FlatBucket
from ddp_core.reducer.graph_errors import twice_error
from ddp_core.reducer.launch import Launcher, Outcome
from ddp_core.reducer.optimizer import StepsInBackward
from ddp_core.reducer.parameters import Trained
from ddp_core.reducer.plan import BucketPlan
from ddp_core.reducer.precision import Precision
from ddp_core.reducer.ranges import named_range
from ddp_core.reducer.step import ReducerSettings, Step
from ddp_core.reducer.timeline import BucketTimes
from ddp_core.reducer.unused import Usage

__all__ = ["BucketExchange"]


class BucketExchange:
    """The buckets of a model, and what happens to them in the step under way.

    Args:
        parameters: those that require a gradient, in registration order; the same on all ranks.
        group: ranks to average over.
        precision: exchanges parameters for low-precision ones, if given.
        name: of the reducer, the same on all ranks; distinguishes reducers of one group.
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
        self.device, self.rank = self.parameters[0].parameter.device, group.rank()
        self.launcher = Launcher(group, name)
        self.usage = Usage(len(self.parameters), settings, group, self.device)
        self.plan = BucketPlan(self.parameters, settings.caps, group, self.device)
        self.plan.static_graph = settings.static_graph
        self.plan.follows_arrival = settings.static_graph or not settings.find_unused
        self.optimizer: StepsInBackward | None = None
        self.buckets: list[FlatBucket] = []
        self._effective: dist.Work | None = None  # counts the ranks that have input (join)
        self._futures: list[Any] = []  # of the buffer hook, awaited with the gradients
        self._step = Step()
        self._plain = False  # an arrival is nothing but an arrival
        self._backward_open = False  # a backward pass is under way, or has raised
        self._install(self.plan.initial())

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

    def _begin_step(self, step: Step) -> None:
        self._step = step
        self._backward_open = self._plain = False
        if step.complete:
            self._effective, self._futures = None, []
        for bucket in self.buckets:
            bucket.reset()

    # ---- launching

    def _launch_ready(self) -> None:
        """Launches, in index order, all buckets whose turn has come."""
        step = self._step
        if len(set(step.marked)) != len(step.marked):
            index = next(i for i in step.marked if step.marked.count(i) > 1)
            message = twice_error(self.parameters[index].name, index)
            self.launcher.report(message)
            raise RuntimeError(message)
        while step.launched < len(self.buckets) and not self.buckets[step.launched].pending:
            bucket = self.buckets[step.launched]
            step.launched += 1
            step.outcomes.append(self._launch(bucket))
            # While parameters are low-precision copies, there is nothing to step.
            if self.optimizer is not None and self.optimizer.early and not self._is_low:
                self._finish_early()
        if step.launched == len(self.buckets) and self.usage.finds:
            self.usage.used.all_reduce(self._unused_in_views())

    def _unused_in_views(self) -> list[int]:
        """Parameters whose gradient gets the bucket's result though this rank does not use them."""
        if not (self.settings.as_view and self.launcher.events.wants_left_alone):
            return []
        used = self.usage.used
        return [
            index
            for bucket in self.buckets
            for slot, index in enumerate(bucket.members)
            if not used.is_used(index) and bucket.is_in_view(slot)
        ]

    def _launch(self, bucket: FlatBucket) -> Outcome:
        step = self._step
        if step.needed is None or step.needed[bucket.number]:
            with named_range("collect gradients", bucket.number):
                gradients = [parameter.grad for parameter in bucket.parameters]
                bucket.fill(gradients, None if step.scale is None else step.divisor)
        try:
            return self._send(bucket)
        except Exception:
            step.expecting = self._plain = False
            raise

    def _send(self, bucket: FlatBucket) -> Outcome:
        """Starts its exchange, unless no rank needs it."""
        needed, is_last = self._step.needed, bucket is self.buckets[-1]
        if needed is not None:
            if not needed[bucket.number]:
                return Outcome()
            is_last = not any(needed[bucket.number + 1 :])
        return self.launcher.launch(bucket, is_last=is_last, times=self._times_of(bucket))

    def _settle_scale(self) -> None:
        """Sums are divided by the number of ranks, or of those that still have input."""
        step = self._step
        step.divisor = self.group.size()
        if self._effective is not None:
            self._effective.wait()
            step.divisor = int(self._effective.get_future().value()[0].item())
        step.scale = None if self.launcher.hook is not None else 1.0 / step.divisor

    # ---- finishing

    def _finish_early(self) -> None:
        """Buckets that are averaged already, while backward goes on (optimizer in backward)."""
        step = self._step
        while step.finished < len(step.outcomes):
            members = self.buckets[step.finished].members
            if self.usage.tracks and not self.usage.used.all_used(members):
                return  # the other ranks' map is needed
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
            unused = self.usage.globally_unused(bucket.members) if step.unused_known else None
            self._note_left_alone(bucket, unused)
            with named_range("write gradients", bucket.number):
                bucket.scatter(result, unused)
            if self.optimizer is not None:
                self.optimizer.bucket_averaged(bucket)
        step.finished += 1

    def _finish_all(self) -> None:
        """All buckets that were launched."""
        while self._step.finished < len(self._step.outcomes):
            self._finish_next()
        if self.optimizer is not None:
            self.optimizer.all_averaged()

    def _note_left_alone(self, bucket: FlatBucket, unused: Sequence[bool] | None) -> None:
        """Of the parameters that no rank uses, those whose gradient is not written to.

        One that is its bucket's view has the result, used or not. The ranks have told each other,
        for one without inputs (join) cannot see it.
        """
        if unused is None or not self.launcher.events.wants_left_alone:
            return
        finds, used = self.usage.finds, self.usage.used
        self._step.left_alone += [
            bucket.parameters[slot]
            for slot, index in enumerate(bucket.members)
            if unused[slot] and not (used.in_views(index) if finds else bucket.is_in_view(slot))
        ]

    def _tell_abandoned(self) -> None:
        """Says once that this step will not land; held-back buckets are let go."""
        step = self._step
        if not step.complete and not step.abandoned:
            step.abandoned = True
            self.launcher.events.step_abandoned()

    @property
    def _is_low(self) -> bool:
        return self.precision is not None and self.precision.is_low

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
        self._begin_step(Step(complete=False))
        self.launcher.attempt += 1
        try:
            self._exchange_zeros()
        except BaseException:
            self._tell_abandoned()
            self._begin_step(Step())
            raise

    def _exchange_zeros(self) -> None:
        """The collectives of the others' step, in their order: see `_backward_ended`."""
        step, usage, launcher = self._step, self.usage, self.launcher
        if usage.finds:
            usage.used.forget_step()
        if usage.learns:
            usage.learn_of_others()
        step.needed = usage.agree_on_needed(self.buckets, range(len(self.parameters)))
        for bucket in self.buckets:
            bucket.clear()
            step.outcomes.append(self._send(bucket))
        if usage.finds:
            usage.used.all_reduce()
        launcher.events.no_more_buckets()
        for bucket, outcome in zip(self.buckets, step.outcomes, strict=True):
            if not outcome.is_skipped:
                launcher.finish(bucket, outcome, None)
                self._note_left_alone(bucket, usage.globally_unused(bucket.members))
        launcher.await_futures(self._futures)
        if usage.finds:
            usage.used.finish_step()
        launcher.step += 1
        self.plan.step_ended(None)
        self._begin_step(Step())
        launcher.events.step_landed(step.left_alone)

    def await_futures(self, futures: Sequence[Any]) -> None:
        """Futures that are waited for at the end of backward (buffer hook)."""
        self._futures.extend(futures)
