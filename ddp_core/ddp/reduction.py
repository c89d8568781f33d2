"""When gradients are averaged, as the user says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ddp_core.ddp.forward import ForwardPass, not_traced
from ddp_core.ddp.parts import Parts
from ddp_core.ddp.uneven import Plans
from ddp_core.reducer.accumulators import NO_BACKWARD, backward_number
from ddp_core.reducer.named_point import reduce_at_point

__all__ = ["ReductionMethods"]


class ReductionMethods:
    """Gives DistributedDataParallel ``hold`` and ``reduce``; a mixin."""

    _parts: Parts
    require_backward_grad_sync: bool

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keeps gradients of the passes inside on this rank until :meth:`reduce` averages them.

        Nothing travels inside, neither gradients nor buffers, so ranks may run different numbers
        of passes, in any order, or none: pipelines, several losses, schedules of your own. An
        optimizer that would step by what is held raises. A backward pass after it whose forward
        pass is outside averages what is held as well, as after :meth:`no_sync`.

        Example:
            >>> with ddp_model.hold():
            ...     for inputs in micro_batches:
            ...         ddp_model(inputs).square().mean().backward()
            >>> ddp_model.reduce()
            >>> optimizer.step()
        """
        synchronises, held = self.require_backward_grad_sync, self._set_holding(True)
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = synchronises
            self._set_holding(held)

    def _set_holding(self, holds: bool) -> bool:
        """Sets whether passes are held; returns whether they were."""
        if not self._parts.reduces:  # all parameters are delayed
            return False
        unreduced = self._parts.reducer.backward.unreduced
        before, unreduced.holding = unreduced.holding, holds
        return before

    @not_traced(recursive=True)
    def reduce(self) -> None:
        """Averages what passes have accumulated in ``.grad``, bucket by bucket, as one step.

        All ranks call it alike. A rank without gradients takes part with zeros. Buffers are made
        equal here, as in the next forward pass otherwise.

        Raises:
            RuntimeError: no rank has a gradient that came since the last average, or a rank has
                none of some parameters (without ``find_unused_parameters``), or backward runs.
            CollectiveError: the exchange failed, here or on another rank.
        """
        if backward_number() != NO_BACKWARD:
            raise RuntimeError("reduce() within a backward pass: call it after backward has ended")
        parts = self._parts
        with torch.no_grad():
            if parts.reduces:
                held = self._set_holding(False)
                try:
                    step = ForwardPass(parts, self)  # type: ignore[arg-type]  # a mixin of one
                    step.begin_step(Plans(grads=True, sync=True, at_point=True))
                    step.end_step(sync=True)
                    reducer = parts.reducer
                    reducer.begin_step()
                    reduce_at_point(reducer.backward, reducer.in_flight, reducer.plan)
                finally:
                    self._set_holding(held)
            if parts.delayed is not None:
                parts.delayed.reduce()
