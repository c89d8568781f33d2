"""Builds the dictionary that ``_get_ddp_logging_data`` returns, with the fields of torch's."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Iterable
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import DebugLevel, get_debug_level  # type: ignore[attr-defined]

from ddp_core.ddp._ddp_state import DDPState
from ddp_core.reducer._timeline import StepTimes

__all__ = ["log_construction", "log_recorded_steps", "logging_data"]

logger = logging.getLogger("ddp_core")

_VARIABLES = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "GLOO_DEVICE_TRANSPORT",
)
# C++'s names, as torch's logger writes them.
_C_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}


def logging_data(state: DDPState) -> dict[str, Any]:
    """Returns settings, bucket sizes, and times in nanoseconds of the latest recorded step."""
    reducer, replica, settings = state.reducer, state.replica, state.settings
    placement = replica.placement
    parameters = [entry.parameter for entry in reducer.parameters]
    sizes = _listed(bucket.nbytes for bucket in reducer.buckets)
    members = _listed(" ".join(map(str, bucket.members)) for bucket in reducer.buckets)
    launcher = reducer.launcher
    unused = [parameters[index].nbytes for index in reducer.history.unused or ()]
    data: dict[str, Any] = {
        "module_name": type(replica.module).__name__,
        "backend_name": dist.get_backend(replica.group),
        "world_size": replica.group.size(),
        "rank": replica.group.rank(),
        "device_ids": _listed(placement.device_ids or ()),
        "output_device": -1 if placement.output_device is None else placement.output_device,
        "is_multi_device_module": int(placement.several),
        "dtypes": ", ".join(sorted({_C_NAMES.get(p.dtype, str(p.dtype)) for p in parameters})),
        "num_parameter_tensors": len(parameters),
        "total_parameter_size_bytes": sum(parameter.nbytes for parameter in parameters),
        "broadcast_buffers": int(state.buffers.enabled),
        "bucket_cap_bytes": reducer.plan.caps.cap,
        "bucket_sizes": _listed(reducer.history.first_sizes),
        "find_unused_parameters": int(settings.find_unused),
        "gradient_as_bucket_view": int(settings.as_view),
        "static_graph": int(settings.static_graph),
        "can_set_static_graph": int(reducer.history.same_unused),
        "join_uneven_inputs": int(state.uneven.has_joined),
        "has_error": int(bool(launcher.error)),
        "error": launcher.error,
        "has_sync_bn": int(any(isinstance(m, nn.SyncBatchNorm) for m in replica.module.modules())),
        "has_rebuilt_buckets": int(reducer.plan.rebuilt),
        "rebuilt_bucket_sizes": sizes if reducer.plan.rebuilt else "",
        "rebuilt_per_bucket_param_indices": members if reducer.plan.rebuilt else "",
        "prev_iteration_grad_ready_order_indices": _listed(reducer.plan.arrival),
        "iteration": launcher.step,
        "num_buckets_reduced": reducer.history.sent,
        "unused_parameter_size": sum(unused),
        "gloo_num_threads": torch.get_num_threads(),
    }
    if launcher.hook_name is not None:
        data["comm_hook"] = launcher.hook_name
    for variable in _VARIABLES:
        data[variable.lower()] = os.environ.get(variable, "N/A")
    data["torch_distributed_debug"] = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "N/A")
    steps = [times for times in reducer.timeline.steps if times.resolve()]
    if steps:
        rows = [_durations(times) for times in steps]
        for field, value in rows[-1].items():
            data[field] = value
            data[f"avg_{field}"] = int(fmean(row[field] for row in rows))
        data.update(_moments(steps[-1]))
    return data


def log_construction(state: DDPState, mixed_precision: Any) -> None:
    """Logs the settings that torch's class logs, and all with ``TORCH_DISTRIBUTED_DEBUG``."""
    if not state.reduces:
        logger.info("Delay the AllReduce of all parameters.")
    if mixed_precision is not None:
        logger.warning("Received mixed precision config %s", mixed_precision)
    if get_debug_level() != DebugLevel.OFF and state.reduces:
        _log("DistributedDataParallel initialized with", logging_data(state))


def log_recorded_steps(state: DDPState) -> None:
    """Logs every step that is recorded, with ``TORCH_DISTRIBUTED_DEBUG=DETAIL``."""
    if get_debug_level() != DebugLevel.DETAIL or not state.reduces:
        return
    state_reference = weakref.ref(state)  # which hold the reducer that holds the function

    def log() -> None:
        alive = state_reference()
        if alive is not None:
            _log("DistributedDataParallel runtime statistics", logging_data(alive))

    state.reducer.history.on_recorded = log


def _log(title: str, data: dict[str, Any]) -> None:
    lines = "\n".join(f"{field}: {value}" for field, value in data.items())
    logger.info("[Rank %s] %s:\n%s", data["rank"], title, lines)


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def _communication(times: StepTimes) -> tuple[float, float]:
    """Returns when the first bucket was launched, and when the last one was done."""
    launched = [bucket.launched for bucket in times.buckets if bucket.launched]
    decoded = [bucket.decoded for bucket in times.buckets if bucket.decoded]
    return min(launched, default=times.backward_ended), max(decoded, default=times.finished)


def _moments(times: StepTimes) -> dict[str, int]:
    """Returns times in nanoseconds since 1970."""
    epoch = time.time() - time.perf_counter()  # the clock counts from a moment of its own
    comm_began, comm_ended = _communication(times)
    seconds = {
        "forward_compute_time_start": times.forward_began,
        "backward_compute_time_start": times.backward_began,
        "backward_compute_time_end": times.backward_ended,
        "backward_comm_time_start": comm_began,
        "backward_comm_time_end": comm_ended,
    }
    return {name: int((epoch + value) * 1e9) for name, value in seconds.items()}


def _durations(times: StepTimes) -> dict[str, int]:
    comm_began, comm_ended = _communication(times)
    overlap = min(times.backward_ended, comm_ended) - comm_began
    seconds = {
        "forward_compute_time": times.backward_began - times.forward_began,
        "backward_compute_time": times.backward_ended - times.backward_began,
        "backward_comm_time": comm_ended - comm_began,
        "backward_compute_comm_overlap_time": overlap,
    }
    # A bucket may go out only when backward has ended: no overlap then, not a negative one.
    return {name: max(int(value * 1e9), 0) for name, value in seconds.items()}
