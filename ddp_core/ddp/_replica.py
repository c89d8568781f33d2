"""Holds what the ranks of a model share, and notifies ranks that have run out of inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from ddp_core._torch import in_join, versions_kept
from ddp_core.exchange._devices import to_device
from ddp_core.reducer._parameters import Trained, broadcast_coalesced, trained_parameters

__all__ = [
    "BufferHook",
    "Buffers",
    "JoinFlags",
    "Placement",
    "Replica",
    "UnevenInputs",
    "max_candidate_rank",
    "recv_join_flags",
    "send_join_flags",
]


class Placement(NamedTuple):
    """Describes the devices of a model."""

    device: torch.device
    device_ids: list[int] | None
    output_device: int | None
    several: bool


class Replica:
    """Holds a model that every rank of a group has, and copies its values between ranks.

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
        """Returns the device of the parameters, on which messages about them travel."""
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

    def broadcast_from(self, source: int, *, buffers: bool) -> None:
        """Broadcasts the parameters of rank ``source``, and its buffers on request."""
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

    def use_default_group(self) -> None:
        """Uses the default group after unpickling.

        Raises:
            RuntimeError: there is no default group.
        """
        if not dist.is_initialized():
            raise RuntimeError(
                "unpickling DistributedDataParallel needs a process group: call "
                "torch.distributed.init_process_group first"
            )
        assert dist.group.WORLD is not None
        self.group = dist.group.WORLD


# ---- buffers


@dataclass
class BufferHook:
    """Replaces the broadcast from rank 0: ``hook(state, {name: buffer})``.

    The hook may return futures, which are awaited at the end of backward.
    """

    hook: Callable[[Any, dict[str, Tensor]], Any]
    state: Any
    after_forward: bool


class Buffers:
    """Keeps the buffers of a model equal on all ranks.

    Args:
        enabled: whether forward passes synchronise buffers.

    Attributes:
        sync_next: whether the next forward pass synchronises buffers, if enabled: gradients were
            averaged after the previous pass, so parameters are the same.
        hook: synchronises buffers in place of rank 0's broadcast.
        named: the buffers by name.
    """

    def __init__(self, replica: Replica, *, enabled: bool) -> None:
        self._replica, self.enabled = replica, enabled
        self.sync_next = True
        self.hook: BufferHook | None = None
        self.named: dict[str, Tensor] = {}
        self.find()

    def find(self) -> None:
        """Looks the buffers up again, since modules may have replaced them."""
        self.named = self._replica.buffers()

    @property
    def are_due(self) -> bool:
        """Whether the next forward pass synchronises buffers."""
        return self.sync_next and self.enabled and bool(self.named)

    def are_due_when(self, *, after_forward: bool) -> bool:
        """Whether buffers are synchronised before forward, or after it (hooks only)."""
        later = self.hook is not None and self.hook.after_forward
        return self.are_due and after_forward == later

    def synchronise(self, source: int) -> list[Any]:
        """Makes buffers equal on all ranks; returns the hook's futures, if it gave any.

        Args:
            source: rank whose buffers are broadcast (unless there is a hook).
        """
        self.find()
        values = list(self.named.values())
        # The values may change between forward and backward without autograd complaining.
        with torch.no_grad(), versions_kept(tuple(values)):
            if self.hook is not None:
                return list(self.hook.hook(self.hook.state, self.named) or ())
            self._replica.broadcast(values, source)
        return []

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "hook": None, "named": {}}  # a hook belongs to its process group


# ---- uneven inputs


@dataclass
class UnevenInputs:
    """Describes how a module takes part in ``join``."""

    has_joined: bool = False  # ranks may have run out of inputs
    static_world_size: bool = True  # gradients are divided by the number of all ranks
    needs_all: bool = False  # an optimizer steps with the hook, in shards of all ranks


class JoinFlags(NamedTuple):
    """Describes the collectives that ranks with inputs run in this forward pass, all alike."""

    grads: bool  # it records a graph
    sync: bool  # its backward pass averages gradients
    at_point: bool = False  # it is no pass but `reduce`


def send_join_flags(joinable: Any, replica: Replica, plans: JoinFlags) -> dist.Work | None:
    """Sends the flags of a pass to ranks without inputs; all ranks with inputs call it in forward.

    Args:
        joinable: the module, as :class:`torch.distributed.algorithms.join.Join` knows it.

    Returns:
        Work that counts the ranks with inputs, within ``join``.
    """
    work: dist.Work | None = Join.notify_join_context(joinable)
    if in_join(joinable):
        flags = to_device(torch.tensor(plans, dtype=torch.float32, device="cpu"), replica.device)
        dist.all_reduce(flags, group=replica.group, async_op=True)
    return work


def recv_join_flags(replica: Replica) -> JoinFlags:
    """Returns the flags that ranks with inputs send; called by a rank without inputs."""
    flags = torch.zeros(len(JoinFlags._fields), dtype=torch.float32, device=replica.device)
    dist.all_reduce(flags, group=replica.group)
    return JoinFlags(*(bool(flag) for flag in flags.tolist()))


def max_candidate_rank(replica: Replica, *, candidate: bool) -> int:
    """Returns the largest rank that is a candidate, the same on all ranks.

    Raises:
        RuntimeError: there is no candidate.
    """
    group = replica.group
    choice = torch.tensor([group.rank() if candidate else -1], device=replica.device)
    dist.all_reduce(choice, dist.ReduceOp.MAX, group=group)
    if choice.item() < 0:
        raise RuntimeError("DistributedDataParallel.join: no rank has a model to share")
    return int(choice.item())
