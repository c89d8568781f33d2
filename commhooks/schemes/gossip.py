"""Gossip: each step a rank averages with one other, and all hear of all in time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from commhooks.core.bucket import Bucket, Result, SchemeExchange
from commhooks.core.registry import register_scheme
from commhooks.core.scheme import Scheme
from commhooks.core.slot import Slot
from commhooks.core.traits import Traits
from ddp_core import AllGather

__all__ = ["Gossip", "partner_of"]

_SUM = Slot("gossip.sum", resize="mean")


def partner_of(rank: int, step: int, world_size: int) -> int:
    """Whom a rank averages with in a step; itself where it has a rest.

    On 2^k ranks the one whose number differs in bit ``step % k``. On others ``i + j = 2^step - 1``
    modulo the ranks: what two steps did is handed on twice as far by the next two. Of an even
    number, two that would meet themselves meet; of an odd one, one rests.

    Example:
        >>> [partner_of(rank, 1, 4) for rank in range(4)]
        [2, 3, 0, 1]
    """
    bits = world_size.bit_length() - 1
    if world_size == 1 << bits:
        return rank ^ (1 << step % bits) if bits else rank
    partner = (pow(2, step, world_size) - 1 - rank) % world_size
    if partner == rank and world_size % 2 == 0:
        partner = (rank + world_size // 2) % world_size
    return partner


@register_scheme("gossip")
@dataclass(frozen=True)
class Gossip(Scheme):
    """Averages with one other rank a step, in turn, instead of with all: one message each.

    Every rank keeps the sum s of what it was given. In a step it and its partner come to the same
    ``t = (s + g) / 2 + (s' + g') / 2``, bit for bit, and are given ``t - s`` each. So an optimizer
    that is linear in gradients (SGD, momentum) averages the parameters of the two, too. Ranks end
    a step with different parameters; over all ranks, what is given sums to the gradients, and
    what differs halves in a step or so: of 2^k ranks all have the same share of a gradient k steps
    after.

    Keeps a tensor of the gradient's size. Sums measure the way that parameters went only while the
    learning rate and the loss scale stay what they are: see the scheme's page.

    Example:
        >>> hook = register(ddp_model, "gossip")

    References: Daily et al., GossipGraD, 2018; Lian et al., Can Decentralized Algorithms Outperform
    Centralized Algorithms?, 2017.
    """

    traits = Traits(returns="update", agrees=False)
    keeps = (_SUM,)

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        gradient, given = bucket.gradient, bucket.read(_SUM)
        half = (given + gradient).mul_(0.5)
        partner = partner_of(bucket.rank, bucket.step, bucket.world_size)
        pair = sorted((bucket.rank, partner))
        # As bytes, which no cast rounds: a sum is far larger than what it grows by.
        gathered = yield AllGather(half.view(torch.uint8), pair)
        first, second = gathered.view(-1).view(half.dtype).view(2, half.numel())
        total = first + second
        bucket.write(_SUM, total)
        # One that rests is given its gradient, without the rounding of a difference of sums.
        return Result(bucket.output.copy_(gradient if partner == bucket.rank else total - given))
