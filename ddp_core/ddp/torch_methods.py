"""Methods of torch's class that trainers, the compiler and ``Join`` call."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ddp_core._torch import in_join
from ddp_core.ddp.construct import warn_that_static_finds_unused
from ddp_core.ddp.join import ShadowHook
from ddp_core.ddp.logging_data import logging_data
from ddp_core.ddp.torch_names import TorchNames
from ddp_core.ddp.torch_reducer import refusing
from ddp_core.ddp.uneven import common_rank
from ddp_core.reducer.parameters import broadcast_coalesced

__all__ = ["TorchMethods"]


class TorchMethods(TorchNames):
    """Gives DistributedDataParallel torch's names for its methods; a mixin."""

    _join_config: Any  # torch's `Joinable` has it

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        # torch's built-in ones are C++ and take a C++ bucket; these compute the same.
        hooks = {
            "ALLREDUCE": default_hooks.allreduce_hook,
            "FP16_COMPRESS": default_hooks.fp16_compress_hook,
        }
        self.register_comm_hook(self.process_group, hooks[comm_hook_type.name])
        self.reducer.launcher.hook_name = str(comm_hook_type)

    def join_hook(self, **kwargs: Any) -> ShadowHook:
        """Returns what torch's ``Join`` runs on a rank without inputs."""
        static = kwargs.get("divide_by_initial_world_size", True)
        return ShadowHook(self._parts, static_world_size=static)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Settings, bucket sizes and times, with the names of torch's logging data."""
        return logging_data(self._parts)

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
        if self._parts.settings.find_unused:
            warn_that_static_finds_unused(stacklevel=3)
        self.reducer._set_static_graph()

    # ---- torch's steps that stand alone

    def _clear_grad_buffer(self) -> None:
        """Does nothing: ``zero_grad`` clears delayed gradients, too, which have no buffer here."""

    def _sync_buffers(self) -> None:
        # A rank without inputs takes part: then all have to agree on whose buffers hold.
        joins = in_join(self)
        self._parts.synchronise_buffers(joins=joins, awaits=False)

    def _check_and_sync_module_buffers(self) -> None:
        if self.will_sync_module_buffers():
            self._sync_buffers()

    def _check_sync_bufs_pre_fwd(self) -> bool:
        return self._parts.buffers.are_due_when(after_forward=False)

    def _check_sync_bufs_post_fwd(self) -> bool:
        return self._parts.buffers.are_due_when(after_forward=True)

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        futures = self._parts.buffers.synchronise(authoritative_rank)
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
        return common_rank(self._parts.replica, candidate=rank_cond)

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        self._parts.take_model_of(candidate=is_last_joiner)


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
    "_fire_reducer_autograd_hook": "gradients tell the reducer themselves",
    "_register_accum_grad_hook": "gradients tell the reducer themselves, compiled or not",
    "_set_sparse_metadata": "sparse gradients are averaged without it",
}
for _name, _instead in _REFUSED.items():
    setattr(TorchMethods, _name, refusing(f"DistributedDataParallel.{_name}", _instead))
