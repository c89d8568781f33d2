"""Votes: all implementations agree, and most of the ranks decide."""

from __future__ import annotations

import random
from typing import Any

import torch

from commhooks.kernels import count_votes, pack_votes, vote_bytes
from commhooks.kernels.votes import count_votes_op, pack_votes_op
from tests.kernels.inputs import CPP, DTYPES, SIZES, plain, random_entries, tricky, unaligned
from tests.kernels.machines import assert_agree

NAMES = ("pack_votes", "count_votes")
KERNELS = {"votes.cu": [f"{name}<{t}>" for name in NAMES for t in CPP.values()]}


def outputs(run: Any, x: torch.Tensor, rows: int, ranks: int) -> list[torch.Tensor]:
    """Votes in rows of a message; those of other ranks are random."""
    n = x.numel()
    shard = -(-n // (8 * rows)) * 8 if rows > 1 else n
    payload = torch.full((rows, vote_bytes(shard)), 77, dtype=torch.uint8)
    run(pack_votes_op, x, payload, shard)
    generator = torch.Generator().manual_seed(n)
    others = torch.randint(256, (ranks - 1, *payload.shape), generator=generator).to(torch.uint8)
    others[..., -1] = 0
    out = torch.full((n,), 7.0).to(x.dtype)
    run(count_votes_op, torch.cat([payload[None], others]), out, 0.5, shard)
    return [payload, out]


def test_kernels_equal_the_definition():
    for number, n in enumerate(SIZES):
        for make, dtype in zip((tricky, unaligned, plain), DTYPES, strict=True):
            for rows, ranks in ((1, 1), (3, 2), (8, 5)):
                x = make(n, DTYPES[number % 3] if make is plain else dtype)
                assert_agree(KERNELS, outputs, x, rows, ranks)


def test_most_ranks_decide_and_a_tie_is_positive():
    ranks = torch.tensor([[1.0, 1.0, -1.0, -1.0], [0.0, -1.0, -0.5, -0.0], [-1.0, -1.0, 2.0, -3.0]])
    payloads, out = torch.empty(3, vote_bytes(4)).byte(), torch.empty(4)
    for x, payload in zip(ranks, payloads, strict=True):
        pack_votes(x, payload)
    count_votes(payloads, out, 0.5)
    assert out.tolist() == [0.5, -0.5, -0.5, -0.5]
    count_votes(payloads[:2], out, 0.5)
    assert out.tolist() == [0.5, 0.5, -0.5, 0.5]


def test_what_is_not_finite_spoils_its_row():
    x = plain(48)
    x[20] = float("nan")
    payloads, out = torch.empty(1, 3, vote_bytes(16)).byte(), torch.empty(48)
    pack_votes(x, payloads[0], shard=16)
    count_votes(payloads, out, 1.0, shard=16)
    assert out.isnan().view(3, 16).all(1).tolist() == [False, True, False]
    assert not out.isnan()[:16].any()


def fuzz(run: Any, rng: random.Random) -> None:
    outputs(run, random_entries(rng), rng.randrange(1, 9), rng.randrange(1, 5))
