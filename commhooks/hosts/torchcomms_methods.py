"""Lists the methods of a torchcomms backend, with the function of torch.distributed for each."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist

__all__ = ["METHODS"]

_SPLITS = "output_split_sizes input_split_sizes"
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _waited(function: Any, async_op: bool, **options: Any) -> Any:
    work = function(**options)
    return work if async_op else work.wait() and None


# By method: the function of torch, and its names of the arguments in torchcomms' order.
METHODS: dict[str, tuple[Any, str]] = {
    "all_reduce": (dist.all_reduce, "tensor op"),
    "reduce_scatter_single": (_reduce_scatter, "output input op"),
    "reduce": (dist.reduce, "tensor group_dst op"),
    "broadcast": (dist.broadcast, "tensor group_src"),
    "all_gather": (dist.all_gather, "tensor_list tensor"),
    "all_gather_single": (_all_gather, "output_tensor input_tensor"),
    "all_to_all": (dist.all_to_all, "output_tensor_list input_tensor_list"),
    "all_to_all_single": (dist.all_to_all_single, "output input"),
    "all_to_all_v_single": (dist.all_to_all_single, f"output input {_SPLITS}"),
    "scatter": (dist.scatter, "tensor scatter_list group_src"),
    "gather": (dist.gather, "gather_list tensor group_dst"),
    "barrier": (dist.barrier, ""),
    "send": (partial(_waited, dist.isend), "tensor group_dst"),
    "recv": (partial(_waited, dist.irecv), "tensor group_src"),
}
