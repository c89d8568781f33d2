"""Names of torch's class that trainers, optimizers, the compiler and ``Join`` read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_core.ddp.buffers import Buffers
from ddp_core.ddp.hook_methods import HookMethods
from ddp_core.ddp.hooks import CommHooks
from ddp_core.ddp.join import common_rank
from ddp_core.ddp.logging_data import logging_data
from ddp_core.ddp.torch_reducer import TorchReducer, refusing
from ddp_core.reducer.launch import CommHook
from ddp_core.reducer.layout import BucketCaps
from ddp_core.reducer.parameters import broadcast_coalesced

if TYPE_CHECKING:
    from ddp_core.ddp.ddp import DistributedDataParallel

__all__ = ["TorchNames"]


class TorchNames(HookMethods):
    """Mixed into DistributedDataParallel: what it holds, under the names it has in torch."""

    module: nn.Module
    process_group: dist.ProcessGroup
    device: torch.device
    reducer: TorchReducer
    parameters_to_ignore: set[str]
    forward_sync_buffers: bool
    _hooks: CommHooks
    _buffers_in_sync: Buffers
    _caps: BucketCaps
    # What torch's python_reducer keeps; ours has its reducer there as well.
    _use_python_reducer: ClassVar[bool] = False
    _accum_grad_hooks: ClassVar[Sequence[Any]] = ()

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
        self.reducer.launcher.hook_name = str(comm_hook_type)

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
    def bucket_bytes_cap_default(self) -> bool:
        """Whether the user has not asked for a size."""
        return self._caps.free

    @property
    def bucket_bytes_cap_list(self) -> list[int]:
        """Sizes bucket by bucket, if the user gave them so."""
        return list(self._caps.limits) if self._caps.explicit else []

    @property
    def use_side_stream_for_tensor_copies(self) -> bool:
        """What ``to_kwargs`` asks; ``forward`` moves its inputs on the current stream."""
        return os.environ.get("PYTORCH_DDP_USE_SIDE_STREAM", "1") == "1"

    @property
    def buffer_hook(self) -> Any:
        """The hook that makes buffers equal."""
        return self._buffers_in_sync.hook

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
        self.reducer._set_ddp_runtime_logging_sample_rate(sample_rate)

    def _remove_autograd_hooks(self) -> None:
        self.reducer._remove_autograd_hooks()

    def _check_reducer_finalized(self) -> None:
        self.reducer.check_finished()

    # ---- torch's steps that stand alone

    def _sync_buffers(self) -> None:
        ddp: DistributedDataParallel = self  # type: ignore[assignment]
        ddp._synchronise_buffers(backward_follows=False)

    def _check_and_sync_module_buffers(self) -> None:
        ddp: DistributedDataParallel = self  # type: ignore[assignment]
        if ddp.will_sync_module_buffers():
            self._sync_buffers()

    def _check_sync_bufs_pre_fwd(self) -> bool:
        ddp: DistributedDataParallel = self  # type: ignore[assignment]
        return ddp._synchronises_buffers(after_forward=False)

    def _check_sync_bufs_post_fwd(self) -> bool:
        ddp: DistributedDataParallel = self  # type: ignore[assignment]
        return ddp._synchronises_buffers(after_forward=True)

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        futures = self._buffers_in_sync.synchronise(authoritative_rank)
        self.reducer.launcher.await_futures(futures)

    def _default_broadcast_coalesced(
        self,
        bufs: Sequence[Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        tensors = self.modules_buffers if bufs is None else bufs
        self._distributed_broadcast_coalesced(tensors, bucket_size, authoritative_rank)

    def _distributed_broadcast_coalesced(
        self,
        tensors: Sequence[Tensor],
        buffer_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        ddp: DistributedDataParallel = self  # type: ignore[assignment]
        nbytes = ddp.broadcast_bucket_size if buffer_size is None else buffer_size
        broadcast_coalesced(
            tensors, self.process_group, source=authoritative_rank, chunk_nbytes=nbytes
        )

    def _find_common_rank(self, input_rank: int, rank_cond: bool) -> int:
        return common_rank(self.process_group, self.device, candidate=rank_cond)

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        ddp: DistributedDataParallel = self  # type: ignore[assignment]
        ddp._take_model_of(is_last_joiner)


_REFUSED = dict.fromkeys(
    (
        "_assign_modules_buffers",
        "_build_debug_param_to_name_mapping",
        "_build_params_for_reducer",
        "_check_comm_hook",
        "_check_default_group",
        "_ddp_init_helper",
        "_delayed_all_reduce_hook",
        "_log_and_throw",
        "_passing_sync_batchnorm_handle",
        "_register_delay_all_reduce_hook",
        "_setup_in_backward_optimizers",
    ),
    "it happens when the module is constructed",
)
_REFUSED |= dict.fromkeys(
    (
        "_clear_grad_buffer",
        "_inside_ddp_forward",
        "_lazy_init",
        "_module_wait_for_copy_hook",
        "_post_forward",
        "_pre_forward",
        "_root_copy_hook",
        "_run_ddp_forward",
    ),
    "call the module itself",
)
_REFUSED |= dict.fromkeys(
    (
        "_check_global_requires_backward_grad_sync",
        "_match_all_reduce_for_bwd_pass",
        "_match_unused_params_allreduce",
    ),
    "the hook that join_hook() returns does it for ranks without inputs",
)
_REFUSED |= {
    "_fire_reducer_autograd_hook": "gradients tell the reducer themselves",
    "_register_accum_grad_hook": "gradients tell the reducer themselves, compiled or not",
    "_set_sparse_metadata": "sparse gradients are averaged without it",
}
for _name, _instead in _REFUSED.items():
    setattr(TorchNames, _name, refusing(f"DistributedDataParallel.{_name}", _instead))
