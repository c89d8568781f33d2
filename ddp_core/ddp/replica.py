"""The model on this rank, and the ranks that have it, too."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_core.reducer.parameters import Trained, broadcast_coalesced, trained_parameters

__all__ = ["Placement", "Replica"]


class Placement(NamedTuple):
    """Says where the model is."""

    device: torch.device
    device_ids: list[int] | None
    output_device: int | None
    several: bool


class Replica:
    """Holds a model that every rank of a group has, and makes ranks have the same.

    Args:
        module: the model.
        ignored: names of its parameters and buffers that ranks do not share.

    Attributes:
        chunk_nbytes: size of a message with parameters or buffers, at most.
    """

    group: dist.ProcessGroup

    def __init__(
        self, module: nn.Module, ignored: set[str], placement: Placement, group: dist.ProcessGroup
    ) -> None:
        self.module, self.ignored = module, ignored
        self.placement, self.group = placement, group
        self.chunk_nbytes = 250 * 1024 * 1024  # torch's

    @property
    def device(self) -> torch.device:
        """Returns the device of the parameters, and of messages of the ranks about them."""
        return self.placement.device

    def trained(self) -> list[Trained]:
        """Returns the parameters that require a gradient, in registration order."""
        return trained_parameters(self.module, self.ignored)

    def parameters(self) -> list[nn.Parameter]:
        """Returns the parameters that ranks share, also those that require no gradient."""
        return [p for n, p in self.module.named_parameters() if n not in self.ignored]

    def buffers(self) -> dict[str, Tensor]:
        """Returns the buffers that ranks share, by name."""
        return {n: b for n, b in self.module.named_buffers() if n not in self.ignored}

    def take_from(self, source: int, *, buffers: bool) -> None:
        """Takes the parameters of rank ``source``, and its buffers on request."""
        # Frozen parameters, too: ranks would compute different things with different ones.
        tensors: list[Tensor] = [*self.parameters()]
        if buffers:
            tensors += self.buffers().values()
        self.broadcast(tensors, source)

    def broadcast(self, tensors: list[Tensor], source: int) -> None:
        """Overwrites tensors with those of rank ``source``."""
        broadcast_coalesced(tensors, self.group, source=source, chunk_nbytes=self.chunk_nbytes)

    def __getstate__(self) -> dict[str, Any]:
        # A group is no data. The default one can be found again, no other.
        if self.group is not dist.group.WORLD:
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default "
                "process group. That is, when you have called init_process_group and have not "
                "passed process_group argument to DDP constructor"
            )
        return {name: value for name, value in vars(self).items() if name != "group"}

    def join_world(self) -> None:
        """Goes on with the default group, after unpickling.

        Raises:
            RuntimeError: there is none.
        """
        if not dist.is_initialized():
            raise RuntimeError(
                "unpickling DistributedDataParallel needs a process group: call "
                "torch.distributed.init_process_group first"
            )
        assert dist.group.WORLD is not None
        self.group = dist.group.WORLD
