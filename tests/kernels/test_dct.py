"""The cosine transform: all implementations agree, and it is one."""

from __future__ import annotations

import random
from typing import Any

import torch

from commhooks.kernels import dct
from commhooks.kernels.dct import CHUNK, dct_op
from tests.kernels.inputs import plain, tricky
from tests.kernels.machines import ORDERS, assert_agree, machines

KERNELS = {"dct.cu": ["dct<false>", "dct<true>"]}


def outputs(run: Any, x: torch.Tensor) -> list[torch.Tensor]:
    turned, back = torch.empty(2, len(x))
    run(dct_op, x, turned, False)
    run(dct_op, x, back, True)
    return [turned, back]


def test_kernels_equal_the_definition():
    for chunks in (0, 1, 3, 16, 31, 150):
        x = tricky(chunks * CHUNK)
        assert_agree(KERNELS, outputs, x, on_machines=machines(orders=ORDERS))


def test_the_inverse_undoes_it_in_place():
    x = plain(40 * CHUNK)
    out = x.clone()
    dct(out, out)
    torch.testing.assert_close(out.norm(), x.norm())
    dct(out, out, inverse=True)
    torch.testing.assert_close(out, x, atol=1e-4, rtol=1e-5)


def fuzz(run: Any, rng: random.Random) -> None:
    x = torch.randn(CHUNK * rng.randrange(6))
    run(dct_op, x, torch.empty_like(x), rng.random() < 0.5)
