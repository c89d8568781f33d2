"""Attributes of torch's class that trainers, optimizers, the compiler and ``Join`` read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_core.ddp.hook_methods import HookMethods
from ddp_core.ddp.torch_reducer import TorchReducer
from ddp_core.reducer.launch import CommHook

__all__ = ["TorchNames"]


class TorchNames(HookMethods):
    """Gives the parts of DistributedDataParallel the names that torch has for them; a mixin."""

    # What torch's python_reducer keeps; ours has its reducer there as well.
    _use_python_reducer: ClassVar[bool] = False
    _accum_grad_hooks: ClassVar[Sequence[Any]] = ()

    @property
    def reducer(self) -> TorchReducer:
        """Returns what averages gradients."""
        return self._parts.reducer

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Returns the ranks."""
        return self._parts.replica.group

    @property
    def parameters_to_ignore(self) -> set[str]:
        """Returns names of parameters and buffers that ranks do not share."""
        return self._parts.replica.ignored

    @property
    def broadcast_bucket_size(self) -> int:
        """Returns the bytes of a message with parameters or buffers, at most."""
        return self._parts.replica.chunk_nbytes

    @broadcast_bucket_size.setter
    def broadcast_bucket_size(self, value: int) -> None:
        self._parts.replica.chunk_nbytes = value

    @property
    def _comm_hooks(self) -> list[tuple[CommHook, Any]]:
        return self._parts.hooks.registered

    @property
    def modules_buffers(self) -> list[Tensor]:
        """Returns the buffers that are kept equal."""
        return list(self._parts.buffers.named.values())

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """Returns the buffers that are kept equal, by name."""
        return self._parts.buffers.named

    @property
    def join_device(self) -> torch.device:
        return self._parts.replica.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.process_group

    @property
    def bucket_bytes_cap(self) -> int:
        """Returns the bytes at which a bucket is full; the compiler splits graphs by it."""
        return self.reducer.plan.caps.cap

    @property
    def bucket_bytes_cap_default(self) -> bool:
        """Whether the user has not asked for a size."""
        return self._parts.settings.caps.free

    @property
    def bucket_bytes_cap_list(self) -> list[int]:
        """Returns sizes bucket by bucket, if the user gave them so."""
        caps = self._parts.settings.caps
        return list(caps.limits) if caps.explicit else []

    @property
    def use_side_stream_for_tensor_copies(self) -> bool:
        """Returns what ``to_kwargs`` asks; ``forward`` moves its inputs on the current stream."""
        return os.environ.get("PYTORCH_DDP_USE_SIDE_STREAM", "1") == "1"

    @property
    def buffer_hook(self) -> Any:
        """Returns the hook that makes buffers equal."""
        return self._parts.buffers.hook

    @property
    def forward_sync_buffers(self) -> bool:
        """Whether buffers are made equal in forward."""
        return self._parts.buffers.enabled

    @forward_sync_buffers.setter
    def forward_sync_buffers(self, value: bool) -> None:
        self._parts.buffers.enabled = value

    broadcast_buffers = forward_sync_buffers

    @property
    def require_forward_param_sync(self) -> bool:
        """Whether the next forward makes buffers equal, if they are made so at all."""
        return self._parts.buffers.sync_next

    @require_forward_param_sync.setter
    def require_forward_param_sync(self, value: bool) -> None:
        self._parts.buffers.sync_next = value

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward makes buffers equal on all ranks."""
        return self._parts.buffers.are_due

    @property
    def static_graph(self) -> bool:
        """Whether every step uses the same parameters in the same way."""
        return self._parts.settings.static_graph

    @property
    def _delay_all_reduce_all_params(self) -> bool:
        return not self._parts.reduces

    @property
    def _has_rebuilt_buckets(self) -> bool:
        return self.reducer.plan.rebuilt

    @property
    def _module_parameters(self) -> list[nn.Parameter]:
        return self._parts.replica.parameters()
