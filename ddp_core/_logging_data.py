"""The dictionary that ``_get_ddp_logging_data`` returns, with the fields of torch's."""

from __future__ import annotations

import os
from collections.abc import Iterable
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from ddp_core._ddp import DistributedDataParallel
    from ddp_core._timeline import StepTimes

__all__ = ["logging_data"]


def logging_data(ddp: DistributedDataParallel) -> dict[str, Any]:
    """Settings, bucket sizes and times; times are nanoseconds of the latest recorded step."""
    reducer = ddp.reducer
    parameters = [one.parameter for one in reducer.parameters]
    sizes = _listed(bucket.nbytes for bucket in reducer.buckets)
    members = _listed(" ".join(map(str, bucket.members)) for bucket in reducer.buckets)
    hook = None if reducer.launcher.hook is None else reducer.launcher.hook[0]
    unused = [parameters[index].nbytes for index in reducer.unused_parameters or ()]
    data: dict[str, Any] = {
        "module_name": type(ddp.module).__name__,
        "backend_name": dist.get_backend(ddp.process_group),
        "world_size": ddp.process_group.size(),
        "rank": ddp.process_group.rank(),
        "device_ids": _listed(ddp.device_ids or ()),
        "output_device": -1 if ddp.output_device is None else ddp.output_device,
        "is_multi_device_module": int(ddp.is_multi_device_module),
        "dtypes": ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters})),
        "num_parameter_tensors": len(parameters),
        "total_parameter_size_bytes": sum(parameter.nbytes for parameter in parameters),
        "broadcast_buffers": int(ddp.forward_sync_buffers),
        "bucket_cap_bytes": ddp.bucket_bytes_cap,
        "bucket_sizes": _listed(reducer.initial_sizes),
        "find_unused_parameters": int(ddp.find_unused_parameters),
        "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view),
        "static_graph": int(ddp.static_graph),
        "can_set_static_graph": int(reducer.graph_was_static),
        "comm_hook": getattr(hook, "__qualname__", type(hook).__qualname__) if hook else "",
        "has_sync_bn": int(any(isinstance(m, nn.SyncBatchNorm) for m in ddp.module.modules())),
        "has_rebuilt_buckets": int(reducer.plan.rebuilt),
        "rebuilt_bucket_sizes": sizes if reducer.plan.rebuilt else "",
        "rebuilt_per_bucket_param_indices": members if reducer.plan.rebuilt else "",
        "prev_iteration_grad_ready_order_indices": _listed(reducer.plan.arrival),
        "iteration": reducer.launcher.step,
        "num_buckets_reduced": len(reducer.buckets) if reducer.launcher.step else 0,
        "unused_parameter_size": sum(unused),
        "gloo_num_threads": torch.get_num_threads(),
    }
    for variable in ("MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME"):
        data[variable.lower()] = os.environ.get(variable, "N/A")
    data["torch_distributed_debug"] = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "N/A")
    steps = list(reducer.timeline.steps)
    if steps:
        rows = [_durations(times) for times in steps]
        data.update(rows[-1])
        for field in rows[-1]:
            data[f"avg_{field}"] = int(fmean(row[field] for row in rows))
    return data


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def _durations(times: StepTimes) -> dict[str, int]:
    launched = [bucket.launched for bucket in times.buckets if bucket.launched]
    comm_began = min(launched, default=times.backward_ended)
    decoded = [bucket.decoded for bucket in times.buckets if bucket.decoded]
    comm_ended = max(decoded, default=times.finished)
    overlap = min(times.backward_ended, comm_ended) - comm_began
    seconds = {
        "forward_compute_time": times.backward_began - times.forward_began,
        "backward_compute_time": times.backward_ended - times.backward_began,
        "backward_comm_time": comm_ended - comm_began,
        "backward_compute_comm_overlap_time": overlap,
    }
    return {name: max(int(value * 1e9), 0) for name, value in seconds.items()}
