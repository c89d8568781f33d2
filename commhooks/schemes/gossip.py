"""Defines gossip, in which a rank averages with one other rank per step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from commhooks.core._bucket import Bucket, Result, SchemeExchange
from commhooks.core._registry import register_scheme
from commhooks.core._scheme import Scheme
from commhooks.core._slot import Slot
from commhooks.core._traits import Traits
from ddp_core import AllGather

__all__ = ["Gossip", "partner_of"]

_SUM = Slot("gossip.sum", resize="mean")


def partner_of(rank: int, step: int, world_size: int) -> int:
    """Returns the rank that a rank averages with in a step; itself if it has no partner.

    On 2^k ranks, the partner's number differs in bit ``step % k``. On other numbers of ranks,
    partners i and j have ``i + j = 2^step - 1`` modulo the number of ranks: two steps in a row move
    a gradient by ``2^step`` ranks, so that distances double with each step. On an even number of
    ranks, two ranks that would meet themselves meet each other; on an odd one, one has no partner.

    Example:
        >>> [partner_of(rank, 1, 4) for rank in range(4)]
        [2, 3, 0, 1]
    """
    # An involution for every step: the partner's partner is the rank itself.
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
    """Averages with one other rank per step, each in turn, and not with all: one message per step.

    Every rank keeps the sum s of the gradients that it returned. In a step, a rank and its partner
    both compute ``t = ((s + g) + (s' + g')) / 2``, with the same bits, and return ``t - s``, each
    with its own s. So an optimizer that is linear in gradients (SGD, momentum) averages the
    parameters of the two ranks, too. Ranks have different parameters after a step; the returned
    gradients of all ranks sum to the gradients of all ranks, and differences halve about once per
    step: on 2^k ranks, all ranks have the same share of a gradient after k steps.

    Keeps a tensor of the gradient's size. The sums describe the ranks' parameters only while
    learning rate and loss scale do not change: see the scheme's page.

    Example:
        >>> hook = register(ddp_model, "gossip")

    References: Daily et al., GossipGraD, 2018; Lian et al., Can Decentralized Algorithms Outperform
    Centralized Algorithms?, 2017.
    """

    traits = Traits(returns="update", agrees=False)
    keeps = (_SUM,)

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        gradient, given = bucket.gradient, bucket.read(_SUM)
        corrected = given + gradient
        partner = partner_of(bucket.rank, bucket.step, bucket.world_size)
        pair = sorted((bucket.rank, partner))
        # As bytes, which no cast around the scheme rounds: the sum is far larger than a gradient,
        # and its rounding error would be, too.
        gathered = yield AllGather(corrected.view(torch.uint8), pair)
        # In the order of ranks on both, hence the same bits.
        total = gathered.view(-1).view(corrected.dtype).view(2, *corrected.shape).mean(0)
        bucket.write(_SUM, total)
        # A rank without a partner returns its gradient, without the rounding error of t - s.
        if partner == bucket.rank:
            return Result(bucket.output.copy_(gradient))
        return Result(torch.sub(total, given, out=bucket.output))
