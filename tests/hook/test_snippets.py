"""Snippets of PyTorch's pages on hooks and DDP run with one prefix of the imports exchanged.

No ``from __future__ import annotations`` here: DistributedDataParallel refuses such hooks.
"""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_core
from commhooks.ddp_comm_hooks import DDPCommHookType, register_ddp_comm_hook
from commhooks.ddp_comm_hooks import default_hooks as default
from commhooks.ddp_comm_hooks import post_localSGD_hook as post_localSGD
from commhooks.ddp_comm_hooks import powerSGD_hook as powerSGD
from commhooks.ddp_comm_hooks import quantization_hooks as quantization
from tests.tools.harness import on_ranks
from tests.tools.training import equal_on_all_ranks

CLASSES = {"torch": DistributedDataParallel, "ddp_core": ddp_core.DistributedDataParallel}


class SimpleModel(nn.Module):
    """The network of torch's page on communication hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(24, 24)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(24, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.relu(self.fc1(x)))


def step(ddp: nn.Module, number: int) -> list[torch.Tensor]:
    """Gradients of data that differ per rank and step."""
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    ddp.zero_grad()
    ddp(torch.randn(8, 24, generator=generator)).square().sum().backward()
    return [parameter.grad.clone() for parameter in ddp.parameters()]


def sgd(ddp: nn.Module, steps: range) -> list[torch.Tensor]:
    for number in steps:
        step(ddp, number)
        with torch.no_grad():
            for parameter in ddp.parameters():
                parameter -= 0.001 * parameter.grad
    return [parameter.detach().clone() for parameter in ddp.parameters()]


# ---- a hook is registered, a few steps are trained

Register = Callable[[Any, Any], None]  # of a model, and a process group


def powersgd_state(process_group: Any, **options: Any) -> powerSGD.PowerSGDState:
    return powerSGD.PowerSGDState(
        process_group=process_group,
        matrix_approximation_rank=1,
        start_powerSGD_iter=2,
        **options,
    )


def local_sgd_state(process_group: Any) -> post_localSGD.PostLocalSGDState:
    return post_localSGD.PostLocalSGDState(
        process_group=process_group, subgroup=None, start_localSGD_iter=2
    )


def encode_and_decode(ddp: Any, process_group: Any) -> None:
    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        encoded_tensor = bucket.buffer().half()
        fut = dist.all_reduce(encoded_tensor, async_op=True).get_future()
        return fut.then(lambda fut: fut.value()[0].float())

    ddp.register_comm_hook(state=None, hook=hook)


def builtin(ddp: Any, process_group: Any) -> None:
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)


EVERYWHERE_EQUAL: dict[str, Register] = {
    "allreduce": lambda ddp, group: ddp.register_comm_hook(group, default.allreduce_hook),
    "fp16": lambda ddp, group: ddp.register_comm_hook(group, default.fp16_compress_hook),
    "bf16": lambda ddp, group: ddp.register_comm_hook(group, default.bf16_compress_hook),
    "wrapped in fp16": lambda ddp, group: ddp.register_comm_hook(
        powersgd_state(group), default.fp16_compress_wrapper(powerSGD.powerSGD_hook)
    ),
    "wrapped in bf16": lambda ddp, group: ddp.register_comm_hook(
        powersgd_state(group), default.bf16_compress_wrapper(powerSGD.powerSGD_hook)
    ),
    "PowerSGD": lambda ddp, group: ddp.register_comm_hook(
        powersgd_state(group, min_compression_rate=0.5), powerSGD.powerSGD_hook
    ),
    "batched": lambda ddp, group: ddp.register_comm_hook(
        powersgd_state(group), powerSGD.batched_powerSGD_hook
    ),
    "per tensor": lambda ddp, group: ddp.register_comm_hook(
        group, quantization.quantization_pertensor_hook
    ),
    "per channel": lambda ddp, group: ddp.register_comm_hook(
        group, quantization.quantization_perchannel_hook
    ),
    "local SGD": lambda ddp, group: ddp.register_comm_hook(
        local_sgd_state(group), post_localSGD.post_localSGD_hook
    ),
    "by type": lambda ddp, group: register_ddp_comm_hook(DDPCommHookType.FP16_COMPRESS, ddp, group),
    "by value": lambda ddp, group: DDPCommHookType.ALLREDUCE.value(model=ddp, state=group),
    "encode and decode": encode_and_decode,
    "built in": builtin,
}


@on_ranks(2, timeout=100)
def test_documented_hooks_average() -> None:
    for ddp_class in CLASSES.values():
        for name, register in EVERYWHERE_EQUAL.items():
            ddp = ddp_class(SimpleModel())
            register(ddp, dist.group.WORLD)
            assert equal_on_all_ranks(*[grad for n in range(3) for grad in step(ddp, n)]), name
    for kind in DDPCommHookType:  # every one of them, with the model's own group
        ddp = DistributedDataParallel(SimpleModel())
        kind.value(model=ddp, state=None)
        assert equal_on_all_ranks(*step(ddp, 0)) == (kind is not DDPCommHookType.NOOP), kind


@on_ranks(2)
def test_an_optimizer_of_some_parameters_steps_in_backward() -> None:
    for ddp_class in CLASSES.values():
        for chosen in (slice(None), slice(0, 2)):
            ddp = ddp_class(SimpleModel())
            before = [parameter.detach().clone() for parameter in ddp.parameters()]
            params = list(ddp.parameters())[chosen]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's own, of its functional optimizers
                ddp._register_fused_optim(
                    torch.optim.Adam, 1e-2, betas=(0.9, 0.99), eps=1e-6, optim_params=params
                )
                step(ddp, 0)
            moved = [not torch.equal(*pair) for pair in zip(before, ddp.parameters(), strict=True)]
            assert moved == [True] * len(params) + [False] * (4 - len(params))


# ---- the page's checkpoint: rank 0 saves the hook and its state, all ranks load them

Checkpoint = dict[str, Any]


def saved_by_rank_0(ddp: Any, hook: Any, state: Any, path: str) -> Checkpoint:
    """As torch's page does it, with torch.load as it is by default."""
    checkpoint = {"state_dict": ddp.state_dict(), "comm_hook": hook, "comm_hook_state": state}
    if dist.get_rank() == 0:
        torch.save(checkpoint, path)
    dist.barrier()
    loaded: Checkpoint = torch.load(path, map_location={"cuda:0": "cuda:1"})
    dist.barrier()
    if dist.get_rank() == 0:
        os.remove(path)
    return loaded


def registered_again(ddp_class: Any, checkpoint: Checkpoint) -> Any:
    new = ddp_class(SimpleModel())
    new.load_state_dict(checkpoint["state_dict"])
    new.register_comm_hook(checkpoint["comm_hook_state"], checkpoint["comm_hook"])
    return new


@on_ranks(2)
def test_the_documented_checkpoint_of_rank_0_loads_on_all(rank: int, tmp_path: Path) -> None:
    """Before training, after it, and gathered."""
    text = "PowerSGDState: the state loaded was saved by rank 0 of 2 alone. It lacks the residuals"
    path = str(tmp_path / "checkpoint")
    for ddp_class in CLASSES.values():
        torch.manual_seed(0)
        ddp = ddp_class(SimpleModel())
        hook, state = powerSGD.powerSGD_hook, powerSGD.PowerSGDState(None, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, hook)
        new = registered_again(ddp_class, saved_by_rank_0(ddp, hook, state, path))
        straight = sgd(ddp, range(5))
        assert all(map(torch.equal, sgd(new, range(5)), straight))

        # rank 0's residual, which is in the file, and this rank's, which is not
        checkpoint = saved_by_rank_0(ddp, hook, state, path)
        assert checkpoint["comm_hook"] is hook
        loaded = checkpoint["comm_hook_state"]
        new = registered_again(ddp_class, checkpoint)
        residuals = {name: value.clone() for name, value in residual_of(state, rank).items()}
        assert any(bool(value.any()) for value in residuals.values())
        expected = {name: value * (rank == 0) for name, value in residuals.items()}
        torch.testing.assert_close(residual_of(loaded, rank), expected, rtol=0, atol=0)
        torch.testing.assert_close(factors_of(loaded, rank), factors_of(state, rank))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert equal_on_all_ranks(*sgd(new, range(5, 8)))
        assert loaded.iter == 8
        assert [str(each.message).startswith(text) for each in caught] == [True] * (rank == 0)

        new = registered_again(ddp_class, saved_by_rank_0(ddp, hook, state.gathered(), path))
        straight = sgd(ddp, range(5, 8))
        assert all(map(torch.equal, sgd(new, range(5, 8)), straight))


def residual_of(state: Any, rank: int) -> dict[str, torch.Tensor]:
    return state.state_dict()[f"rank{rank}"]["memory"]["residual"]


def factors_of(state: Any, rank: int) -> dict[str, torch.Tensor]:
    return state.state_dict()[f"rank{rank}"]["memory"]["powersgd.q"]
