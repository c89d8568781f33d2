"""Which parameters were used, on this rank and on any."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

__all__ = ["UsedMap", "twice_error", "unused_error"]


class UsedMap:
    """One flag per parameter; all ranks' flags are summed only where a rank needs to know.

    A parameter that no rank has used keeps its gradient as it is, so that an optimizer with
    momentum or weight decay does not move it.
    """

    def __init__(self, numel: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._mine = bytearray(numel)
        self._counts: torch.Tensor | None = None
        self._work: dist.Work | None = None
        self._everywhere: list[int] | None = None

    def mark(self, index: int) -> None:
        """This rank has used the parameter in this step (also within ``no_sync``)."""
        self._mine[index] = 1

    def all_used(self, members: Sequence[int]) -> bool:
        """Whether this rank has used all these parameters."""
        return all(self._mine[index] for index in members)

    def all_reduce(self) -> None:
        """Starts the sum over ranks; all ranks call it once a step, after the last bucket."""
        flags = torch.frombuffer(self._mine, dtype=torch.uint8)
        self._counts = flags.to(self._device, torch.int32, copy=True)
        self._everywhere = None
        self._work = dist.all_reduce(self._counts, group=self._group, async_op=True)

    def globally_unused(self, members: Sequence[int]) -> list[bool] | None:
        """By parameter, whether no rank has used it; None if all are in use."""
        if self.all_used(members):  # used here: no need to ask others
            return None
        if self._everywhere is None:
            self.wait()
            assert self._counts is not None
            self._everywhere = self._counts.tolist()
        return [not self._everywhere[index] for index in members]

    def wait(self) -> None:
        """Waits for the sum."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def finish_step(self) -> None:
        """The step is over; the next one starts with no parameter used."""
        self.wait()
        self.forget_step()

    def forget_step(self) -> None:
        """No parameter was used."""
        self._mine = bytearray(len(self._mine))


def unused_error(missing: Sequence[int], names: Sequence[str], rank: int, *, finds: bool) -> str:
    """What users of DistributedDataParallel know, with the names."""
    text = (
        "Expected to have finished reduction in the prior iteration before starting a new one. "
        "This error indicates that your module has parameters that were not used in producing "
        "loss. "
    )
    if finds:
        text += (
            "find_unused_parameters=True is set: make sure that all `forward` outputs take part "
            "in the loss, and that backward runs once for every forward. "
        )
    else:
        text += (
            "You can enable unused parameter detection by passing the keyword argument "
            "`find_unused_parameters=True` to DistributedDataParallel, and by making sure all "
            "`forward` function outputs participate in calculating loss. "
        )
    shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        shown = ", ".join(names)
    return (
        f"{text}Parameters which did not receive grad for rank {rank}: {shown}. "
        f"Parameter indices which did not receive grad for rank {rank}: {list(missing)}"
    )


def twice_error(name: str, index: int) -> str:
    """A gradient came twice."""
    return (
        f"Expected to mark a variable ready only once. Parameter at index {index} with name {name} "
        f"has been marked as ready twice. This means that its gradient came twice in one backward "
        f"pass: it is used outside of the module's forward, or by several reentrant backward "
        f"passes (activation checkpointing with use_reentrant=True of a shared layer, or with "
        f"find_unused_parameters=True). Set static_graph=True if the graph does not change between "
        f"steps, or use_reentrant=False"
    )
