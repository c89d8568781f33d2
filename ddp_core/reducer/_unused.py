"""Tracks which parameters a step uses, on this rank and on any."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ddp_core.exchange._devices import to_device
from ddp_core.reducer._buckets import BucketBase
from ddp_core.reducer._launch import ReducerSettings

__all__ = ["Usage", "UsedMap"]


_IN_VIEW = 1 << 16  # beside the number of ranks that use a parameter, in one sum


class UsedMap:
    """Holds one flag per parameter; all ranks' flags are summed only if a rank needs the sum.

    A parameter that no rank has used keeps its gradient as it is, so that an optimizer with
    momentum or weight decay does not move it.

    Attributes:
        wait_for: waits for the sum.
    """

    def __init__(self, numel: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._local = bytearray(numel)  # a tensor takes a microsecond per entry from Python
        self._counts: torch.Tensor | None = None
        self._work: dist.Work | None = None
        self._everywhere: list[int] | None = None
        self.wait_for: Callable[[dist.Work], object] = dist.Work.wait

    def mark(self, index: int) -> None:
        """Records that this rank has used the parameter in this step (or within ``no_sync``)."""
        self._local[index] = 1

    def unmark(self, indices: Sequence[int]) -> None:
        """Records that this rank has not used these parameters after all."""
        for index in indices:
            self._local[index] = 0

    def local(self, in_views: Sequence[int] = ()) -> torch.Tensor:
        """Returns a copy of this rank's flags.

        Args:
            in_views: flags that are marked, see ``all_reduce``.
        """
        flags = torch.frombuffer(self._local, dtype=torch.uint8).to(torch.int32)
        if in_views:
            flags[list(in_views)] += _IN_VIEW
        return to_device(flags, self._device)

    def is_used(self, index: int) -> bool:
        """Whether this rank has used this parameter."""
        return bool(self._local[index])

    def any_used(self, members: Sequence[int]) -> bool:
        """Whether this rank has used one of these parameters."""
        return any(self._local[index] for index in members)

    def all_used(self, members: Sequence[int]) -> bool:
        """Whether this rank has used all these parameters."""
        return all(self._local[index] for index in members)

    def all_reduce(self, in_views: Sequence[int] = ()) -> None:
        """Starts the sum over ranks; all ranks call it once a step, after the last bucket.

        Args:
            in_views: unused parameters whose gradient here is a view of the bucket all the same.
        """
        self._counts = self.local(in_views)
        self._everywhere = None
        self._work = dist.all_reduce(self._counts, group=self._group, async_op=True)

    def globally_unused(self, members: Sequence[int]) -> list[bool] | None:
        """Returns, by parameter, whether no rank has used it; None if all are in use."""
        if self.all_used(members):  # used here: no need to ask others
            return None
        sums = self._sums()
        return [not sums[index] % _IN_VIEW for index in members]

    def in_views(self, index: int) -> bool:
        """Whether some rank's gradient of this unused parameter is a view of the result."""
        return self._sums()[index] >= _IN_VIEW

    def _sums(self) -> list[int]:
        if self._everywhere is None:
            self.wait()
            assert self._counts is not None
            self._everywhere = self._counts.tolist()
        return self._everywhere

    def latest(self) -> torch.Tensor:
        """Returns how many ranks used each parameter by the latest sum, or this rank's flags."""
        if self._counts is None:
            return self.local()
        self.wait()
        return self._counts % _IN_VIEW

    def contradictions(self) -> list[int]:
        """Returns parameters that this rank uses although the sum says that no rank does."""
        unused = self.globally_unused(range(len(self._local)))
        return [index for index, gone in enumerate(unused or ()) if gone and self._local[index]]

    def wait(self) -> None:
        """Waits for the sum."""
        if self._work is not None:
            self.wait_for(self._work)
            self._work = None

    def finish_step(self) -> bytearray:
        """Ends the step: waits for the sum, resets the flags, and returns them."""
        self.wait()
        return self.reset_flags()

    def reset_flags(self) -> bytearray:
        """Resets the flags to unused, and returns them as they were."""
        used, self._local = self._local, bytearray(len(self._local))
        return used


class Usage:
    """Tracks parameter use for ``find_unused_parameters``, ``static_graph`` and skipped buckets.

    Attributes:
        counts: of a static graph, how often each parameter's hook is called in a step; None until
            the first step is over.
        never_used: of a static graph, the parameters whose hook is not called.
        learned_by_join: the other ranks recorded theirs while this rank had no inputs.
        has_stale_marks: a step was aborted after it had marked what it uses.
        at_point: whether gradients are averaged without a backward pass, by ``reduce``.
    """

    def __init__(
        self,
        numel: int,
        settings: ReducerSettings,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._numel, self._settings = numel, settings
        self._group, self._device = group, device
        self.used = UsedMap(numel, group, device)
        self.counts: list[int] | None = None
        self.never_used: list[int] = []
        self.learned_by_join = False
        self.has_stale_marks = self.at_point = False

    @property
    def is_static(self) -> bool:
        """Whether every step uses the same parameters in the same way."""
        return self._settings.static_graph

    @property
    def finds_unused(self) -> bool:
        """Whether the used-parameter map is all-reduced in every step."""
        if self._settings.static_graph:  # its first step may have no backward pass to learn from
            return self.at_point and self.counts is None
        return self._settings.find_unused

    @property
    def is_first_static_step(self) -> bool:
        """Whether this is the first step of a static graph."""
        return self._settings.static_graph and self.counts is None

    @property
    def records_use(self) -> bool:
        """Whether arrivals of gradients are recorded."""
        return self.finds_unused or self.is_first_static_step

    @property
    def needs_sink(self) -> bool:
        """Whether outputs pass through the sink, see :mod:`ddp_core.ddp._forward`."""
        # A rank without any gradient of its own would not notice backward otherwise.
        return self.records_use or (
            self._settings.static_graph and len(self.never_used) == self._numel
        )

    def clear_stale_marks(self, without_gradient: Sequence[int]) -> None:
        """Clears the flags that an aborted step has set, except where gradients were kept."""
        self.has_stale_marks = False
        self.used.unmark(without_gradient)

    def calls(self) -> list[int]:
        """Returns the hook calls that each parameter has left in a step; 0 in the first step."""
        if not self._settings.static_graph:
            return []
        return [0] * self._numel if self.counts is None else list(self.counts)

    def record_static_graph(self, calls: list[int]) -> list[int]:
        """Records the first step's hook calls, which all later steps repeat.

        Returns:
            Parameters that this rank uses, though the ranks that recorded before do not.
        """
        self.counts = list(calls)
        self.never_used = [index for index, count in enumerate(calls) if not count]
        if self.learned_by_join:  # the ranks have summed then, without this one's uses
            return self.used.contradictions()
        self.used.all_reduce()
        return []

    def join_static_graph(self) -> None:
        """Takes part in the others' first static-graph step, without input here (join)."""
        if not self.learned_by_join:
            self.learned_by_join = True
            self.used.all_reduce()

    def globally_unused(self, members: Sequence[int]) -> list[bool] | None:
        """Returns, by parameter, whether no rank has used it; None if all count as in use."""
        if self.finds_unused or self.counts is not None or self.learned_by_join:
            return self.used.globally_unused(members)
        return None

    def agree_on_needed(
        self, buckets: Sequence[BucketBase], unused: Sequence[int]
    ) -> list[bool] | None:
        """Returns, by bucket, whether any rank has a gradient for it; None: all are sent.

        All ranks call it once a step, before the first bucket.

        Args:
            unused: parameters that this rank's backward pass does not reach.
        """
        if not self._settings.skip_unused:
            return None
        if self._settings.static_graph and not self.finds_unused:  # the first step's sum is known
            gone = [self.globally_unused(bucket.members) for bucket in buckets]
            return [parameter_gone is None or not all(parameter_gone) for parameter_gone in gone]
        if not self.finds_unused:
            return None
        absent = set(unused)
        # Used before now, under no_sync, or to be used by this backward pass.
        needs = [
            self.used.any_used(bucket.members) or not absent.issuperset(bucket.members)
            for bucket in buckets
        ]
        votes = to_device(torch.tensor(needs, dtype=torch.int32, device="cpu"), self._device)
        dist.all_reduce(votes, group=self._group)
        return [bool(count) for count in votes.tolist()]
