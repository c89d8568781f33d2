"""1-bit Adam: AdamW until the second moment is frozen, then momenta of one bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import commhooks
from commhooks.optim import OneBitAdam
from tests.tools.harness import run_ranks
from tests.tools.training import batch, ddp, equal_bits, mlp, outcome, parameters


def _losses(
    rank: int, world_size: int, freeze_step: int, steps: int, onebit: bool
) -> tuple[list[float], Tensor, float]:
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
    ratio = report.dense_bytes.sum() / report.payload_bytes.sum()
    return losses, parameters(model), float(ratio)


def test_until_it_freezes_it_is_adamw() -> None:
    mine = run_ranks(_losses, 2, 20, 20, True)
    theirs = run_ranks(_losses, 2, 20, 20, False)
    for (_, got, _), (_, expected, _) in zip(mine, theirs, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-6)


@pytest.mark.slow
def test_one_bit_ends_near_adamw() -> None:
    mine = run_ranks(_losses, 2, 60, 400, True)
    theirs = run_ranks(_losses, 2, 60, 400, False)
    assert equal_bits([end for _, end, _ in mine])
    begin, end = theirs[0][0][0], sum(theirs[0][0][-20:]) / 20
    got = sum(mine[0][0][-20:]) / 20
    assert end < 0.5 * begin
    assert got < end + 0.1 * (begin - end)
    assert mine[0][2] > 3.5  # 60 dense steps of 400


def _never_seen(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
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
    return before, model.module[0].weight[9].detach()


def test_what_never_had_a_gradient_stays_where_it_is() -> None:
    for before, after in run_ranks(_never_seen, 2):
        assert torch.equal(before, after)


def _other_hook(rank: int, world_size: int) -> Any:
    model = ddp(mlp())
    return outcome(OneBitAdam, model.parameters(), commhooks.register(model, "onebit"))


def test_another_hook_is_refused() -> None:
    (error,) = run_ranks(_other_hook, 1)
    assert error[0] == "TypeError"
    assert "onebit_adam" in error[1]


def test_wrong_settings_are_named() -> None:
    with pytest.raises(ValueError, match=r"freeze_step=...\) is a number of steps"):
        commhooks.make("onebit_adam", freeze_step=0)
    with pytest.raises(ValueError, match="0 <= beta1 < 1"):
        commhooks.make("onebit_adam", beta1=1.0)
