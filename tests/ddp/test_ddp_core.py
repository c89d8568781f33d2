"""Abilities of ddp_core's DistributedDataParallel beyond torch's, or without a CPU answer there."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import resource
import warnings
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commhooks
import ddp_core
from commhooks.errors import RegistrationError
from ddp_core import DistributedDataParallel, MixedPrecision
from ddp_core.reducer._plan import agree_on
from tests.tools import models
from tests.tools.harness import on_ranks
from tests.tools.models import loss_of
from tests.tools.training import (
    averaged,
    batch,
    gradients,
    mlp,
    outcome,
    parameters,
)


def wrapped(module: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module, **{"bucket_cap_mb": 0.002, **options})


def step_of(model: nn.Module, step: int, rank: int, *, width: int = 16) -> None:
    model.zero_grad()
    loss_of(model(batch(step, rank, 8, width))).backward()


# ---- hooks come and go


@on_ranks(2)
def test_a_hook_is_registered_replaced_and_removed_between_steps(rank: int) -> None:
    plain, model = wrapped(mlp()), wrapped(mlp())
    for step in range(8):
        if step == 2:
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        if step == 4:
            model.replace_comm_hook(None, default_hooks.allreduce_hook)
        if step == 6:
            model.remove_comm_hook()
        step_of(plain, step, rank)
        step_of(model, step, rank)
        same = torch.equal(gradients(plain), gradients(model))
        assert same == (step not in (2, 3)), step
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(Exception, match="can only be called once"):
        model.register_comm_hook(None, default_hooks.allreduce_hook)


@on_ranks(2)
def test_a_scheduled_hook_takes_over_at_its_step(rank: int) -> None:
    plain, model = wrapped(mlp()), wrapped(mlp())
    model.schedule_comm_hook(2, None, default_hooks.fp16_compress_hook)
    model.schedule_comm_hook(4, None, None)
    for step in range(6):
        step_of(plain, step, rank)
        step_of(model, step, rank)
        assert torch.equal(gradients(plain), gradients(model)) == (step not in (2, 3)), step
    with pytest.raises(Exception, match="step 6 is next"):
        model.schedule_comm_hook(3, None, None)


@on_ranks(1)
def test_torchs_module_says_that_it_cannot_let_go_or_lay_out():
    model = TorchDDP(mlp())
    commhooks.register(model, "none")
    for call, *arguments in (
        (commhooks.unregister, model),
        (partial(commhooks.register, layout="shape"), TorchDDP(mlp()), "none"),
    ):
        with pytest.raises(RegistrationError, match=r"ddp_core\.DistributedDataParallel"):
            call(*arguments)


# ---- layouts


@on_ranks(3)
def test_matrices_of_one_shape_share_buckets_and_vectors_too(rank):
    module = nn.Sequential(
        nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 2)
    )
    reference = wrapped(copy.deepcopy(module), bucket_cap_mb=25)
    model = wrapped(module, bucket_cap_mb=25)
    commhooks.register(model, "none", layout="shape")
    for step in range(3):
        step_of(reference, step, rank)
        step_of(model, step, rank)
        torch.testing.assert_close(gradients(model), gradients(reference))
    assert sorted(sorted(bucket.names) for bucket in model.reducer.buckets) == [
        ["0.bias", "1.bias", "2.bias", "3.bias"],
        ["0.weight"],
        ["1.weight", "2.weight"],
        ["3.weight"],
    ]


@on_ranks(2)
def test_a_layout_follows_the_scheme_when_it_is_switched(rank):
    model = wrapped(mlp(width=32), bucket_cap_mb=25)
    hook = commhooks.register(model, "powersgd", rank=2, layout="scheme")
    for step in range(6):
        if step == 3:
            hook.switch("none")
        step_of(model, step, rank, width=32)
        assert len(model.reducer.buckets) == (2 if step < 3 else 1)


class _Wants:
    """State of a hook that asks for small buckets."""

    bucket_cap_mb = 0.5


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}])
@on_ranks(2)
def test_a_hook_gets_buckets_of_the_size_it_asks_for(options):
    net = nn.Sequential(*(nn.Linear(600, 600) for _ in range(3)))  # 1.4 MB each
    model = wrapped(net, bucket_cap_mb=None, **options)
    model.register_comm_hook(_Wants(), lambda _, bucket: default_hooks.allreduce_hook(None, bucket))
    for _ in range(3):
        model(torch.ones(1, 600)).sum().backward()
    assert len(model.reducer.buckets) >= 3  # 2 of the default sizes


@on_ranks(3)
def test_ranks_take_rank_0s_buckets(rank):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            first, second = (self.a, self.b) if rank == 0 else (self.b, self.a)
            return second(first(x))

    model = wrapped(Net(), bucket_cap_mb=0.0005)
    local = Net()
    local.load_state_dict(model.module.state_dict())
    for step in range(3):
        step_of(model, step, rank)
        step_of(local, step, rank)
        expected = averaged(gradients(local))
        torch.testing.assert_close(gradients(model), expected, rtol=1e-6, atol=1e-7)
    buckets = [bucket.members for bucket in model.reducer.buckets]
    everyone: list[Any] = [None] * 3
    dist.all_gather_object(everyone, buckets)
    assert everyone == [buckets] * 3
    assert len(buckets) > 1
    assert set(buckets[0]) <= {2, 3}  # rank 0 uses the second layer last


# ---- optimizer in backward


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("scheme", [None, "powersgd"])
@on_ranks(2, ignore_warnings=(".*full backward hook",))
def test_optimizer_in_backward_steps_as_after_it_also_with_a_hook(
    rank: int, view: bool, scheme: str | None
) -> None:
    def build() -> tuple[DistributedDataParallel, Any]:
        model = wrapped(mlp(width=64), gradient_as_bucket_view=view, bucket_cap_mb=0.02)
        hook = commhooks.register(model, scheme, rank=2) if scheme else None
        return model, hook

    (usual, _), (fused, _) = build(), build()
    optimizer = torch.optim.SGD(usual.parameters(), lr=0.1, momentum=0.9)
    _apply_optimizer_in_backward(torch.optim.SGD, fused.parameters(), {"lr": 0.1, "momentum": 0.9})
    for step in range(6):
        optimizer.zero_grad()
        loss_of(usual(batch(step, rank, 8, 64))).backward()
        optimizer.step()
        loss_of(fused(batch(step, rank, 8, 64))).backward()
        assert all(parameter.grad is None for parameter in fused.parameters())
        assert torch.equal(parameters(usual), parameters(fused)), step


# ---- what goes wrong leaves the next step clean


@on_ranks(2)
def test_the_step_after_a_broken_hook_is_right(rank: int) -> None:
    breaks = False

    def hook(state: None, bucket: Any) -> torch.futures.Future[Tensor]:
        if breaks and bucket.is_last():
            raise ArithmeticError("on purpose")
        return default_hooks.allreduce_hook(None, bucket)

    model, plain = wrapped(mlp()), wrapped(mlp())
    model.register_comm_hook(None, hook)
    for step in range(4):
        breaks = True
        with pytest.raises(ArithmeticError):
            step_of(model, step, rank)
        breaks = False
        step_of(model, step, rank)
        step_of(plain, step, rank)
        assert torch.equal(gradients(model), gradients(plain)), step


@on_ranks(2)
def test_an_unused_parameter_is_named(rank):
    model = wrapped(models.SometimesUnused())
    loss_of(model(batch(0, rank, 4, 16))).backward()
    name, text = outcome(model, batch(1, rank, 4, 16))
    assert name == "RuntimeError"
    assert "find_unused_parameters=True" in text
    assert "idle.weight, idle.bias" in text


# ---- construction


@on_ranks(3)
def test_different_models_are_an_error_on_every_rank_that_names_the_parameter(rank):
    for first, layer in (
        ("'2.weight'", lambda: nn.Linear(16, 17)),
        ("'2.weight'", lambda: nn.Linear(16, 16).double()),
        ("", lambda: nn.Linear(16, 16, bias=False)),
    ):
        module = mlp()
        if rank == 1:
            module[2] = layer()
        name, text = outcome(DistributedDataParallel, module)
        assert name == "MismatchError"
        assert "DDP expects same model across all ranks" in text
        assert first in text
        assert "rank 1" in text


DIFFERENCES: dict[str, tuple[str, str]] = {  # what messages say of rank 0, and of rank 1
    "a buffer": ("nothing", "'here' with sizes [3], torch.float32"),
    "a frozen layer": ("nothing", "'6.weight' with sizes [2, 2], torch.float32"),
    "find_unused_parameters": ("find_unused_parameters=False", "find_unused_parameters=True"),
    "static_graph": ("static_graph=False", "static_graph=True"),
    "broadcast_buffers": ("forward_sync_buffers=True", "forward_sync_buffers=False"),
    "mixed_precision": ("mixed_precision=None", "mixed_precision=['torch.bfloat16', 'None', "),
}


@on_ranks(2, pg_timeout=10)
def test_ranks_that_were_built_differently_raise_an_error(rank):
    for difference, (first, second) in DIFFERENCES.items():
        module, options = mlp(), {}
        module.register_buffer("there", torch.ones(3))
        if rank and difference == "a buffer":
            module.register_buffer("here", torch.ones(3))
        elif rank and difference == "a frozen layer":
            module.append(nn.Linear(2, 2).requires_grad_(False))
        elif difference == "broadcast_buffers":
            options["forward_sync_buffers"] = not rank
        elif rank and difference == "mixed_precision":
            options[difference] = MixedPrecision(param_dtype=torch.bfloat16)
        elif rank:
            options[difference] = True
        name, text = outcome(DistributedDataParallel, module, **options) or ("", "")
        assert name == "MismatchError", difference
        assert f"rank 0 has {first}" in text, text
        assert f"rank 1 has {second}" in text, text
    # What decides no message may differ.
    module = mlp()
    if rank:
        module.register_buffer("here", torch.ones(3))
    options = {"gradient_as_bucket_view": bool(rank), "bucket_cap_mb": 1 + rank}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of a torch with forward_sync_buffers
        DistributedDataParallel(module, broadcast_buffers=False, **options)


@on_ranks(1, ignore_warnings=("Lazy modules",))
def test_construction_errors_are_those_of_torch():
    frozen = nn.Linear(2, 2).requires_grad_(False)
    mesh = dist.init_device_mesh("cpu", (1,))
    attempts: list[tuple[nn.Module, dict[str, Any]]] = [
        (frozen, {}),
        (nn.LazyLinear(2), {}),
        (nn.Linear(2, 2), {"device_ids": [0]}),
        (nn.Linear(2, 2), {"device_ids": [0, 1]}),
        (nn.Linear(2, 2), {"process_group": dist.group.WORLD, "device_mesh": mesh}),
        (nn.Linear(2, 2), {"param_to_hook_all_reduce": frozen.weight}),
        (nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)), {}),
    ]
    for module, options in attempts:
        torch_error, core_error = (
            outcome(kind, copy.deepcopy(module), **options)
            for kind in (TorchDDP, DistributedDataParallel)
        )
        assert torch_error is not None
        assert torch_error[0] == core_error[0]
        texts = [error[1].split(",")[0].replace('"', "'") for error in (torch_error, core_error)]
        assert texts[0] == texts[1]


# ---- timeline and logging data


@on_ranks(2)
def test_every_bucket_and_round_is_on_the_timeline(rank, tmp_path):
    model = wrapped(mlp(), bucket_cap_mb=0.001)
    commhooks.register(model, "powersgd", rank=1, min_compression_rate=0.5)
    model.timeline.first, model.timeline.every = 3, 4
    for step in range(10):
        step_of(model, step, rank)
    frame = model.timeline.frame()
    assert sorted(set(frame.step)) == [0, 1, 2, 4, 8]
    last = frame[frame.step == 8]
    assert sorted(set(last.bucket)) == list(range(len(model.reducer.buckets)))
    assert set(last[last.nbytes > 200]["round"]) == {0, 1}
    order = ["first_ready", "last_ready", "launched", "round_began", "round_ended", "decoded"]
    assert (last[order].diff(axis=1).iloc[:, 1:] >= 0).all(axis=None)
    assert (frame.exposed >= 0).all()
    path = tmp_path / f"{rank}.json"
    model.timeline.chrome_trace(path)
    names = {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
    assert {"forward 8", "backward 8", "bucket 0"} <= names


@on_ranks(2)
def test_logging_data_has_the_fields_and_values_of_torch(rank):
    logged = []
    for kind in (TorchDDP, DistributedDataParallel):
        torch.manual_seed(0)
        model = kind(models.Cnn(), bucket_cap_mb=0.01, gradient_as_bucket_view=True)
        model.register_comm_hook(None, default_hooks.allreduce_hook)
        for step in range(4):
            loss_of(model(batch(step, rank, 2, 3, 8, 8))).backward()
        logged.append(model._get_ddp_logging_data())
    torch_data, core_data = logged
    times = {name for name in torch_data if "time" in name}
    environment = {"gloo_device_transport", "gloo_num_threads"}
    counted = {"iteration"}  # theirs lags by one
    assert {name for name in times if not name.endswith(("_start", "_end"))} <= set(core_data)
    for name in set(torch_data) - times - environment - counted - {"dtypes"}:
        assert core_data[name] == torch_data[name], name
    assert all(core_data[name] > 0 for name in core_data if name.endswith("compute_time"))


# ---- life and death


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize(
    "options",
    [{"find_unused_parameters": True}, {"static_graph": True}],
    ids=["unused", "static"],
)
@on_ranks(2, ignore_warnings=("find_unused",))
def test_a_deleted_model_is_gone_without_the_garbage_collector(
    rank: int, options: dict[str, Any], hooked: bool
) -> None:
    gc.collect()
    gc.disable()
    model = wrapped(models.Branches(), **options)
    if hooked:
        hook = commhooks.register(model, "fp16")
    for step in range(3):
        model.zero_grad()
        loss_of(model(batch(step, rank, 4, 16), 1)).backward()
    if hooked:
        hook.close()
        del hook
    watched = [weakref.ref(model.module), weakref.ref(model.reducer), weakref.ref(model)]
    del model
    assert [ref() for ref in watched] == [None, None, None]


@pytest.mark.slow
@on_ranks(2, timeout=110)
def test_ten_thousand_steps_leak_nothing(rank):
    model = wrapped(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), bucket_cap_mb=0.00005)
    model.timeline.every = 1

    def run_steps(count: int) -> tuple[int, int]:
        for step in range(count):
            step_of(model, step, rank, width=4)
        gc.collect()
        return len(gc.get_objects()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    (objects, memory), (more_objects, more_memory) = run_steps(2000), run_steps(8000)
    assert model.reducer.launcher.step == 10_000
    assert more_objects - objects < 100
    assert more_memory - memory < 4096  # KiB in 8,000 steps; half a KiB a step would be seen


@on_ranks(2)
def test_a_pickled_model_says_that_its_hook_is_gone_and_trains_when_it_is_back(rank):
    model = wrapped(mlp())
    hook = commhooks.register(model, "powersgd", rank=1)
    step_of(model, 0, rank)
    loaded = pickle.loads(pickle.dumps(model))
    assert outcome(loaded, batch(1, rank, 4, 16))[0] == "HookNotAttachedError"
    commhooks.register(loaded, "powersgd", rank=1).load_state_dict(hook.state_dict())
    for replica in (model, loaded):
        for step in range(3):
            step_of(replica, step, rank)
    assert torch.equal(gradients(model), gradients(loaded))
    own_group = wrapped(mlp(), process_group=dist.new_group([0, 1]))
    assert "default process group" in outcome(pickle.dumps, own_group)[1]


@pytest.mark.parametrize("decides", [True, False])
@on_ranks(3)
def test_ranks_agree_on_the_first_ones_buckets(rank, decides):
    buckets, final = ([[2], [0, 1]], decides) if rank == 0 else ([[0, 1, 2]], not decides)
    agreed = agree_on(buckets, final, dist.group.WORLD, torch.device("cpu"))
    assert agreed == ([[2], [0, 1]], decides)


def test_the_package_lists_its_module():
    assert issubclass(ddp_core.DistributedDataParallel, TorchDDP)
