"""What users call to set hooks, to ask for layouts, and to go on with other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from ddp_core.ddp.buffers import BufferHook
from ddp_core.ddp.parts import Parts
from ddp_core.reducer.launch import CommHook
from ddp_core.reducer.layout import BucketGroup
from ddp_core.reducer.plan import SavedBuckets

__all__ = ["HookMethods"]


class HookMethods:
    """Gives DistributedDataParallel its methods for hooks, layouts and other ranks; a mixin."""

    _parts: Parts

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Averages gradients by ``hook(state, bucket) -> Future[Tensor]`` from the next step on.

        All ranks call it alike. ``bucket`` is a :class:`ddp_core.GradBucket`; it is not divided by
        the number of ranks. A state with a method ``bucket_group(name, parameter)`` gets buckets
        of parameters for which that returns the same; its ``bucket_cap_mb`` holds where the user
        has not given one.

        A state is told what becomes of each synchronised step, by those of these methods that it
        has when the hook is set:

        ``no_more_buckets()``: backward has ended well, so no bucket follows. A hook that holds
        buckets back starts their exchange now at the latest; nothing was waited for yet.
        ``step_landed(left_alone)``: the averaged gradients are in ``.grad``, but for those of
        the parameters in ``left_alone``: no rank has used them, and DistributedDataParallel
        leaves their ``.grad`` as it was. What the hook sent for those has not arrived.
        ``step_abandoned()``: the step has begun and its results will not be used: backward, the
        hook or an exchange raised, or parameters got no gradient. It comes before the reducer
        waits for what it has launched, so that buckets held back can be let go.

        A rank without inputs (``join``) hears the same of the steps of the others.

        A state whose ``takes_gradients`` is True keeps what its hook averages: the future may hold
        any tensor, and ``.grad`` stays as it is (a rank then needs a part of the mean only).

        Raises:
            RuntimeError: there is a hook already; see ``replace_comm_hook``.
        """
        if self._parts.hooks.registered:
            raise RuntimeError(
                "register_comm_hook or register_builtin_comm_hook can only be called once; "
                "replace_comm_hook(state, hook) changes the hook, remove_comm_hook() removes it"
            )
        self._parts.hooks.set(hook, state)

    def replace_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Uses another hook from the next step on; all ranks call it alike, between two steps."""
        self._parts.hooks.set(hook, state)

    def remove_comm_hook(self) -> None:
        """Averages by a plain all-reduce from the next step on; all ranks call it alike."""
        self._parts.hooks.set(None, None)

    def schedule_comm_hook(self, step: int, state: Any, hook: CommHook | None) -> None:
        """Uses a hook (None: the plain all-reduce) from synchronised step ``step`` on."""
        self._parts.hooks.schedule(step, hook, state)

    def request_layout(self, group_of: BucketGroup | None) -> None:
        """Gives buckets parameters for which ``group_of(name, parameter)`` is the same.

        From the next step on, on top of dtype and device; all ranks call it alike. None: as usual.
        """
        self._parts.reducer.plan.request(group_of)

    def saved_layout(self) -> tuple[list[list[nn.Parameter]], list[int], list[nn.Parameter]]:
        """Returns what a run that goes on needs to have the same buckets.

        Returns:
            The parameters of each bucket, without those of sparse gradients, none before the first
            step or where buckets are to be laid out anew; the bytes of a full bucket, none where
            buckets are not final yet, as in the first step; all parameters in the order in which
            gradients came in the last step, none where that is not known.
        """
        reducer = self._parts.reducer
        # Sparse gradients are always a bucket each, which needs no saving.
        present = [one.members for one in reducer.buckets if not one.sparse]
        members, limits, order = reducer.plan.to_save(present)
        parameter_of = [one.parameter for one in reducer.parameters]
        buckets = [[parameter_of[index] for index in one] for one in members]
        arrival = [parameter_of[index] for index in order]
        return buckets, list(limits), arrival

    def restore_layout(
        self,
        buckets: Sequence[Sequence[nn.Parameter]],
        limits: Sequence[int],
        arrival: Sequence[nn.Parameter],
        agree: Callable[[], None],
    ) -> None:
        """Goes on with what :meth:`saved_layout` gave, from the next step on; all ranks call it.

        Where those do not suit this model and its sizes of buckets, ``arrival`` decides.

        Args:
            buckets, limits, arrival: what :meth:`saved_layout` gave, in this model's parameters.
            agree: called on every rank before that step; raises if they go on from different runs.
        """
        index_of = {
            id(one.parameter): index for index, one in enumerate(self._parts.reducer.parameters)
        }
        known = all(id(one) in index_of for bucket in [*buckets, arrival] for one in bucket)
        if not known:  # another model's, or of one that has trained other parameters
            buckets, arrival = (), ()
        members = tuple(tuple(index_of[id(one)] for one in bucket) for bucket in buckets)
        order = tuple(index_of[id(one)] for one in arrival)
        self._parts.reducer.plan.go_on_from(SavedBuckets(members, tuple(limits), order, agree))

    def refresh_layout(self) -> None:
        """Asks the hook's state again what layout it wants: its answers have changed."""
        self._parts.hooks.refresh_layout()

    def _register_buffer_comm_hook(
        self, state: Any, hook: Callable[..., Any], comm_hook_location: Any = None
    ) -> None:
        """``hook(state, {name: buffer})`` makes buffers equal instead of rank 0's broadcast."""
        if not callable(hook):
            raise TypeError("Buffer communication hook must be callable.")
        # By name: torch's enumeration of locations is private.
        before = getattr(comm_hook_location, "name", "POST_FORWARD") == "PRE_FORWARD"
        self._parts.buffers.hook = BufferHook(hook, state, after_forward=not before)

    # ---- other ranks

    def change_group(self, group: dist.ProcessGroup) -> None:
        """Goes on with other ranks, from buckets that are agreed on once more.

        All ranks of ``group`` call it alike, between two steps; nothing is asked of the ranks
        before, which may be gone. A hook follows if its state has a method ``change_group(group)``.
        Parameters stay as they are: a rank that comes anew takes them from another one by itself.

        Raises:
            RuntimeError: a hook cannot follow; nothing was changed.

        Example:
            >>> ddp_model.change_group(torch.distributed.new_group([0, 2, 3]))
        """
        self._parts.change_group(group)

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Does what :meth:`change_group` does; torch's name for it."""
        self._parts.change_group(new_process_group)
