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
from tests.tools import models
from tests.tools.harness import on_ranks
from tests.tools.training import (
    CONFIGS,
    THOROUGH,
    averaged,
    batch,
    ddp,
    equal_on_all_ranks,
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


class Waves(nn.Module):
    """A complex and a real parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wave = nn.Parameter(torch.randn(16, 16, dtype=torch.complex64))
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((x.to(torch.complex64) @ self.wave).abs())


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
    "find_unused": Mode(models.Branches, _branch_inputs, {"find_unused_parameters": True}),
    "static_graph": Mode(options={"static_graph": True}),
    "bucket_view": Mode(options={"gradient_as_bucket_view": True}),
    "no_sync": Mode(micro_batches=4),
    "no_sync_bucket_view": Mode(options={"gradient_as_bucket_view": True}, micro_batches=4),
    "sparse": Mode(models.Embedded, _ids),
    "frozen": Mode(models.frozen_part),
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


def _seeded(mode: Mode) -> nn.Module:
    torch.manual_seed(0)
    return mode.model().to(mode.dtype) if mode.dtype != torch.float32 else mode.model()


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


def _obeys_the_law(rank: int, name: str, config: str) -> None:
    mode = MODES[name]
    scheme, options = CONFIGS[config]
    local, model = _seeded(mode), ddp(_seeded(mode), **mode.options)
    hook = commhooks.register(model, scheme, **options)
    applied, wanted = torch.zeros(()), torch.zeros(())
    for step in range(STEPS):
        _backward(model, mode, step, rank)
        _backward(local, mode, step, rank)
        applied, wanted = applied + gradients(model), wanted + averaged(gradients(local))
    held = averaged(residuals(hook, model))
    assert equal_on_all_ranks(applied), config
    # DDP drops what is applied to a parameter that no rank used. Only the batched scheme,
    # which mixes all parameters of a bucket, applies anything to one.
    used = wanted != 0 if name == "find_unused" else torch.ones_like(wanted).bool()
    torch.testing.assert_close(
        (applied + held)[used],
        wanted[used],
        rtol=0,
        atol=_tolerance(mode, config, wanted),
        msg=lambda text: f"{config}: {text}",
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        _backward(model, mode, STEPS + step, rank)
        optimizer.step()
    hook.close()
    assert equal_on_all_ranks(parameters(model)), config


# DDP's own remarks: on the unused search, strides of gradients, a deprecated call.
REMARKS = ("find_unused", "Grad strides", ".*deprecated")


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2, ignore_warnings=REMARKS, timeout=110)
def test_applied_plus_residual_is_the_sum_of_gradients_and_ranks_are_equal(
    rank: int, mode: str
) -> None:
    # All schemes meet a mode with every parameter in views of buckets, and one in 16 bits.
    everyone = mode in ("no_sync_bucket_view", "half")
    for config in CONFIGS if everyone else sorted(THOROUGH):
        _obeys_the_law(rank, mode, config)


@pytest.mark.parametrize("mode", ["find_unused", "static_graph", "no_sync", "sparse"])
@on_ranks(3, ignore_warnings=REMARKS)
def test_three_ranks_obey_the_same_law(rank: int, mode: str) -> None:
    for config in ("none", "fp16-sum32", "powersgd-late", "batched"):
        _obeys_the_law(rank, mode, config)


# ---- uneven inputs


def _join(rank: int, config: str) -> None:
    scheme, options = CONFIGS[config]
    model, local = ddp(mlp()), mlp()
    hook = commhooks.register(model, scheme, **options)
    applied, wanted = torch.zeros(()), torch.zeros(())
    with model.join():
        for step in range(8 if rank == 0 else 5):
            _backward(model, MODES["plain"], step, rank)
            _backward(local, MODES["plain"], step, rank)
            applied, wanted = applied + gradients(model), wanted + gradients(local)
    assert hook.step == 8, config
    wanted, held = averaged(wanted), averaged(residuals(hook, model))
    if rank == 0:
        bound = _tolerance(MODES["plain"], config, wanted) * 8 / STEPS
        torch.testing.assert_close(
            applied + held, wanted, rtol=0, atol=bound, msg=lambda text: f"{config}: {text}"
        )
    # A rank that joined did not step by the last gradients; join hands it the other's weights.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(8, 11 if rank == 0 else 9):
            _backward(model, MODES["plain"], step, rank)
            optimizer.step()
    for step in range(11, 13):
        _backward(model, MODES["plain"], step, rank)
        optimizer.step()
    hook.close()
    assert equal_on_all_ranks(parameters(model)), config


@on_ranks(2)
def test_join_with_eight_and_five_batches_loses_nothing_and_ranks_end_equal(rank: int) -> None:
    for config in ("none", "powersgd", "batched", "fp16-feedback"):
        _join(rank, config)


@pytest.mark.slow
@on_ranks(2)
def test_join_with_every_scheme_loses_nothing(rank: int) -> None:
    for config in CONFIGS:
        _join(rank, config)


# ---- dense is plain DDP


@on_ranks(3)
def test_none_is_plain_ddp_bit_for_bit(rank: int) -> None:
    for options in ({}, {"gradient_as_bucket_view": True}):
        plain, model = (ddp(mlp(width=33), **options) for _ in range(2))
        hook = commhooks.register(model, "none")
        for trained in (plain, model):
            optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
            for step in range(5):
                optimizer.zero_grad()
                trained(batch(step, rank, 8, 33)).square().mean().backward()
                optimizer.step()
        hook.close()
        assert torch.equal(parameters(plain), parameters(model))
        assert equal_on_all_ranks(parameters(model))
