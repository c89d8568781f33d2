"""Provides torch's attributes and methods that trainers, the compiler and ``Join`` use."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_core._torch import in_join
from ddp_core.ddp._construct import warn_that_static_finds_unused
from ddp_core.ddp._ddp_state import DDPState
from ddp_core.ddp._forward import ShadowHook
from ddp_core.ddp._logging_data import logging_data
from ddp_core.ddp._replica import max_candidate_rank
from ddp_core.ddp._torch_reducer import TorchReducer, refusing
from ddp_core.reducer._launch import CommHook
from ddp_core.reducer._parameters import broadcast_coalesced

__all__ = ["TorchNames"]


class TorchNames:
    """Gives the parts of DistributedDataParallel torch's names; a mixin."""

    _ddp_state: DDPState
    _join_config: Any  # torch's `Joinable` has it
    # Names of torch's python_reducer; our reducer is there as well.
    _use_python_reducer: ClassVar[bool] = False
    _accum_grad_hooks: ClassVar[Sequence[Any]] = ()

    @property
    def reducer(self) -> TorchReducer:
        """Returns the reducer, which averages gradients."""
        return self._ddp_state.reducer

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Returns the process group of the ranks."""
        return self._ddp_state.replica.group

    @property
    def parameters_to_ignore(self) -> set[str]:
        """Returns the names of parameters and buffers that ranks do not share."""
        return self._ddp_state.replica.ignored

    @property
    def broadcast_bucket_size(self) -> int:
        """Returns the largest size of a message with parameters or buffers, in bytes."""
        return self._ddp_state.replica.chunk_nbytes

    @broadcast_bucket_size.setter
    def broadcast_bucket_size(self, value: int) -> None:
        self._ddp_state.replica.chunk_nbytes = value

    @property
    def _comm_hooks(self) -> list[tuple[CommHook, Any]]:
        return self._ddp_state.hooks.registered

    @property
    def modules_buffers(self) -> list[Tensor]:
        """Returns the buffers that are synchronised."""
        return list(self._ddp_state.buffers.named.values())

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """Returns the buffers that are synchronised, by name."""
        return self._ddp_state.buffers.named

    @property
    def join_device(self) -> torch.device:
        return self._ddp_state.replica.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.process_group

    @property
    def bucket_bytes_cap(self) -> int:
        """Returns the bytes at which a bucket is full; the compiler splits graphs by it."""
        return self.reducer.plan.caps.cap

    @property
    def bucket_bytes_cap_default(self) -> bool:
        """Whether the user has set no bucket size."""
        return self._ddp_state.settings.caps.free

    @property
    def bucket_bytes_cap_list(self) -> list[int]:
        """Returns the size of each bucket, if the user gave a list."""
        caps = self._ddp_state.settings.caps
        return list(caps.limits) if caps.explicit else []

    @property
    def use_side_stream_for_tensor_copies(self) -> bool:
        """Returns the flag that ``to_kwargs`` reads; inputs move on the current stream."""
        return os.environ.get("PYTORCH_DDP_USE_SIDE_STREAM", "1") == "1"

    @property
    def buffer_hook(self) -> Any:
        """Returns the hook that synchronises buffers."""
        return self._ddp_state.buffers.hook

    @property
    def forward_sync_buffers(self) -> bool:
        """Whether forward synchronises buffers."""
        return self._ddp_state.buffers.enabled

    @forward_sync_buffers.setter
    def forward_sync_buffers(self, value: bool) -> None:
        self._ddp_state.buffers.enabled = value

    broadcast_buffers = forward_sync_buffers

    @property
    def require_forward_param_sync(self) -> bool:
        """Whether the next forward pass synchronises buffers, if any pass does."""
        return self._ddp_state.buffers.sync_next

    @require_forward_param_sync.setter
    def require_forward_param_sync(self, value: bool) -> None:
        self._ddp_state.buffers.sync_next = value

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward pass synchronises buffers."""
        return self._ddp_state.buffers.are_due

    @property
    def static_graph(self) -> bool:
        """Whether every step uses the same parameters in the same way."""
        return self._ddp_state.settings.static_graph

    @property
    def _delay_all_reduce_all_params(self) -> bool:
        return not self._ddp_state.reduces

    @property
    def _has_rebuilt_buckets(self) -> bool:
        return self.reducer.plan.rebuilt

    @property
    def _module_parameters(self) -> list[nn.Parameter]:
        return self._ddp_state.replica.parameters()

    # ---- methods

    def join_hook(self, **kwargs: Any) -> ShadowHook:
        """Returns the hook that torch's ``Join`` runs on a rank without inputs."""
        static = kwargs.get("divide_by_initial_world_size", True)
        return ShadowHook(self._ddp_state, static_world_size=static)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Returns settings, bucket sizes and times, with the names of torch's logging data."""
        return logging_data(self._ddp_state)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        self.reducer._set_ddp_runtime_logging_sample_rate(sample_rate)

    def _remove_autograd_hooks(self) -> None:
        self.reducer._remove_autograd_hooks()

    def _check_reducer_finalized(self) -> None:
        self.reducer.check_finished()

    def _set_static_graph(self) -> None:
        if self.static_graph:
            warnings.warn(
                "You've set static_graph to be True, no need to set it again.", stacklevel=2
            )
            return
        if self._ddp_state.settings.find_unused:
            warn_that_static_finds_unused(stacklevel=3)
        self.reducer._set_static_graph()

    # ---- torch's steps that stand alone

    def _clear_grad_buffer(self) -> None:
        """Does nothing: ``zero_grad`` clears delayed gradients as well."""

    def _sync_buffers(self) -> None:
        # A rank without inputs takes part: then all have to agree on whose buffers hold.
        joins = in_join(self)
        self._ddp_state.synchronise_buffers(joins=joins, awaits=False)

    def _check_and_sync_module_buffers(self) -> None:
        if self.will_sync_module_buffers():
            self._sync_buffers()

    def _check_sync_bufs_pre_fwd(self) -> bool:
        return self._ddp_state.buffers.are_due_when(after_forward=False)

    def _check_sync_bufs_post_fwd(self) -> bool:
        return self._ddp_state.buffers.are_due_when(after_forward=True)

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        futures = self._ddp_state.buffers.synchronise(authoritative_rank)
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
        nbytes = self.broadcast_bucket_size if buffer_size is None else buffer_size
        broadcast_coalesced(
            tensors, self.process_group, source=authoritative_rank, chunk_nbytes=nbytes
        )

    def _find_common_rank(self, input_rank: int, rank_cond: bool) -> int:
        return max_candidate_rank(self._ddp_state.replica, candidate=rank_cond)

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        self._ddp_state.broadcast_model(candidate=is_last_joiner)


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
    "_fire_reducer_autograd_hook": "gradients notify the reducer themselves",
    "_register_accum_grad_hook": "gradients notify the reducer themselves, compiled or not",
    "_set_sparse_metadata": "sparse gradients are averaged without it",
}
for _name, _instead in _REFUSED.items():
    setattr(TorchNames, _name, refusing(f"DistributedDataParallel.{_name}", _instead))
