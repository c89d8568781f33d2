"""A step of a rank without inputs: it takes part in the collectives of the others."""

from __future__ import annotations

from ddp_core.reducer.in_flight import InFlight
from ddp_core.reducer.named_point import at_named_point, vote
from ddp_core.reducer.plan import BucketPlan
from ddp_core.reducer.step import Step

__all__ = ["shadow"]


def shadow(flight: InFlight, plan: BucketPlan, *, at_point: bool) -> None:
    """Takes part in one backward pass, or one ``reduce``, with zero gradients."""
    flight.begin(Step(complete=False))
    flight.launcher.step_begins()
    try:
        if at_point:
            with at_named_point(flight.usage):
                vote(flight)
                _exchange_zeros(flight, plan)
        else:
            _exchange_zeros(flight, plan)
    except BaseException:
        flight.tell_abandoned()
        flight.begin(Step())
        raise


def _exchange_zeros(flight: InFlight, plan: BucketPlan) -> None:
    """The collectives of the others' step, in their order: see `Backward.finish`."""
    step, usage, launcher = flight.step, flight.usage, flight.launcher
    if usage.finds:
        usage.used.forget_step()
    elif usage.learns:
        usage.learn_of_others()
    step.needed = usage.agree_on_needed(flight.buckets, range(len(flight.parameters)))
    for bucket in flight.buckets:
        bucket.clear()
        step.outcomes.append(flight.send(bucket))
    if usage.finds:
        usage.used.all_reduce()
    launcher.events.no_more_buckets()
    # The results are not written: at the end of `join` all ranks take the model of one that has
    # trained last.
    for bucket, outcome in zip(flight.buckets, step.outcomes, strict=True):
        if not outcome.is_skipped:
            launcher.finish(bucket, outcome, None)
            unused = usage.globally_unused(bucket.members)
            step.left_alone += flight.left_alone.within(bucket, unused)
    flight.wait_for_futures()
    if usage.finds:
        usage.used.finish_step()
    launcher.step += 1
    plan.step_ended(None)
    flight.begin(Step())
    launcher.events.step_landed(step.left_alone)
