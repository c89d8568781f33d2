"""Names of torch's classes: they work on ours, or say what to do instead."""

from __future__ import annotations

import inspect
import logging
import os
import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_core import DistributedDataParallel, GradBucket, MixedPrecision
from ddp_core.ddp._torch_names import _REFUSED as MODULE_REFUSED
from ddp_core.ddp._torch_reducer import _REFUSED as REDUCER_REFUSED
from ddp_core.ddp._torch_reducer import TorchReducer
from tests.tools.harness import on_ranks, run_ranks
from tests.tools.models import Branches, loss_of
from tests.tools.training import batch, mlp, outcome

TORCH = nn.parallel.DistributedDataParallel
# Inherited, and right as they are: they look at nothing that torch's constructor makes.
INHERITED = {
    "_distributed_rank",
    "_get_active_ddp_module",
    "_get_data_parallel_params",
    "_get_parameters",
    "_register_fused_optim",
    "_set_ddp_sink_clone",
    "_set_params_and_buffers_to_ignore_for_model",
    "gather",
    "scatter",
    "to_kwargs",
    "train",
}


def test_a_bucket_is_a_bucket_of_torchs():
    bucket = GradBucket(0, torch.zeros(2), [torch.zeros(2)])
    assert isinstance(bucket, dist.GradBucket)
    assert isinstance(bucket, GradBucket)
    assert type(bucket) is GradBucket
    with pytest.raises(TypeError):  # C++ refuses it, it does not read what is not there
        dist.GradBucket.buffer(bucket)


def test_all_names_of_torchs_classes_are_known():
    # The module in forward is no name of the class, but an attribute of it: forward passes of
    # ranks that are threads leave it there, where they end in another order than they began in.
    definitions = {
        name: value for name, value in vars(TORCH).items() if not isinstance(value, nn.Module)
    }
    inherited = {
        name
        for name, value in definitions.items()
        if (callable(value) or isinstance(value, (property, staticmethod, classmethod)))
        and next(cls for cls in DistributedDataParallel.__mro__ if name in vars(cls)) is TORCH
    }
    assert inherited == INHERITED
    ours = TorchReducer
    torch_names = {name for name in dir(dist.Reducer) if not name.startswith(("__", "_pybind"))}
    assert {name for name in torch_names if not hasattr(ours, name)} == set()


@on_ranks(2)
def test_a_trainer_finds_torchs_names(rank: int) -> None:
    model = DistributedDataParallel(
        nn.Sequential(mlp(), nn.BatchNorm1d(16)), find_unused_parameters=True
    )
    for owner, names in ((model, MODULE_REFUSED), (model.reducer, REDUCER_REFUSED)):
        for name in names:
            error = outcome(getattr(owner, name))
            assert error is not None
            assert error[0] == "NotImplementedError"
            assert name in error[1]
            assert ": " in error[1]
    for name in ("_sync_buffers", "_check_and_sync_module_buffers", "_default_broadcast_coalesced"):
        for buffer in model.buffers():
            buffer.fill_(rank)
        getattr(model, name)()
        assert not any(buffer.any() for buffer in model.buffers())
    model._sync_module_buffers(1)
    assert model._find_common_rank(rank, rank == 0) == 0
    model._sync_final_model(rank == 1)
    assert model.to_kwargs((1,), {"a": torch.ones(1)}, 0) == (((1,),), ({"a": torch.ones(1)},))
    assert model.bucket_bytes_cap_default
    assert (model._check_sync_bufs_pre_fwd(), model._check_sync_bufs_post_fwd()) == (True, False)
    # As Lightning's manual optimization drives it.
    reducer = model.reducer
    for step in range(3):
        model.zero_grad()
        model.require_backward_grad_sync = False
        loss = loss_of(model(batch(step, rank, 4, 16)))
        model.require_backward_grad_sync = True
        assert reducer._rebuild_buckets() in (False, True)
        reducer.prepare_for_backward([])
        loss.backward()
        grads = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        assert grads.any()
        total = grads.clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total / 2, grads)
    used = reducer._get_local_used_map()
    assert used.dtype == torch.int32
    assert used.tolist() == [2] * len(used)  # the sum of the last step, as torch's
    model._clear_grad_buffer()
    (zeros, *_) = reducer._get_zeros_like_grad_buckets()
    assert not reducer._run_comm_hook(zeros).wait()[0].any()
    assert reducer._ddp_graph_static()
    reducer._reset_state()
    reducer._check_reducer_finalized()
    reducer._set_static_graph()


def _warnings_of(kind: Any, options: dict[str, Any]) -> list[tuple[str, type, str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kind(mlp(), **options)
    return [(str(warning.message), warning.category, warning.filename) for warning in caught]


@on_ranks(1)
def test_torchs_warnings_log_lines_and_logged_errors_are_ours_too(rank: int) -> None:
    kept, log = Kept(), logging.getLogger("ddp_core")
    log.addHandler(kept)
    log.setLevel(logging.INFO)
    both = {"broadcast_buffers": False, "forward_sync_buffers": True}
    known = inspect.signature(TORCH.__init__).parameters  # releases before 2.13 do not warn
    for options in (
        {"broadcast_buffers": False},
        {name: both[name] for name in both if name in known},
    ):
        warned = [_warnings_of(kind, options) for kind in (TORCH, DistributedDataParallel)]
        assert warned[0] == warned[1]
        assert ("forward_sync_buffers" in known) == bool(warned[0])
    whole = mlp()
    named = list(whole.named_parameters())
    DistributedDataParallel(
        whole, delay_all_reduce_named_params=named, param_to_hook_all_reduce=named[0][1]
    )
    DistributedDataParallel(mlp(), mixed_precision=MixedPrecision(torch.bfloat16))
    model = DistributedDataParallel(mlp(), bucket_cap_mb=0.0005)
    for step in range(3):
        loss_of(model(batch(step, rank, 4, 16))).backward()
    assert [text[:30] for text in kept.texts] == [
        "Delay the AllReduce of all par",
        "Received mixed precision confi",
        "Reducer buckets have been rebu",
    ]
    log.removeHandler(kept)
    log.setLevel(logging.NOTSET)
    torchs = TORCH(mlp())
    for hook in (5, lambda state, bucket: None):
        if callable(hook):
            hook.__annotations__["bucket"] = int
        data = []
        for model_of_class in (torchs, model):
            assert outcome(model_of_class.register_comm_hook, None, hook) is not None
            logged = model_of_class._get_ddp_logging_data()
            data.append((logged["has_error"], logged["error"]))
        assert data[0] == data[1]
        assert data[0][0] == 1


class Kept(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _logs(rank: int, world_size: int, level: str) -> Any:
    kept, log = Kept(), logging.getLogger("ddp_core")
    log.addHandler(kept)
    log.setLevel(logging.INFO)
    with patch.dict(os.environ, TORCH_DISTRIBUTED_DEBUG=level):
        dist.set_debug_level_from_env()
    model = DistributedDataParallel(
        Branches(),
        find_unused_parameters=True,
        skip_all_reduce_unused_params=True,
        bucket_cap_mb=0.0005,
    )
    model.timeline.first = 2
    for step in range(4):
        loss_of(model(batch(step, rank, 4, 16), 0)).backward()
    with torch.profiler.profile() as profile:
        loss_of(model(batch(5, rank, 4, 16), 0)).backward()
    with model.join():
        loss_of(model(batch(6, rank, 4, 16), 0)).backward()
    prefix = "DistributedDataParallel."
    ranges = {event.key for event in profile.key_averages() if event.key.startswith(prefix)}
    return kept.texts, ranges, model._get_ddp_logging_data(), len(model.reducer.buckets)


@pytest.mark.parametrize("level", ["OFF", "INFO", "DETAIL"])
def test_debug_levels_log_as_torchs_and_profiles_have_ranges(level):
    quiet = (".*Profiler clears events",)  # of torch 2.11
    ((texts, ranges, data, buckets),) = run_ranks(_logs, 1, level, ignore_warnings=quiet)
    assert len(texts) == {"OFF": 0, "INFO": 1, "DETAIL": 3}[level]
    assert all("module_name: Branches" in text for text in texts)
    assert "initialized with" in "".join(texts) or level == "OFF"
    assert "runtime statistics" in "".join(texts) or level != "DETAIL"
    assert "DistributedDataParallel.forward" in ranges
    assert {f"DistributedDataParallel.{phase}: bucket 0" for phase in ("launch", "wait")} <= ranges
    assert 0 < data["num_buckets_reduced"] < buckets
    assert data["join_uneven_inputs"] == 1
    assert (data["has_error"], data["error"]) == (0, "")
    order = ["forward_compute_time_start", "backward_compute_time_start"]
    order += ["backward_comm_time_start", "backward_comm_time_end"]
    assert sorted(order, key=data.get) == order
