"""What a reducer remembers of the steps that are over."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ddp_core.exchange.clocks import clock_of
from ddp_core.reducer.held import HeldBucket
from ddp_core.reducer.step import Step
from ddp_core.reducer.timeline import StepTimes, Timeline

__all__ = ["History"]


class History:
    """Holds the recorded steps, and the facts of the last one.

    Args:
        buckets: those of the first step.

    Attributes:
        timeline: the recorded steps.
        on_recorded: called after each of them, if given.
        first_sizes: bytes of each bucket of the first step.
        sent: number of buckets that the last step has sent.
        unused: indices of the parameters to which the last step's backward pass did not come;
            None: there was no step yet.
        same_unused: they were the same in every step.
    """

    def __init__(self, buckets: Sequence[HeldBucket]) -> None:
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
        """Returns the step's record, if there is one; forward is over."""
        times, self._begun = self._begun, None
        if times is not None:
            times.mark("backward_began")
        return times

    def step_landed(self, step: Step) -> None:
        """Takes note of a step whose gradients were averaged."""
        if self.unused is not None and self.unused != step.unused:
            self.same_unused = False
        self.unused = step.unused
        self.sent = sum(not outcome.is_skipped for outcome in step.outcomes)
        if step.times is not None:
            step.times.mark("finished")
            self.timeline.add(step.times)
            if self.on_recorded is not None:
                self.on_recorded()
