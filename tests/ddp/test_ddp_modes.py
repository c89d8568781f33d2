"""Every averaging scheme under every mode of torch's DistributedDataParallel.

The law that holds in all modes: what a scheme applies over some steps, plus the mean of what the
ranks still hold back, is the sum of the true average gradients. Parameters stand still meanwhile,
so the true averages do not depend on the scheme. Then the model trains; ranks stay equal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import commhooks
from tests.tools.harness import run_ranks
from tests.tools.training import (
    CONFIGS,
    THOROUGH,
    averaged,
    batch,
    ddp,
    equal_bits,
    gradients,
    mlp,
    parameters,
    residuals,
)

STEPS = 4
# Share of the largest gradient by which a scheme without feedback may be off in one step: one
# rounding per rank and one of the sum, 8 bits for bfloat16 and 11 for float16. PerTensor
# quantization and the like are not here: a biased scheme has feedback by default.
ROUNDING = {"bf16": 2.0**-6, "fp16": 2.0**-9}


# ---- modes


class Branches(nn.Module):
    """Uses one of two branches, another on each rank and in each step; one is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor, choice: int) -> Tensor:
        return self.out(self.branches[choice](x))


class Embedded(nn.Module):
    """A sparse embedding and a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 16, sparse=True)
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.embedding(x))


class Waves(nn.Module):
    """A complex and a real parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wave = nn.Parameter(torch.randn(16, 16, dtype=torch.complex64))
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((x.to(torch.complex64) @ self.wave).abs())


def _frozen() -> nn.Module:
    model = mlp()
    for parameter in model[2].parameters():
        parameter.requires_grad_(False)
    return model


def _conv() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3))
    return model.to(memory_format=torch.channels_last)


def _image(step: int, rank: int) -> Tensor:
    return batch(step, rank, 2, 3, 8, 8).contiguous(memory_format=torch.channels_last)


def _rows(step: int, rank: int) -> tuple[Any, ...]:
    return (batch(step, rank, 8, 16),)


@dataclass(frozen=True)
class Mode:
    """A model, its inputs, and how it is wrapped."""

    model: Callable[[], nn.Module] = mlp
    inputs: Callable[[int, int], tuple[Any, ...]] = _rows
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    micro_batches: int = 1


def _branch_inputs(step: int, rank: int) -> tuple[Any, ...]:
    return batch(step, rank, 8, 16), (step + rank) % 2


def _ids(step: int, rank: int) -> tuple[Any, ...]:
    return (batch(step, rank, 8).mul(1e4).long() % 20,)


MODES = {
    "plain": Mode(),
    "find_unused": Mode(Branches, _branch_inputs, {"find_unused_parameters": True}),
    "static_graph": Mode(options={"static_graph": True}),
    "bucket_view": Mode(options={"gradient_as_bucket_view": True}),
    "no_sync": Mode(micro_batches=4),
    "no_sync_bucket_view": Mode(options={"gradient_as_bucket_view": True}, micro_batches=4),
    "sparse": Mode(Embedded, _ids),
    "frozen": Mode(_frozen),
    "channels_last": Mode(_conv, lambda step, rank: (_image(step, rank),)),
    "half": Mode(dtype=torch.float16),
    "bfloat16": Mode(dtype=torch.bfloat16),
    "complex": Mode(Waves),
}


# ---- what the ranks do


def _cast(inputs: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    return tuple(
        value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for value in inputs
    )


def _backward(model: nn.Module, mode: Mode, step: int, rank: int) -> None:
    """One step's gradients: micro-batches without communication, but for the last."""
    model.zero_grad()
    for micro in range(mode.micro_batches):
        last = micro == mode.micro_batches - 1
        inputs = _cast(mode.inputs(step + 100 * micro, rank), mode.dtype)
        quiet = contextlib.nullcontext() if last or not hasattr(model, "no_sync") else None
        with quiet or model.no_sync():  # type: ignore[operator]
            model(*inputs).square().mean().backward()


def _train(
    rank: int, world_size: int, mode_name: str, config: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sums over steps of (applied, true averages), mean residual; then weights after training."""
    mode = MODES[mode_name]
    scheme, options = CONFIGS[config]
    local = mode.model().to(mode.dtype) if mode.dtype != torch.float32 else mode.model()
    model = mode.model().to(mode.dtype) if mode.dtype != torch.float32 else mode.model()
    model = ddp(model, **mode.options)
    hook = commhooks.register(model, scheme, **options)
    applied, wanted = torch.zeros(()), torch.zeros(())
    for step in range(STEPS):
        _backward(model, mode, step, rank)
        _backward(local, mode, step, rank)
        applied, wanted = applied + gradients(model), wanted + averaged(gradients(local))
    held = averaged(residuals(hook, model))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        _backward(model, mode, STEPS + step, rank)
        sgd.step()
    hook.close()
    return applied, wanted, held, parameters(model)


def _tolerance(mode: Mode, config: str, wanted: Tensor) -> float:
    """Bound on the error of the sum law: roundings of what travels and of what is applied."""
    scheme, options = CONFIGS[config]
    # In 32 bits: sums of a few dozen terms in another order, in every product of the scheme.
    share = 1e-5
    # A 16-bit ring sum rounds after the share is known: feedback does not see that.
    wire = scheme if scheme in ROUNDING else options.get("wire_dtype")
    share = ROUNDING.get(wire, share)
    if mode.dtype != torch.float32:  # the mean is rounded to the gradient's type on every step
        share = max(share, ROUNDING["bf16" if mode.dtype == torch.bfloat16 else "fp16"])
    return share * float(wanted.abs().max()) * STEPS


def _each(rank: int, world_size: int, worker: Callable[..., Any], cases: list[Any]) -> list[Any]:
    """One case after the other: starting processes takes longer than a case does."""
    return [worker(rank, world_size, *case) for case in cases]


def each(worker: Callable[..., Any], world_size: int, cases: list[Any]) -> list[Any]:
    """For each case what every rank returned."""
    # DDP's own remarks: on the unused search, strides of gradients, a deprecated call.
    remarks = ("find_unused", "Grad strides", ".*deprecated")
    by_rank = run_ranks(_each, world_size, worker, cases, ignore_warnings=remarks, timeout=110)
    return list(zip(*by_rank, strict=True))


def _check(mode_name: str, configs: list[str], world_size: int) -> None:
    found = each(_train, world_size, [(mode_name, config) for config in configs])
    for config, results in zip(configs, found, strict=True):
        applied, wanted, held, weights = results[0]
        assert equal_bits([result[0] for result in results]), config
        assert equal_bits([result[3] for result in results]), config
        assert weights.isfinite().all(), config
        bound = _tolerance(MODES[mode_name], config, wanted)
        # DDP drops what is applied to a parameter that no rank used. Only the batched scheme,
        # which mixes all parameters of a bucket, applies anything to one.
        used = wanted != 0 if mode_name == "find_unused" else torch.ones_like(wanted).bool()
        got = (applied + held)[used]
        torch.testing.assert_close(
            got, wanted[used], rtol=0, atol=bound, msg=lambda text, name=config: f"{name}: {text}"
        )


@pytest.mark.parametrize("mode", MODES)
def test_applied_plus_residual_is_the_sum_of_gradients_and_ranks_are_equal(mode):
    # All schemes meet a mode with every parameter in views of buckets, and one in 16 bits.
    everyone = mode in ("no_sync_bucket_view", "half")
    _check(mode, [config for config in CONFIGS if everyone or config in THOROUGH], 2)


@pytest.mark.parametrize("mode", ["find_unused", "static_graph", "no_sync", "sparse"])
def test_three_ranks_obey_the_same_law(mode):
    _check(mode, ["none", "fp16-sum32", "powersgd-late", "batched"], 3)


# ---- accumulation


def _accumulate(rank: int, world_size: int, config: str) -> tuple[Tensor, Tensor]:
    scheme, options = CONFIGS[config]
    gradients_of = []
    for micro_batches in (4, 1):
        model = ddp(mlp())
        hook = commhooks.register(model, scheme, **options)
        for step in range(STEPS):
            model.zero_grad()
            rows = batch(step, rank, 8, 16).chunk(micro_batches)
            for micro, part in enumerate(rows):
                last = micro == micro_batches - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    model(part).square().sum().backward()
        gradients_of.append(gradients(model))
        hook.close()
    return gradients_of[0], gradients_of[1]


# What it may turn into another level, by the distance of two of the largest.
LEVELS = {"int4": 2 / 7, "int8": 2 / 127, "onebit": 1.0, "eden": 1.0, "topk": 1.0}


@pytest.mark.slow
def test_four_accumulated_batches_equal_one_large_batch():
    found = each(_accumulate, 2, [(config,) for config in CONFIGS])
    for config, results in zip(CONFIGS, found, strict=True):
        for four, one in results:
            # The sum over 8 rows rounds in another order; a 16-bit cast may turn that into its
            # last bit, and a low-rank projection carries relative errors of 1e-6 on without growth.
            share = 2.0**-7 if "16" in config else LEVELS.get(config, 1e-4)
            bound = share * float(one.abs().max())
            torch.testing.assert_close(
                four, one, rtol=0, atol=bound, msg=lambda text, name=config: f"{name}: {text}"
            )


# ---- uneven inputs


def _join(rank: int, world_size: int, config: str) -> tuple[Tensor, int, Tensor, Tensor]:
    scheme, options = CONFIGS[config]
    model = ddp(mlp())
    hook = commhooks.register(model, scheme, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    applied, wanted = torch.zeros(()), torch.zeros(())
    with model.join():
        for step in range(8 if rank == 0 else 5):
            optimizer.zero_grad()
            model(batch(step, rank, 4, 16)).square().mean().backward()
            optimizer.step()
            applied = applied + gradients(model)
    local = mlp()
    for step in range(8 if rank == 0 else 5):
        local.zero_grad()
        local(batch(step, rank, 4, 16)).square().mean().backward()
        wanted = wanted + gradients(local)
    held = averaged(residuals(hook, model))
    steps = hook.step
    hook.close()
    return applied, steps, averaged(wanted), held


@pytest.mark.slow
def test_join_with_eight_and_five_batches_loses_nothing():
    found = each(_join, 2, [(config,) for config in CONFIGS])
    for config, results in zip(CONFIGS, found, strict=True):
        (applied, steps, wanted, held), (_, other_steps, _, _) = results
        assert (steps, other_steps) == (8, 8), config
        bound = _tolerance(Mode(), config, wanted) * 8 / STEPS
        torch.testing.assert_close(
            applied + held, wanted, rtol=0, atol=bound, msg=lambda text, c=config: f"{c}: {text}"
        )


def _join_and_train(rank: int, world_size: int, config: str) -> Tensor:
    scheme, options = CONFIGS[config]
    model = ddp(mlp())
    hook = commhooks.register(model, scheme, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(8 if rank == 0 else 5):
            optimizer.zero_grad()
            model(batch(step, rank, 4, 16)).square().mean().backward()
            optimizer.step()
    # The joined rank did not apply the last steps; join hands it the other's weights.
    for step in range(8, 10):
        optimizer.zero_grad()
        model(batch(step, rank, 4, 16)).square().mean().backward()
        optimizer.step()
    hook.close()
    return parameters(model)


@pytest.mark.parametrize("config", ["none", "powersgd", "batched", "fp16-feedback"])
def test_ranks_are_equal_after_join_and_further_training(config):
    assert equal_bits(run_ranks(_join_and_train, 2, config))


# ---- dense is plain DDP


def _dense_and_plain(rank: int, world_size: int, options: dict[str, Any]) -> tuple[bool, Tensor]:
    trained = []
    for registered in (False, True):
        model = ddp(mlp(width=33), **options)
        hook = commhooks.register(model, "none") if registered else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(5):
            optimizer.zero_grad()
            model(batch(step, rank, 8, 33)).square().mean().backward()
            optimizer.step()
        trained.append(parameters(model))
        if hook is not None:
            hook.close()
    return torch.equal(*trained), trained[0]


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_none_is_plain_ddp_bit_for_bit(world_size, view):
    results = run_ranks(_dense_and_plain, world_size, {"gradient_as_bucket_view": view})
    assert [equal for equal, _ in results] == [True] * world_size
    assert equal_bits([weights for _, weights in results])
