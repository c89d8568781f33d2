"""An optimizer that steps in a hook's future does what it does after backward."""

import types
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook as torchs
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_default
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.optim.functional_adam import _FunctionalAdam
from torch.distributed.optim.functional_sgd import _FunctionalSGD
from torch.nn.parallel import DistributedDataParallel

import commhooks
import ddp_core
from commhooks import HookState
from commhooks.ddp_comm_hooks import ddp_zero_hook as zero_hook
from commhooks.ddp_comm_hooks import default_hooks as default
from commhooks.ddp_comm_hooks import optimizer_overlap_hooks as overlap
from commhooks.ddp_comm_hooks import powerSGD_hook as powerSGD
from tests.tools.harness import run_ranks

CLASSES = [DistributedDataParallel, ddp_core.DistributedDataParallel]


def make_model(ddp_class: Any) -> Any:
    """Convolutions whose weights lie channels last, and a layer; several buckets."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(4, 12, 3), nn.Tanh(), nn.Conv2d(12, 8, 3), nn.Flatten(), nn.Linear(32, 40)]
    net = nn.Sequential(*layers).to(memory_format=torch.channels_last)
    return ddp_class(net, bucket_cap_mb=0.004)


def powersgd(model: Any) -> tuple[Any, Any]:
    return powerSGD.PowerSGDState(None, 2, start_powerSGD_iter=1), powerSGD.powerSGD_hook


def wrapped(model: Any) -> tuple[Any, Any]:
    state = powerSGD.PowerSGDState(None, 2, start_powerSGD_iter=1)
    return state, default.bf16_compress_wrapper(powerSGD.powerSGD_hook)


def int8(model: Any) -> tuple[Any, Any]:
    return HookState("int8", model), commhooks.comm_hook


def returns_another_tensor(model: Any) -> tuple[Any, Any]:
    def hook(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer() * 0.5)
        return future

    return None, commhooks.hook.as_hook(hook)


def train(model: Any, rank: int, step: Any, steps: int = 4) -> list[torch.Tensor]:
    for number in range(steps):
        model.zero_grad()
        generator = torch.Generator().manual_seed(100 * number + rank)
        x = torch.randn(3, 4, 6, 6, generator=generator).to(memory_format=torch.channels_last)
        model(x).square().sum().backward()
        step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def overlapped(rank: int, world_size: int) -> list[str]:
    """Lists cases whose parameters are not those of the optimizer that steps after backward."""
    warnings.simplefilter("ignore")  # torch's own, of its functional optimizers
    differ = []
    for ddp_class in CLASSES:
        for choose in (powersgd, wrapped, int8, returns_another_tensor):
            after, within = make_model(ddp_class), make_model(ddp_class)
            state, hook = choose(after)
            after.register_comm_hook(state, hook)
            optimizer = torch.optim.Adam(after.parameters(), lr=0.01, foreach=False)
            expected = train(after, rank, optimizer.step)

            chosen = list(within.parameters())
            functional = _FunctionalAdam(chosen, lr=0.01)
            optimizer_state = overlap._OptimizerHookState(functional, chosen)
            state, hook = choose(within)
            within.register_comm_hook(state, overlap._hook_then_optimizer(hook, optimizer_state))
            if choose is powersgd:
                state.state_dict()  # finds its model behind the wrapper
            if not all(map(torch.equal, train(within, rank, lambda: None), expected)):
                differ.append(f"{ddp_class.__module__}, {choose.__name__}")
    return differ


def test_a_hook_then_an_optimizer_is_the_optimizer_after_the_hook() -> None:
    assert run_ranks(overlapped, 2) == [[], []]


def halved_in_place(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer().mul_(0.5))
    return future


def zero_overlapped(rank: int, world_size: int) -> Any:
    """Parameters with torch's hook and functions, ours, and PowerSGD; Gloo passes for NCCL."""
    for refuses in (zero_hook.hook_with_zero_step, zero_hook.hook_with_zero_step_interleaved):
        model = make_model(DistributedDataParallel)
        zero = ZeroRedundancyOptimizer(
            model.parameters(), _FunctionalSGD, lr=0.01, overlap_with_ddp=True
        )
        with pytest.raises(RuntimeError, match="Gloo backend"):
            refuses(default.allreduce_hook, model, zero)
    torchs.dist = types.SimpleNamespace(**{**vars(dist), "get_backend": lambda group: "nccl"})
    warnings.simplefilter("ignore")
    trained = []
    for make, hook, state in (
        (torchs.hook_with_zero_step, torch_default.allreduce_hook, None),
        (zero_hook.hook_with_zero_step, default.allreduce_hook, None),
        (torchs.hook_with_zero_step, halved_in_place, None),
        (zero_hook.hook_with_zero_step, returns_another_tensor(None)[1], None),
        (zero_hook.hook_with_zero_step, powerSGD.powerSGD_hook, powerSGD.PowerSGDState(None)),
    ):
        model = make_model(DistributedDataParallel)
        zero = ZeroRedundancyOptimizer(
            model.parameters(), _FunctionalSGD, lr=0.01, overlap_with_ddp=True
        )
        model.register_comm_hook(state, make(hook, model, zero))
        trained.append(train(model, rank, lambda: None, steps=5))
    return trained


def test_torchs_overlap_of_zero_steps_by_what_a_hook_returns() -> None:
    left, right = run_ranks(zero_overlapped, 2)
    plain, ours, in_place, halved, powersgd = left
    assert all(map(torch.equal, plain, ours))
    assert all(map(torch.equal, in_place, halved))
    assert not any(map(torch.equal, plain, halved))
    assert all(map(torch.equal, plain, powersgd))  # its first 1,000 steps are dense
    assert all(map(torch.equal, right[4], powersgd))
