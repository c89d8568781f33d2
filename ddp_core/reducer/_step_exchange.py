"""Launches one step's buckets in order, waits for them in order, and writes ``.grad``."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from ddp_core.exchange._clocks import clock_of
from ddp_core.exchange._errors import CollectiveError
from ddp_core.reducer._buckets import BucketBase
from ddp_core.reducer._launch import Launcher, Outcome, Step, named_range
from ddp_core.reducer._misuse import GraphErrors
from ddp_core.reducer._optimizer import OptimizersInBackward
from ddp_core.reducer._parameters import Trained
from ddp_core.reducer._precision import Precision
from ddp_core.reducer._timeline import BucketTimes
from ddp_core.reducer._unused import Usage

__all__ = [
    "StepExchange",
    "UnusedGradients",
]


class StepExchange:
    """Launches a model's buckets in the step under way, and waits for them.

    Args:
        buckets: in launch order; the list's contents may be replaced.
        parameters: those that require a gradient, in registration order.
        launcher: starts and ends the exchange of one bucket.
        usage: which parameters the ranks use.
        errors: raises if a bucket gets a gradient twice.
        unused_gradients: finds the parameters whose gradients are not written.
        precision: exchanges parameters for low-precision ones, if given.

    Attributes:
        step: the step under way, or an idle one.
        optimizer: steps each bucket that is averaged, if given.
    """

    def __init__(
        self,
        buckets: list[BucketBase],
        parameters: Sequence[Trained],
        *,
        launcher: Launcher,
        usage: Usage,
        errors: GraphErrors,
        unused_gradients: UnusedGradients,
        precision: Precision | None,
    ) -> None:
        self.buckets, self.parameters = buckets, parameters
        self.launcher, self.usage, self._errors = launcher, usage, errors
        self._precision, self.unused_gradients, self.step = precision, unused_gradients, Step()
        self.optimizer: OptimizersInBackward | None = None
        self._world_size = launcher.group.size()
        self._effective: dist.Work | None = None  # counts the ranks that have input (join)
        self._futures: list[Any] = []  # of the buffer hook, awaited with the gradients

    # ---- the step

    def begin(self, step: Step) -> None:
        """Begins another step, and drops the results of the one before."""
        self.step = step
        if step.complete:
            self._effective, self._futures = None, []
        for bucket in self.buckets:
            bucket.reset()

    def set_effective_ranks(self, work: dist.Work, *, static_world_size: bool) -> None:
        """Divides gradients by the ranks with inputs, which ``work`` counts, unless static."""
        self._effective = None if static_world_size else work

    def compute_scale(self) -> None:
        """Computes the divisor of sums: the number of ranks, or of ranks that still have inputs."""
        self.step.divisor = self._world_size
        if self._effective is not None:
            self._effective.wait()
            self.step.divisor = int(self._effective.get_future().value()[0].item())
        # A hook averages by itself.
        self.step.scale = None if self.launcher.hook is not None else 1.0 / self.step.divisor

    def await_futures(self, futures: Sequence[Any]) -> None:
        """Adds futures of the buffer hook that the end of backward waits for."""
        self._futures.extend(futures)

    def wait_for_futures(self) -> None:
        """Waits for the futures of the buffer hook."""
        self.launcher.await_futures(self._futures)

    def report_abort(self) -> None:
        """Notifies the hook's state, once, of the abort, so that it releases held buckets."""
        step = self.step
        if not step.complete and not step.abort_reported:
            step.abort_reported = True
            begun = step.is_open or step.ready or step.outcomes
            self.launcher.step_aborted(len(step.outcomes) if begun else None)

    def abort(self) -> None:
        """Aborts a step whose backward pass raised; launched exchanges must not write any more."""
        self.report_abort()
        if self._precision is not None:
            self._precision.restore()
        if self.optimizer is not None:
            self._finish_aborted()
        # Fewer than there are buckets may have been launched.
        for bucket, outcome in zip(self.buckets, self.step.outcomes, strict=False):
            self.launcher.settle(bucket, outcome)
        self.launcher.settle_futures(self._futures)
        self.usage.has_stale_marks = True
        self.begin(Step())

    def _finish_aborted(self) -> None:
        """Steps the launched buckets, as some ranks already have: parameters stay equal."""
        self.step.unused_known = False
        with contextlib.suppress(CollectiveError):  # the step has raised already
            self.finish_all()

    # ---- launching

    def launch_ready(self) -> None:
        """Launches, in index order, all buckets whose turn has come."""
        step = self.step
        # Once per bucket that is full: per gradient it would be a look-up in the hot path.
        if len(set(step.ready)) != len(step.ready):
            self._errors.twice(next(i for i in step.ready if step.ready.count(i) > 1))
        while step.launched < len(self.buckets) and not self.buckets[step.launched].pending:
            bucket = self.buckets[step.launched]
            step.launched += 1
            step.outcomes.append(self._launch(bucket))
            # While parameters are low-precision copies, there is nothing to step.
            if self.optimizer is not None and not self.is_low:
                self._finish_early()
        if step.launched == len(self.buckets) and self.usage.finds_unused:
            self.usage.used.all_reduce(self.unused_gradients.in_views())

    def _launch(self, bucket: BucketBase) -> Outcome:
        step = self.step
        if step.needed_buckets is None or step.needed_buckets[bucket.number]:
            with named_range("collect gradients", bucket.number):
                gradients = [parameter.grad for parameter in bucket.parameters]
                bucket.fill(gradients, None if step.scale is None else step.divisor)
        try:
            return self.send(bucket)
        except Exception:
            # The others will not come to what follows: no later bucket is launched.
            step.expecting = step.fast_path = False
            raise

    def send(self, bucket: BucketBase) -> Outcome:
        """Starts a bucket's exchange, unless no rank needs it."""
        needed, is_last = self.step.needed_buckets, bucket is self.buckets[-1]
        if needed is not None:
            if not needed[bucket.number]:
                return Outcome(bucket.buffer.device)
            # ``is_last`` marks the last bucket that the hook gets, not the last that there is.
            is_last = not any(needed[bucket.number + 1 :])
        return self.launcher.launch(bucket, is_last=is_last, times=self.times_of(bucket))

    # ---- finishing

    def _finish_early(self) -> None:
        """Finishes buckets that are averaged already, during backward (optimizer in backward)."""
        step = self.step
        while step.finished < len(step.outcomes):
            members = self.buckets[step.finished].members
            if self.usage.records_use and not self.usage.used.all_used(members):
                return  # the other ranks' map is needed
            if not step.outcomes[step.finished].is_done():
                return
            self._finish_next()

    def _finish_next(self) -> None:
        """Waits for the next bucket and writes its averaged gradients."""
        step = self.step
        bucket, outcome = self.buckets[step.finished], step.outcomes[step.finished]
        if not outcome.is_skipped:
            result = self.launcher.finish(bucket, outcome, self.times_of(bucket))
            if outcome.future is not None and step.divisor != self._world_size:
                # Hooks average over all ranks; those without input contributed zeros.
                result = result * (self._world_size / step.divisor)
            unused = self.usage.globally_unused(bucket.members) if step.unused_known else None
            step.unwritten += self.unused_gradients.in_bucket(bucket, unused)
            if not self.launcher.hook_owns_gradients:
                with named_range("write gradients", bucket.number):
                    bucket.scatter(result, unused)
            if self.optimizer is not None:
                self.optimizer.bucket_averaged(bucket)
        step.finished += 1

    def finish_all(self) -> None:
        """Waits for all buckets that were launched, and writes their gradients."""
        while self.step.finished < len(self.step.outcomes):
            self._finish_next()
        self.launcher.record_enqueued()

    @property
    def is_low(self) -> bool:
        """Whether parameters are low-precision copies now."""
        return self._precision is not None and self._precision.is_low

    def times_of(self, bucket: BucketBase) -> BucketTimes | None:
        """Returns a bucket's record, if the step is recorded."""
        times = self.step.times
        if times is None:
            return None
        if len(times.buckets) != len(self.buckets):
            times.buckets = [
                BucketTimes(number, entry.nbytes, clock=clock_of(entry.buffer.device))
                for number, entry in enumerate(self.buckets)
            ]
        return times.buckets[bucket.number]


# ---- parameters that no rank uses


class UnusedGradients:
    """Finds unused parameters for the hook's state, which keeps what it has sent for them.

    A gradient that is a view of its bucket receives the result, used or not.

    Args:
        buckets: of the model, as they are now.
        as_view: gradients are views of the buckets.
        launcher: has the hook, whose state may not ask for unused parameters.
    """

    def __init__(
        self, buckets: Sequence[BucketBase], usage: Usage, launcher: Launcher, *, as_view: bool
    ) -> None:
        self._buckets, self._as_view = buckets, as_view
        self._usage, self._launcher = usage, launcher

    def in_views(self) -> list[int]:
        """Returns unused parameters whose gradient receives the bucket's result all the same.

        The ranks exchange this, since a rank without inputs (join) cannot see it.
        """
        if not (self._as_view and self._launcher.events.wants_unused):
            return []
        used = self._usage.used
        return [
            index
            for bucket in self._buckets
            for slot, index in enumerate(bucket.members)
            if not used.is_used(index) and bucket.is_in_view(slot)
        ]

    def in_bucket(self, bucket: BucketBase, unused: Sequence[bool] | None) -> list[nn.Parameter]:
        """Returns the unused parameters of one bucket whose gradient is not written.

        Args:
            unused: by slot, whether no rank uses the parameter; None: all are in use.
        """
        if unused is None or not self._launcher.events.wants_unused:
            return []
        finds, used = self._usage.finds_unused, self._usage.used
        return [
            bucket.parameters[slot]
            for slot, index in enumerate(bucket.members)
            if unused[slot] and not (used.in_views(index) if finds else bucket.is_in_view(slot))
        ]
