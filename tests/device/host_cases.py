"""Bodies of tests of FSDP, process groups, ZeRO and calls, on any device.

Some use torch's own collectives as well, so Gloo runs them on the CPU only.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import commhooks
import ddp_core
from commhooks.zero import ZeroOptimizer
from tests.device.device_cases import BODIES, averages, backward, default_dtype, given, network

__all__ = ["ALL", "HOSTS"]

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
NARROW = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
STEPS = 3


def layers(device: str) -> nn.Sequential:
    """Layers whose rows divide by no number of ranks, but one of them."""
    torch.manual_seed(0)
    pairs = itertools.pairwise((33, 65, 64, 7))
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairs)).to(device)


def ranks_of(group: Any) -> tuple[int, int]:
    return dist.get_rank(group), dist.get_world_size(group)


def pass_backward(model: nn.Module, step: int, rank: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(8, 33, generator=generator, dtype=torch.float32)
    device = next(model.parameters()).device
    (scale * model(inputs.to(device)).float().square().sum()).backward()


def taken(model: nn.Module, *, whole: bool = True) -> Tensor:
    """All gradients, or this rank's shards of them, on the CPU in one tensor; they are dropped."""
    results = []
    for parameter in model.parameters():
        grad: Any = parameter.grad
        if hasattr(grad, "full_tensor"):
            grad = grad.full_tensor() if whole else grad.to_local()
        results.append(grad.detach().float().cpu().view(-1))
        parameter.grad = None
    return torch.cat(results)


def off(results: Tensor, wanted: Tensor) -> float:
    return float((results - wanted).norm() / wanted.norm())


def kept(hook: commhooks.HookState, model: nn.Module) -> Tensor:
    """The mean of what the ranks have not sent, in the order of the parameters."""
    states = hook.state_dict(gather=True)
    parts = [states[f"rank{rank}"]["memory"]["residual"] for rank in range(hook.world_size)]
    names = [name for name, _ in model.named_parameters()]
    flat = [torch.cat([part[name].view(-1) for name in names]) for part in parts]
    return sum(flat, torch.zeros(())) / len(flat)


# ---- FSDP2


def sharded(device: str, mesh: DeviceMesh, **options: Any) -> nn.Sequential:
    model = layers(device)
    for part in [*model, model]:
        fully_shard(part, mesh=mesh, **options)
    return model


def mesh_of(device: str, group: Any) -> DeviceMesh:
    return DeviceMesh.from_group(group or dist.group.WORLD, device)


def fsdp2(device: str, group: Any = None) -> None:
    """Gradients of all schemes add up to those of FSDP2 itself; one step has an infinity."""
    rank, ranks = ranks_of(group)
    if ranks == 1:
        return  # FSDP2 reduces nothing
    mesh = mesh_of(device, group)
    for policy in (MixedPrecisionPolicy(), MIXED, NARROW):
        plain, ours = (sharded(device, mesh, mp_policy=policy) for _ in range(2))
        commhooks.register(ours, "none")
        for step in range(STEPS):
            for model in (plain, ours):
                pass_backward(model, step, rank)
            assert torch.equal(taken(ours), taken(plain)), (policy, step)
    for name, options in (("int4", {"block": 64}), ("onebit", {"block": 64}), ("int8", {})):
        plain, ours = (sharded(device, mesh) for _ in range(2))
        hook = commhooks.register(ours, name, verify=2, **options)
        left = torch.zeros(())
        for step in range(STEPS + 1):
            scale = float("inf") if (step, rank) == (1, ranks - 1) else 1.0
            for model in (plain, ours):
                pass_backward(model, step, rank, scale)
            wanted, results = taken(plain), taken(ours)
            assert bool(results.isfinite().all()) == (step != 1), (name, step)
            if step != 1:  # of which nothing is kept
                left = left + wanted - results
        assert hook.step == STEPS + 1
        assert hook.verification.latest(wait=True)
        assert not hook.verification.findings
        if name == "int8":  # unbiased, without memory
            assert off(results, wanted) < 0.03
        else:
            assert off(kept(hook, ours), left) < 1e-3, name


def fsdp2_continues(device: str, group: Any = None) -> None:
    """A saved run that is continued gives the bits of one that goes on; with memory in 8 bits."""
    rank, ranks = ranks_of(group)
    if ranks == 1:
        return
    mesh = mesh_of(device, group)
    codec = commhooks.make("int4", block=64, error_feedback=False)
    for scheme in (commhooks.make("onebit", block=64), commhooks.wrappers.AveragedFeedback(codec)):
        model, other = (sharded(device, mesh) for _ in range(2))
        hook, again = (commhooks.register(value, scheme) for value in (model, other))
        for step in range(2):
            pass_backward(model, step, rank)
            taken(model)
        again.load_state_dict(copy.deepcopy(hook.state_dict()))
        for step in range(2, 4):
            for element in (model, other):
                pass_backward(element, step, rank)
            assert torch.equal(taken(model), taken(other)), step


def fsdp2_offloads(device: str, group: Any = None) -> None:
    """Gradients of parameters that lie on the host between steps are reduced on the device."""
    rank, ranks = ranks_of(group)
    if ranks == 1:
        return
    policy = CPUOffloadPolicy(pin_memory=device != "cpu")
    mesh = mesh_of(device, group)
    plain, ours = (sharded(device, mesh, offload_policy=policy) for _ in range(2))
    hook = commhooks.register(ours, "int4", block=64)
    assert hook.target.devices() == {"cpu", device}
    for step in range(STEPS):
        for model in (plain, ours):
            pass_backward(model, step, rank)
        assert all(parameter.device.type == "cpu" for parameter in ours.parameters())
        wanted, results = (taken(model, whole=False) for model in (plain, ours))
        assert 0 < off(results, wanted) < 0.5, step
    residuals = [value for _, _, value in hook.engine.memory.items()]
    assert residuals
    assert all(residual.device.type == device for residual in residuals)


def fsdp2_gathers(device: str, group: Any = None) -> None:
    """Parameters that are gathered by a scheme are waited for, however they are asked for."""
    rank, ranks = ranks_of(group)
    if ranks == 1:
        return
    mesh = mesh_of(device, group)
    plain, at_once, later = (sharded(device, mesh) for _ in range(3))
    for model in (at_once, later):
        commhooks.fsdp.gather_parameters(model)
    for module in later.modules():
        module._set_unshard_async_op(True)  # type: ignore[operator]
    for step in range(STEPS):
        for model in (plain, at_once, later):
            pass_backward(model, step, rank)
        wanted, results = taken(plain), taken(at_once)
        assert 0 < off(results, wanted) < 0.05
        assert torch.equal(results, taken(later)), step
    handle: Any = at_once[1].unshard(async_op=True)  # type: ignore[operator]
    handle.wait()
    weight = at_once[1].weight.detach().clone()
    everyone = [torch.empty_like(weight) for _ in range(ranks)]
    dist.all_gather(everyone, weight, group=group)
    assert all(torch.equal(outcome, weight) for outcome in everyone)
    at_once[1].reshard()  # type: ignore[operator]


def fsdp2_between(device: str, group: Any = None) -> None:
    """Replicas of FSDP2, sharded over one rank each, average by a scheme between them."""
    rank, ranks = ranks_of(group)
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    local = [dist.get_rank()]
    alone = dist.new_group(local, use_local_synchronization=True, backend=dist.get_backend(group))
    mesh = DeviceMesh.from_group(
        [alone, group or dist.group.WORLD],
        device,
        mesh=torch.tensor([members], device="cpu"),
        mesh_dim_names=("shard", "replicate"),
    )
    for policy in (MixedPrecisionPolicy(), NARROW):  # the latter gives reduced gradients back early
        for name, most in (("none", 0.0), ("int8", 0.03), ("powersgd", 1.0)):
            plain, ours = layers(device), layers(device)
            commhooks.fsdp.replicate(
                ours, name, modules=ours, mesh=mesh, fully_shard_options={"mp_policy": policy}
            )
            for step in range(STEPS):
                for model in (plain, ours):
                    pass_backward(model, step, rank)
                mean = taken(plain).to(device)
                if policy is NARROW:
                    mean = mean.to(torch.bfloat16).float()
                dist.all_reduce(mean, group=group)
                far = off(taken(ours), mean.cpu() / ranks)
                assert far <= (most or (2e-2 if policy is NARROW else 1e-6)), (name, step)


# ---- FSDP1


def fsdp1(device: str, group: Any = None) -> None:
    """Units of FSDP1 get what they get without a hook, or near it."""
    rank, _ = ranks_of(group)
    home = torch.device("cpu") if device == "cpu" else torch.device(device, 0)

    def unit(strategy: ShardingStrategy) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(
            layers(device),
            process_group=group or dist.group.WORLD,
            sharding_strategy=strategy,
            device_id=home,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        )

    def flat(model: FullyShardedDataParallel) -> Tensor:
        units: Any = FullyShardedDataParallel.fsdp_modules(model)
        flats = [value._handle.flat_param for value in units if value._handle is not None]
        grads = [value._saved_grad_shard if value.grad is None else value.grad for value in flats]
        for element in flats:
            element.grad = None
        return torch.cat([grad.reshape(-1).float().cpu() for grad in grads])

    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        for name, most in (("none", 1e-6), ("int8", 0.03)):
            plain, ours = unit(strategy), unit(strategy)
            hook = commhooks.register(ours, name)
            for step in range(2):
                for model in (plain, ours):
                    pass_backward(model, step, rank)
                assert off(flat(ours), flat(plain)) <= most, (strategy, name, step)
            assert hook.step == 2


# ---- a group


def memoryless_group(device: str, group: Any = None) -> None:
    """A model over a group of a scheme gets what a hook gives."""
    rank, ranks = ranks_of(group)
    options = {"fp32_sum": True}
    compressing: Any = commhooks.process_group("bf16", group, least=1, **options)
    plain, other = network("torch", device, group), network("torch", device, compressing)
    hook = commhooks.register(plain, "bf16", process_group=group, **options)
    for step in range(STEPS):
        for model in (plain, other):
            backward(model, device, given(step, rank))
        wanted, results = (
            torch.cat([average.view(-1) for average in averages(model)]) for model in (plain, other)
        )
        # On more ranks, dividing and multiplying by their number rounds.
        assert torch.equal(results, wanted) if ranks <= 2 else off(results, wanted) < 0.02, step
    hook.close()
    del other, model
    dist.destroy_process_group(compressing)


# ---- an optimizer in shards


def zero_optimizer(device: str, group: Any = None) -> None:
    """Training in shards is training without, or near it; all ranks have the same parameters."""
    rank, ranks = ranks_of(group)

    def wrapped() -> Any:
        return ddp_core.DistributedDataParallel(
            layers(device), process_group=group, bucket_cap_mb=0.01
        )

    def take_steps(model: Any, optimizer: Any, first: int, steps: int, clips: bool = False) -> None:
        for step in range(first, first + steps):
            pass_backward(model, step, rank)
            if clips:
                optimizer.clip_grad_norm_(100.0)
            optimizer.step()
            optimizer.zero_grad()

    settings: dict[str, Any] = {"lr": 1e-3, "fused": device != "cpu"}
    plain = wrapped()
    take_steps(plain, torch.optim.AdamW(plain.parameters(), **settings), 0, 2 * STEPS)
    exact = [parameter.detach() for parameter in plain.parameters()]
    for gather, in_backward in itertools.product(("none", "int8", "int4"), (False, True)):
        model = wrapped()
        how = {"gather": gather, "in_backward": in_backward, **settings}
        zero = ZeroOptimizer(model, torch.optim.AdamW, **how)
        take_steps(model, zero, 0, STEPS)
        other = wrapped()
        other.load_state_dict(model.state_dict())
        with default_dtype(torch.bfloat16):  # which scripts for large models set
            resumed = ZeroOptimizer(other, torch.optim.AdamW, **how)
            resumed.load_state_dict(zero.state_dict(gather=True))
            take_steps(other, resumed, STEPS, STEPS)
        take_steps(model, zero, STEPS, STEPS, clips=not in_backward)
        for value, same, near in zip(model.parameters(), other.parameters(), exact, strict=True):
            assert torch.equal(value, same), (gather, in_backward)
            everyone = [torch.empty_like(value) for _ in range(ranks)]
            dist.all_gather(everyone, value.detach(), group=group)
            assert all(torch.equal(value, its) for its in everyone), (gather, in_backward)
            if gather == "none":
                torch.testing.assert_close(value.detach(), near, rtol=1e-4, atol=1e-5)
            else:
                assert (value - near).abs().max() < 0.05, (gather, in_backward)
        zero.hook.close()
        resumed.hook.close()


# ---- ranks that change


def changed_group(device: str, group: Any = None) -> None:
    """A hook that goes on with another group of the same ranks loses nothing."""
    rank, _ = ranks_of(group)
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    for cls in ("torch", "ours"):
        second = dist.new_group(members, backend=dist.get_backend(group))
        model = network(cls, device, group)
        hook = commhooks.register(model, "int4", block=64, error_feedback=True)
        left = [torch.zeros(parameter.shape) for parameter in model.parameters()]
        for step in range(4):
            if step == 2:
                assert hook.change_group(second).lost == 0
            gradients = given(step, rank)
            backward(model, device, gradients)
            for average, local, mean in zip(left, gradients, averages(model), strict=True):
                total = local.to(device)
                dist.all_reduce(total, group=group)
                average += total.cpu() / hook.world_size - mean
        residuals = []
        for name, _ in model.module.named_parameters():
            residual = hook.residual(name)
            assert residual is not None
            total = residual.clone()
            dist.all_reduce(total, group=group)
            residuals.append(total.cpu().view(-1) / hook.world_size)
        assert off(torch.cat(residuals), torch.cat([value.view(-1) for value in left])) < 1e-3, cls
        hook.close()


HOSTS: dict[str, Callable[..., Any]] = {
    "fsdp2": fsdp2,
    "fsdp2 continues": fsdp2_continues,
    "fsdp2 offloads": fsdp2_offloads,
    "fsdp2 gathers": fsdp2_gathers,
    "fsdp2 between": fsdp2_between,
    "fsdp1": fsdp1,
    "memoryless group": memoryless_group,
    "zero optimizer": zero_optimizer,
    "changed group": changed_group,
}
ALL = BODIES | HOSTS
