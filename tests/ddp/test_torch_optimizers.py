"""Optimizers of torch that hooks are a part of: steps in a hook's future, and post-local SGD."""

import types
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook as torchs
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_default
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.optim.functional_adam import _FunctionalAdam
from torch.distributed.optim.functional_sgd import _FunctionalSGD
from torch.nn.parallel import DistributedDataParallel

import commhooks
import ddp_core
from commhooks import HookState, classic
from commhooks.ddp_comm_hooks import ddp_zero_hook as zero_hook
from commhooks.ddp_comm_hooks import default_hooks as default
from commhooks.ddp_comm_hooks import optimizer_overlap_hooks as overlap
from commhooks.ddp_comm_hooks import powerSGD_hook as powerSGD
from commhooks.errors import RegistrationError
from tests.ddp import test_classic
from tests.ddp.test_classic import backward, distance
from tests.tools.harness import on_ranks, run_ranks
from tests.tools.training import equal_on_all_ranks, through_file, train

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


def trained_parameters(model: Any, rank: int, step: Any, steps: int = 4) -> list[torch.Tensor]:
    for number in range(steps):
        model.zero_grad()
        generator = torch.Generator().manual_seed(100 * number + rank)
        x = torch.randn(3, 4, 6, 6, generator=generator).to(memory_format=torch.channels_last)
        model(x).square().sum().backward()
        step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@on_ranks(2, ignore_warnings=(".*",))  # torch's own, of its functional optimizers
def test_a_hook_then_an_optimizer_is_the_optimizer_after_the_hook(rank: int) -> None:
    for ddp_class in CLASSES:
        for choose in (powersgd, wrapped, int8, returns_another_tensor):
            after, within = make_model(ddp_class), make_model(ddp_class)
            state, hook = choose(after)
            after.register_comm_hook(state, hook)
            optimizer = torch.optim.Adam(after.parameters(), lr=0.01, foreach=False)
            expected = trained_parameters(after, rank, optimizer.step)

            chosen = list(within.parameters())
            functional = _FunctionalAdam(chosen, lr=0.01)
            optimizer_state = overlap._OptimizerHookState(functional, chosen)
            state, hook = choose(within)
            within.register_comm_hook(state, overlap._hook_then_optimizer(hook, optimizer_state))
            if choose is powersgd:
                state.state_dict()  # finds its model behind the wrapper
            results = trained_parameters(within, rank, lambda: None)
            assert all(map(torch.equal, results, expected)), (ddp_class, choose)


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
        trained.append(trained_parameters(model, rank, lambda: None, steps=5))
    return trained


def test_torchs_overlap_of_zero_steps_by_what_a_hook_returns() -> None:
    left, right = run_ranks(zero_overlapped, 2)
    plain, ours, in_place, halved, powersgd = left
    assert all(map(torch.equal, plain, ours))
    assert all(map(torch.equal, in_place, halved))
    assert not any(map(torch.equal, plain, halved))
    assert all(map(torch.equal, plain, powersgd))  # its first 1,000 steps are dense
    assert all(map(torch.equal, right[4], powersgd))


# ---- post-local SGD


@on_ranks(4)
def test_post_local_sgd_averages_globally_then_locally(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = pairs[rank // 2]
    everywhere, here, alone = (
        test_classic.make_model(),
        test_classic.make_model(process_group=pair),
        test_classic.make_model(process_group=pair),
    )
    early, late = backward(everywhere, rank, 1), backward(everywhere, rank, 3)
    with alone.no_sync():
        expected = [early, late, backward(here, rank, 3), backward(alone, rank, 3)]
    # All ranks are on this host: without a subgroup the local mean is the global one.
    for allreduce, subgroup, equal in (
        (True, pair, [True, False, True, False]),
        (False, pair, [True, False, False, True]),
        (True, None, [True, True, False, False]),
    ):
        model = test_classic.make_model()
        state = classic.PostLocalSGDState(None, subgroup, 2, allreduce)
        model.register_comm_hook(state, classic.post_localSGD_hook)
        results = [backward(model, rank, step) for step in range(4)]
        assert state.iter == 2
        # Sums of 4 numbers in two orders differ in the last bits of float32.
        compared = zip((results[1], results[3], results[3], results[3]), expected, strict=True)
        assert [distance(*pair) < 1e-5 for pair in compared] == equal


@on_ranks(2)
def test_a_state_of_post_local_sgd_is_saved_and_goes_on(rank: int, world_size: int) -> None:
    alone = [dist.new_group([each]) for each in range(world_size)][rank]
    for subgroup in (alone, None):
        model = test_classic.make_model(2)
        state = classic.PostLocalSGDState(None, subgroup, 2)
        model.register_comm_hook(state, classic.post_localSGD_hook)
        for step in range(4):
            expected = backward(model, rank, step)
        # Saved in the local steps.
        saved = {"comm_hook": classic.post_localSGD_hook, "comm_hook_state": state}
        loaded = through_file(saved)
        again = test_classic.make_model(2)
        again.register_comm_hook(loaded["comm_hook_state"], loaded["comm_hook"])
        if subgroup is not None:
            with pytest.raises(RegistrationError, match=r"set state\.subgroup"):
                backward(again, rank, 3)
            loaded["comm_hook_state"].subgroup = subgroup
            again = test_classic.make_model(2)
            again.register_comm_hook(loaded["comm_hook_state"], loaded["comm_hook"])
        assert all(map(torch.equal, backward(again, rank, 3), expected))
        assert loaded["comm_hook_state"].iter == 2


@on_ranks(2)
def test_post_local_sgd_works_with_torchs_model_averager(rank: int, world_size: int) -> None:
    alone = [dist.new_group([each]) for each in range(world_size)][rank]
    model = test_classic.make_model()
    state = classic.PostLocalSGDState(None, alone, 2)
    model.register_comm_hook(state, classic.post_localSGD_hook)
    averager = PeriodicModelAverager(period=3, warmup_steps=2)
    for step in range(6):
        train(model, rank, [step], lr=0.01, width=test_classic.SIDE)
        averager.average_parameters(model.parameters())
    assert equal_on_all_ranks(*model.parameters())
