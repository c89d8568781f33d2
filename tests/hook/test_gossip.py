"""Gossip between real processes, against the same arithmetic written down in one."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
import ddp_core
from commhooks.schemes.gossip import partner_of
from tests.tools.harness import on_ranks
from tests.tools.training import batch, mlp, parameters

STEPS, LR = 7, 0.1


def _backward(model: nn.Module, step: int, rank: int) -> None:
    x = batch(step, rank, 8, 16)
    (model(x) - x.roll(1, 1)).square().mean().backward()


def _by_hand(ranks: int) -> list[Tensor]:
    models = [mlp() for _ in range(ranks)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9) for model in models]
    sums = [[torch.zeros_like(p) for p in model.parameters()] for model in models]
    for step in range(STEPS):
        halves = []
        for rank, model in enumerate(models):
            optimizers[rank].zero_grad()
            _backward(model, step, rank)
            pairs = zip(sums[rank], model.parameters(), strict=True)
            halves.append([(total + p.grad) / 2 for total, p in pairs])
        for rank, model in enumerate(models):
            partner = partner_of(rank, step, ranks)
            pairs = zip(halves[rank], halves[partner], strict=True)
            new = [left + right for left, right in pairs]
            for p, after, before in zip(model.parameters(), new, sums[rank], strict=True):
                p.grad = p.grad if partner == rank else after - before
            sums[rank] = new
            optimizers[rank].step()
    return [parameters(model) for model in models]


@on_ranks(3)
def test_three_ranks_train_by_the_law_bit_for_bit(rank: int) -> None:
    """One rests each step; each ends with parameters of its own, near those of the others."""
    expected = _by_hand(3)
    for kind in (DistributedDataParallel, ddp_core.DistributedDataParallel):
        model = kind(mlp(), bucket_cap_mb=1 / 1024)  # several buckets
        hook = commhooks.register(model, "gossip")
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
        for step in range(STEPS):
            optimizer.zero_grad()
            _backward(model, step, rank)
            optimizer.step()
            if step == STEPS // 2:
                hook.load_state_dict(hook.state_dict())
        hook.close()
        assert torch.equal(parameters(model), expected[rank])
    assert not torch.equal(expected[0], expected[1])
    assert (expected[0] - expected[1]).abs().max() < 0.1
