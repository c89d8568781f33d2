"""Names of torch's class that trainers, optimizers, the compiler and ``Join`` read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_core._buffers import Buffers
from ddp_core._hooks import CommHooks
from ddp_core._launch import CommHook
from ddp_core._logging_data import logging_data
from ddp_core._reducer import Reducer

if TYPE_CHECKING:
    from ddp_core._ddp import DistributedDataParallel

__all__ = ["TorchNames"]


class TorchNames:
    """Mixed into DistributedDataParallel: what it holds, under the names it has in torch."""

    module: nn.Module
    process_group: dist.ProcessGroup
    device: torch.device
    reducer: Reducer
    parameters_to_ignore: set[str]
    forward_sync_buffers: bool
    register_comm_hook: Callable[[Any, CommHook], None]
    _hooks: CommHooks
    _buffers_in_sync: Buffers

    @property
    def _comm_hooks(self) -> list[tuple[CommHook, Any]]:
        return self._hooks.registered

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hooks = {
            "ALLREDUCE": default_hooks.allreduce_hook,
            "FP16_COMPRESS": default_hooks.fp16_compress_hook,
        }
        self.register_comm_hook(self.process_group, hooks[comm_hook_type.name])

    @property
    def modules_buffers(self) -> list[Tensor]:
        """The buffers that are kept equal."""
        return list(self._buffers_in_sync.named.values())

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """The buffers that are kept equal, by name."""
        return self._buffers_in_sync.named

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.process_group

    @property
    def bucket_bytes_cap(self) -> int:
        """Bytes at which a bucket is full; the compiler splits graphs by it."""
        return self.reducer.plan.caps.cap

    @property
    def broadcast_buffers(self) -> bool:
        """As ``forward_sync_buffers``."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @property
    def _has_rebuilt_buckets(self) -> bool:
        return self.reducer.plan.rebuilt

    @property
    def _module_parameters(self) -> list[nn.Parameter]:
        ignored = self.parameters_to_ignore
        return [p for n, p in self.module.named_parameters() if n not in ignored]

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Settings, bucket sizes and times, with the names of torch's logging data."""
        ddp: DistributedDataParallel = self  # type: ignore[assignment]
        return logging_data(ddp)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            raise ValueError("DDP runtime logging sample rate should be equal or greater than 1")
        self.reducer.timeline.every = sample_rate

    def _remove_autograd_hooks(self) -> None:
        self.reducer.accumulators.unwatch()

    def _check_reducer_finalized(self) -> None:
        self.reducer.check_finished()
