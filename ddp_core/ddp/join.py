"""Uneven inputs: a rank that has none left takes part in the others' collectives."""

from __future__ import annotations

from torch.distributed.algorithms.join import JoinHook

from ddp_core.ddp.parts import Parts
from ddp_core.ddp.uneven import hear_of_plans

__all__ = ["ShadowHook"]


class ShadowHook(JoinHook):
    """Does what a forward and a backward pass of the others expects of this rank.

    Args:
        static_world_size: gradients are divided by the number of all ranks; else by the number of
            those that have inputs.

    Raises:
        RuntimeError: a rank without inputs would keep the others waiting.
    """

    def __init__(self, parts: Parts, *, static_world_size: bool) -> None:
        if parts.uneven.needs_all:
            raise RuntimeError(
                "DistributedDataParallel.join: the optimizer steps in shards while gradients are "
                "averaged (ZeroOptimizer), for which all ranks need inputs. Give all ranks as many "
                "inputs, or use an optimizer of each rank's own"
            )
        if parts.delayed is not None:
            raise RuntimeError(
                "DistributedDataParallel.join: a rank without inputs does not take part in the "
                "delayed all-reduce of delay_all_reduce_named_params. Give all ranks as many "
                "inputs, or construct it without that argument"
            )
        parts.uneven.static_world_size = static_world_size
        parts.uneven.has_joined = True
        self._parts = parts
        super().__init__()

    def main_hook(self) -> None:
        """Takes part in one step of the others."""
        parts, buffers = self._parts, self._parts.buffers
        parts.before_collectives()
        plans = hear_of_plans(parts.replica)
        if plans.grads:
            parts.reducer.prepare_for_forward()
        if plans.sync:
            parts.hooks.follow_schedule()
        if plans.at_point:
            buffers.sync_next = True
        for after_forward in (False, True):
            if buffers.are_due_when(after_forward=after_forward):
                # Within `join` the source is agreed on: this rank's buffers are old.
                parts.synchronise_buffers(joins=True, candidate=False, awaits=plans.sync)
        buffers.sync_next = plans.sync
        if plans.sync:
            parts.reducer.shadow(at_point=plans.at_point)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Takes, at the end, the model of a rank that trained last, as all ranks do."""
        self._parts.take_model_of(candidate=is_last_joiner)
