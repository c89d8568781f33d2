"""1-bit Adam: AdamW until the second moment is frozen, then momenta of one bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import commhooks
from commhooks.optim import OneBitAdam
from tests.tools.harness import on_ranks
from tests.tools.training import batch, ddp, equal_on_all_ranks, mlp, parameters


def _run_adam(
    rank: int, freeze_step: int, steps: int, onebit: bool
) -> tuple[list[float], Any, float]:
    """Losses, the model, and how many times as much a dense run sends."""
    model = ddp(mlp())
    optimizer: torch.optim.Optimizer
    if onebit:
        hook = commhooks.register(model, "onebit_adam", freeze_step=freeze_step, block=256)
        optimizer = OneBitAdam(model.parameters(), hook, lr=0.01, weight_decay=0.01)
    else:
        hook = commhooks.register(model, "none")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        x = batch(step, rank, 64, 16)
        loss = (model(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    report = hook.report()
    return losses, model, float(report.dense_bytes.sum() / report.payload_bytes.sum())


@on_ranks(2)
def test_until_it_freezes_it_is_adamw(rank: int) -> None:
    onebit_adam, adamw = (
        parameters(_run_adam(rank, 20, 20, onebit)[1]) for onebit in (True, False)
    )
    torch.testing.assert_close(onebit_adam, adamw, rtol=0, atol=2e-6)


@pytest.mark.slow
@on_ranks(2)
def test_one_bit_ends_near_adamw(rank: int) -> None:
    onebit_adam, model, ratio = _run_adam(rank, 60, 400, True)
    adamw, _, _ = _run_adam(rank, 60, 400, False)
    assert equal_on_all_ranks(parameters(model))
    begin, end = adamw[0], sum(adamw[-20:]) / 20
    assert end < 0.5 * begin
    assert sum(onebit_adam[-20:]) / 20 < end + 0.1 * (begin - end)
    assert ratio > 3.5  # 60 dense steps of 400


@on_ranks(2)
def test_what_never_had_a_gradient_stays_where_it_is(rank: int) -> None:
    """A row of an embedding that no batch has: zero gradient, and a sign that is never zero."""
    torch.manual_seed(0)
    model = ddp(torch.nn.Sequential(torch.nn.Embedding(10, 8), torch.nn.Linear(8, 1)))
    hook = commhooks.register(model, "onebit_adam", freeze_step=3)
    optimizer = OneBitAdam(model.parameters(), hook, lr=0.01)
    before = model.module[0].weight[9].detach().clone()
    for step in range(10):
        optimizer.zero_grad()
        words = torch.arange(4) + (step + rank) % 5
        model(words).square().mean().backward()
        optimizer.step()
    assert torch.equal(model.module[0].weight[9].detach(), before)


@on_ranks(1)
def test_another_hook_is_refused() -> None:
    model = ddp(mlp())
    hook = commhooks.register(model, "onebit")
    with pytest.raises(TypeError, match="onebit_adam"):
        OneBitAdam(model.parameters(), hook)


def test_wrong_settings_are_named() -> None:
    with pytest.raises(ValueError, match=r"freeze_step=...\) is a number of steps"):
        commhooks.make("onebit_adam", freeze_step=0)
    with pytest.raises(ValueError, match="0 <= beta1 < 1"):
        commhooks.make("onebit_adam", beta1=1.0)
