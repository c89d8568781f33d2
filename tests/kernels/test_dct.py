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


def test_it_is_the_cosine_transform():
    # By the Fourier transform of the chunk and its mirror image.
    x, out = plain(5 * CHUNK), torch.empty(5 * CHUNK)
    dct(x, out)
    rows = x.double().view(5, CHUNK)
    spectrum = torch.fft.fft(torch.cat([rows, rows.flip(1)], 1))[:, :CHUNK]
    turned = torch.exp(-1j * torch.pi * torch.arange(CHUNK) / (2 * CHUNK)) * spectrum
    expected = turned.real / 2 * (2 / CHUNK) ** 0.5
    expected[:, 0] /= 2**0.5
    torch.testing.assert_close(out.view(5, CHUNK).double(), expected, atol=1e-4, rtol=1e-5)


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
