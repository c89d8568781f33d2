"""What PyTorch's pages on hooks and DDP show runs with one prefix of the imports exchanged.

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
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

import ddp_core
from commhooks.ddp_comm_hooks import DDPCommHookType, register_ddp_comm_hook
from commhooks.ddp_comm_hooks import debugging_hooks as debugging
from commhooks.ddp_comm_hooks import default_hooks as default
from commhooks.ddp_comm_hooks import post_localSGD_hook as post_localSGD
from commhooks.ddp_comm_hooks import powerSGD_hook as powerSGD
from commhooks.ddp_comm_hooks import quantization_hooks as quantization
from tests.tools.harness import on_ranks, run_ranks

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
    return [one.grad.clone() for one in ddp.parameters()]


def sgd(ddp: nn.Module, steps: range) -> list[torch.Tensor]:
    for number in steps:
        step(ddp, number)
        with torch.no_grad():
            for one in ddp.parameters():
                one -= 0.001 * one.grad
    return [one.detach().clone() for one in ddp.parameters()]


def is_equal_everywhere(tensors: list[torch.Tensor]) -> bool:
    flat = torch.cat([one.reshape(-1) for one in tensors])
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    return all(map(torch.equal, everyone, everyone[1:])) and bool(flat.isfinite().all())


# ---- a hook is registered, a few steps are trained

Register = Callable[[Any, Any], None]  # of a model, and a process group


def default_allreduce(ddp: Any, process_group: Any) -> None:
    ddp.register_comm_hook(process_group, default.allreduce_hook)


def default_fp16(ddp: Any, process_group: Any) -> None:
    ddp.register_comm_hook(process_group, default.fp16_compress_hook)


def default_bf16(ddp: Any, process_group: Any) -> None:
    ddp.register_comm_hook(process_group, default.bf16_compress_hook)


def wrapped_fp16(ddp: Any, process_group: Any) -> None:
    state = powerSGD.PowerSGDState(
        process_group=process_group, matrix_approximation_rank=1, start_powerSGD_iter=2
    )
    ddp.register_comm_hook(state, default.fp16_compress_wrapper(powerSGD.powerSGD_hook))


def wrapped_bf16(ddp: Any, process_group: Any) -> None:
    state = powerSGD.PowerSGDState(
        process_group=process_group, matrix_approximation_rank=1, start_powerSGD_iter=2
    )
    ddp.register_comm_hook(state, default.bf16_compress_wrapper(powerSGD.powerSGD_hook))


def layerwise_powersgd(ddp: Any, process_group: Any) -> None:
    state = powerSGD.PowerSGDState(
        process_group=process_group,
        matrix_approximation_rank=1,
        start_powerSGD_iter=2,
        min_compression_rate=0.5,
    )
    ddp.register_comm_hook(state, powerSGD.powerSGD_hook)


def batched_powersgd(ddp: Any, process_group: Any) -> None:
    state = powerSGD.PowerSGDState(
        process_group=process_group, matrix_approximation_rank=1, start_powerSGD_iter=2
    )
    ddp.register_comm_hook(state, powerSGD.batched_powerSGD_hook)


def per_tensor(ddp: Any, process_group: Any) -> None:
    ddp.register_comm_hook(process_group, quantization.quantization_pertensor_hook)


def per_channel(ddp: Any, process_group: Any) -> None:
    ddp.register_comm_hook(process_group, quantization.quantization_perchannel_hook)


def post_local_sgd(ddp: Any, process_group: Any) -> None:
    state = post_localSGD.PostLocalSGDState(
        process_group=process_group, subgroup=None, start_localSGD_iter=2
    )
    ddp.register_comm_hook(state, post_localSGD.post_localSGD_hook)


def by_type(ddp: Any, process_group: Any) -> None:
    register_ddp_comm_hook(DDPCommHookType.FP16_COMPRESS, ddp, process_group)


def by_value(ddp: Any, process_group: Any) -> None:
    DDPCommHookType.ALLREDUCE.value(model=ddp, state=process_group)


def encode_and_decode(ddp: Any, process_group: Any) -> None:
    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        encoded_tensor = bucket.buffer().half()
        fut = dist.all_reduce(encoded_tensor, async_op=True).get_future()
        return fut.then(lambda fut: fut.value()[0].float())

    ddp.register_comm_hook(state=None, hook=hook)


def builtin(ddp: Any, process_group: Any) -> None:
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)


EVERYWHERE_EQUAL: list[Register] = [
    default_allreduce, default_fp16, default_bf16, wrapped_fp16, wrapped_bf16, layerwise_powersgd,
    batched_powersgd, per_tensor, per_channel, post_local_sgd, by_type, by_value,
    encode_and_decode, builtin,
]  # fmt: skip


def registered(rank: int, world_size: int) -> list[str]:
    """The snippets after which ranks differ, or the gradient is far from the mean."""
    failed = []
    for name, ddp_class in CLASSES.items():
        for register in EVERYWHERE_EQUAL:
            ddp = ddp_class(SimpleModel())
            register(ddp, dist.group.WORLD)
            if not is_equal_everywhere([one for n in range(3) for one in step(ddp, n)]):
                failed.append(f"{name}, {register.__name__}")
    for kind in DDPCommHookType:  # every one of them, with the model's own group
        ddp = DistributedDataParallel(SimpleModel())
        kind.value(model=ddp, state=None)
        if is_equal_everywhere(step(ddp, 0)) == (kind is DDPCommHookType.NOOP):
            failed.append(str(kind))
    return failed


def test_documented_hooks_average() -> None:
    assert run_ranks(registered, 2, timeout=100) == [[], []]


@on_ranks(2)
def test_other_snippets_run(rank: int) -> None:
    for ddp_class in CLASSES.values():
        # Headroom: nothing is exchanged.
        ddp, local = ddp_class(SimpleModel()), ddp_class(SimpleModel())
        local.load_state_dict(ddp.state_dict())
        ddp.register_comm_hook(None, debugging.noop_hook)
        with local.no_sync():
            expected = step(local, 0)
        assert all(map(torch.equal, step(ddp, 0), expected))

        # The hook of the documentation of register_comm_hook.
        def noop(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            fut: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            fut.set_result(bucket.buffer())
            return fut

        ddp = ddp_class(SimpleModel())
        ddp.register_comm_hook(state=None, hook=noop)
        step(ddp, 0)
        ddp._get_ddp_logging_data().get("can_set_static_graph")

        # Uneven inputs: rank 1 has one more.
        ddp = ddp_class(nn.Linear(1, 1, bias=False))
        default_fp16(ddp, None)
        with ddp.join():
            for _ in range(5):
                for one in [torch.tensor([1]).float() for _ in range(10 + rank)]:
                    ddp(one).sum().backward()
        dist.barrier()  # nobody is left behind

        # Optimizers that step in backward.
        for chosen in (slice(None), slice(0, 2)):
            ddp = ddp_class(SimpleModel())
            before = [one.detach().clone() for one in ddp.parameters()]
            params = list(ddp.parameters())[chosen]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's own, of its functional optimizers
                ddp._register_fused_optim(
                    torch.optim.Adam, 1e-2, betas=(0.9, 0.99), eps=1e-6, optim_params=params
                )
                step(ddp, 0)
            moved = [not torch.equal(*pair) for pair in zip(before, ddp.parameters(), strict=True)]
            assert moved == [True] * len(params) + [False] * (4 - len(params))

        # Local SGD with an averager.
        ddp = ddp_class(SimpleModel())
        state = post_localSGD.PostLocalSGDState(
            process_group=None, subgroup=None, start_localSGD_iter=2
        )
        ddp.register_comm_hook(state, post_localSGD.post_localSGD_hook)
        opt = PostLocalSGDOptimizer(
            optim=torch.optim.SGD(ddp.parameters(), lr=0.01),
            averager=PeriodicModelAverager(period=2, warmup_steps=2),
        )
        for number in range(5):
            opt.zero_grad()
            step(ddp, number)
            opt.step()
        assert is_equal_everywhere(list(ddp.parameters()))


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


def documented_checkpoint(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """What comes of it for each class: before training, after it, and gathered."""
    seen: dict[str, Any] = {}
    for name, ddp_class in CLASSES.items():
        torch.manual_seed(0)
        ddp = ddp_class(SimpleModel())
        hook, state = powerSGD.powerSGD_hook, powerSGD.PowerSGDState(None, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, hook)
        checkpoint = saved_by_rank_0(ddp, hook, state, f"{folder}/{name}")
        new = registered_again(ddp_class, checkpoint)
        straight = sgd(ddp, range(5))
        seen[f"{name}, untrained"] = all(map(torch.equal, sgd(new, range(5)), straight))

        # rank 0's residual, which is in the file, and this rank's, which is not
        checkpoint = saved_by_rank_0(ddp, hook, state, f"{folder}/{name}")
        assert checkpoint["comm_hook"] is hook
        loaded = checkpoint["comm_hook_state"]
        new = registered_again(ddp_class, checkpoint)
        residuals = {name: one.clone() for name, one in residual_of(state, rank).items()}
        assert any(bool(one.any()) for one in residuals.values())
        kept = residual_of(loaded, rank)
        expected = {name: one * (rank == 0) for name, one in residuals.items()}
        torch.testing.assert_close(kept, expected, rtol=0, atol=0)
        torch.testing.assert_close(factors_of(loaded, rank), factors_of(state, rank))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            equal = is_equal_everywhere(sgd(new, range(5, 8)))
        seen[f"{name}, alone"] = equal, loaded.iter, [str(one.message) for one in caught]

        everyone = state.gathered()
        checkpoint = saved_by_rank_0(ddp, hook, everyone, f"{folder}/{name}")
        new = registered_again(ddp_class, checkpoint)
        straight = sgd(ddp, range(5, 8))
        seen[f"{name}, gathered"] = all(map(torch.equal, sgd(new, range(5, 8)), straight))
    return seen


def residual_of(state: Any, rank: int) -> dict[str, torch.Tensor]:
    return state.state_dict()[f"rank{rank}"]["memory"]["residual"]


def factors_of(state: Any, rank: int) -> dict[str, torch.Tensor]:
    return state.state_dict()[f"rank{rank}"]["memory"]["powersgd.q"]


def test_the_documented_checkpoint_of_rank_0_loads_on_all(tmp_path: Path) -> None:
    text = "PowerSGDState: the state loaded was saved by rank 0 of 2 alone. It lacks the residuals"
    for rank, seen in enumerate(run_ranks(documented_checkpoint, 2, str(tmp_path))):
        for name in CLASSES:
            assert seen[f"{name}, untrained"] is True
            assert seen[f"{name}, gathered"] is True
            equal, steps, said = seen[f"{name}, alone"]
            assert (equal, steps) == (True, 8)
            assert [one.startswith(text) for one in said] == [True] * (rank == 0)
