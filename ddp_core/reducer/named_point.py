"""A step without a backward pass: what passes have accumulated is averaged where the user says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ddp_core.reducer.backward import Backward
from ddp_core.reducer.in_flight import InFlight
from ddp_core.reducer.plan import BucketPlan
from ddp_core.reducer.unused import Usage

__all__ = ["at_named_point", "reduce_at_point", "vote"]


def reduce_at_point(backward: Backward, flight: InFlight, plan: BucketPlan) -> None:
    """Averages the gradients that are in ``.grad``, as the end of a backward pass would.

    Raises:
        RuntimeError: no rank has accumulated anything, or a rank not for all parameters.
    """
    step, unreduced = flight.step, backward.unreduced
    missing = [i for i, one in enumerate(flight.parameters) if one.parameter.grad is None]
    came = unreduced.came and len(missing) < len(flight.parameters)
    try:
        with at_named_point(flight.usage):
            vote(flight, came=came, missing=missing)
            unreduced.averaging_begins()
            flight.settle_scale()
            _take_all(backward, flight, missing, unreduced.order or plan.arrival)
            backward.finish(step)
    except BaseException:
        flight.abandon()
        raise


@contextmanager
def at_named_point(usage: Usage) -> Iterator[None]:
    """Makes ranks tell each other what they use as there is no backward pass to learn from."""
    usage.at_point = True
    try:
        yield
    finally:
        usage.at_point = False


def vote(flight: InFlight, *, came: bool = False, missing: list[int] | None = None) -> None:
    """Finds out, on all ranks alike, whether there is something to average; all ranks call it.

    Args:
        came: whether this rank has accumulated anything.
        missing: parameters that have no gradient here.

    Raises:
        RuntimeError: there is nothing, or a rank has no gradient of some of its parameters.
    """
    launcher, usage = flight.launcher, flight.usage
    gone = [] if usage.finds else sorted({*(missing or ())} - {*usage.never})
    lacks = came and bool(gone)
    device = flight.buckets[0].buffer.device
    with launcher.beside():
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
        names = ", ".join(flight.parameters[index].name for index in gone[:20])
        raise RuntimeError(
            f"reduce(): {lacking} of the ranks have no gradient of some parameters"
            f"{f' (here {names})' if lacks else ''}. Set find_unused_parameters=True where passes "
            f"do not use all parameters"
        )


def _take_all(backward: Backward, flight: InFlight, missing: list[int], known: list[int]) -> None:
    """Counts all gradients as there, in the order in which they came; zeros where there is none."""
    step, usage = flight.step, flight.usage
    everything = range(len(flight.parameters))
    if usage.finds:
        if usage.has_old_marks:
            usage.forget_old_marks(missing)
        step.unused = missing
    step.unused_marked = True
    step.needed = usage.agree_on_needed(flight.buckets, everything)
    for index in dict.fromkeys([*known, *everything]):
        backward.mark_ready(step, index)
