"""Provides methods of torch's C++ reducer that trainers call, under torch's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_core.reducer._grad_bucket import GradBucket
from ddp_core.reducer._reducer import Reducer

__all__ = ["TorchReducer", "refusing"]


def refusing(method: str, instead: str) -> Callable[..., Any]:
    """Returns a method that raises and names the call to use instead of ``method``."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            f"{method} is a step within torch's own DistributedDataParallel that ddp_core's does "
            f"not have: {instead}"
        )

    refuse.__name__ = method.rpartition(".")[2]
    return refuse


class TorchReducer(Reducer):
    """Averages gradients as :class:`Reducer` does, with the method names of torch's reducer."""

    def _rebuild_buckets(self) -> bool:
        """Prepares for forward; returns whether buckets were rebuilt."""
        before = list(self.buckets)
        self.prepare_for_forward()
        return self.buckets != before

    def _push_all_rebuilt_params(self) -> None:
        self.plan.step_ended(None)

    def _get_local_used_map(self) -> Tensor:
        return self.usage.used.latest()

    def _get_zeros_like_grad_buckets(self) -> list[GradBucket]:
        last = self.buckets[-1]
        return [
            bucket.as_grad_bucket(is_last=bucket is last, buffer=torch.zeros_like(bucket.buffer))
            for bucket in self.buckets
        ]

    def _run_comm_hook(self, bucket: Any) -> Any:
        # As torch's: without a hook the plain average, not an error.
        if self.launcher.hook is None:
            return self._run_allreduce_hook(bucket)
        hook, state = self.launcher.hook
        return hook(state, bucket)

    def _run_allreduce_hook(self, bucket: Any) -> Any:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        return allreduce_hook(self.group, bucket)

    def _set_static_graph(self) -> None:
        self.settings.static_graph = self.plan.static_graph = self.plan.follows_arrival = True
        self.exchange.step.hook_calls_left = self.usage.calls()  # its forward may be over already

    def _ddp_graph_static(self) -> bool:
        return self.history.same_unused

    def _check_reducer_finalized(self) -> None:
        self.check_finished()

    def _reset_state(self) -> None:
        self.drop_step()

    def _install_post_backward_futures(self, futures: Sequence[Any]) -> None:
        self.await_futures(futures)

    def _set_forward_pass_work_handle(self, work: dist.Work, use_static_world_size: bool) -> None:
        self.set_effective_ranks(work, static_world_size=use_static_world_size)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            text = "DDP runtime logging sample rate should be equal or greater than 1"
            self.launcher.error = f"{ValueError}: {text}"  # as torch's logging data have it
            raise ValueError(text)
        self.timeline.every = sample_rate

    def _remove_autograd_hooks(self) -> None:
        self.accumulators.unwatch()

    def _autograd_hook(self, index: int) -> None:
        self.backward.arrived(index)


_REFUSED = {
    "_delay_all_reduce": "the first step of a static graph is launched at the end of its backward "
    "pass, without a call",
    "_set_mixed_precision_param_dtype": "give the module mixed_precision=MixedPrecision(...)",
    "_set_optimizer_in_backward": "the module finds optimizers in backward in its first forward",
    "_set_sparse_metadata": "sparse gradients are averaged without it",
    "_update_process_group": "call the module's _update_process_group",
    "get_backward_stats": "module.timeline has the times of every bucket",
    "set_logger": "module._get_ddp_logging_data() has the fields of torch's logger",
}
for _name, _instead in _REFUSED.items():
    setattr(TorchReducer, _name, refusing(f"Reducer.{_name}", _instead))
