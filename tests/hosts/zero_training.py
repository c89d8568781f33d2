"""Trains layers of odd sizes in small buckets, for tests of sharded optimizers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import commhooks
from commhooks.zero import ZeroOptimizer
from ddp_core import DistributedDataParallel

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2}),
    "sgd": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3}),
}
ADAM = OPTIMIZERS["adamw"]


def model_of(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Returns layers of odd sizes, some of which lie in two shards."""
    torch.manual_seed(0)
    sizes = (33, 65, 64, 7)
    layers = [[nn.Linear(a, b), nn.Tanh()] for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*itertools.chain(*layers)).to(dtype)


def wrapped(module: nn.Module, **options: Any) -> DistributedDataParallel:
    """Returns the module in several small buckets."""
    return DistributedDataParallel(module, **{"bucket_cap_mb": 0.01, **options})


def inputs_of(step: int, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 33, generator=generator).to(dtype)


def backward(model: nn.Module, step: int, rank: int) -> None:
    dtype = next(model.parameters()).dtype
    model(inputs_of(step, rank, dtype)).float().square().mean().backward()


def take_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, first: int, steps: int
) -> None:
    for step in range(first, first + steps):
        backward(model, step, rank)
        optimizer.step()
        optimizer.zero_grad()


def values(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def agree(model: nn.Module) -> None:
    """Asserts that all ranks have the same bits."""
    for value in values(model):
        first = value.clone()
        dist.broadcast(first, 0)
        assert torch.equal(value.view(torch.uint8), first.view(torch.uint8))


def same(left: nn.Module, right: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(values(left), values(right), strict=True))


def differ_by(left: nn.Module, right: nn.Module, most: float, rtol: float = 0.0) -> None:
    """Asserts that parameters differ by so much at the most."""
    for value, other in zip(values(left), values(right), strict=True):
        torch.testing.assert_close(value, other, rtol=rtol, atol=most)


def both_with(name: str, **settings: Any) -> Any:
    """Returns a model with a plain optimizer, and one with shards of the same."""
    kind, options = OPTIMIZERS[name]
    plain, ours = wrapped(model_of()), wrapped(model_of())
    zero = ZeroOptimizer(ours, kind, **options, **settings)
    return (plain, kind(plain.parameters(), **options)), (ours, zero)


def compressed(
    gather: str = "int8", **settings: Any
) -> tuple[DistributedDataParallel, ZeroOptimizer]:
    model = wrapped(model_of())
    scheme = commhooks.make("int4", block=64)
    settings = {"lr": 1e-2, **settings}
    return model, ZeroOptimizer(model, torch.optim.AdamW, scheme=scheme, gather=gather, **settings)


def overflow_once(module: nn.Module, rank: int) -> Any:
    """Makes a few gradients of rank 1 infinite: they are in the shard of one rank."""
    bias: Any = module[4].bias  # type: ignore[index]
    return bias.register_hook(lambda grad: grad * (math.inf if rank == 1 else 1.0))
