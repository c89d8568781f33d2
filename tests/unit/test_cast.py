"""The op of casts."""

from __future__ import annotations

import pytest
import torch

from commhooks.kernels import scaled_cast
from commhooks.kernels.cast import _CHUNK


@pytest.mark.parametrize("scale", [1.0, 0.5, 1 / 3])
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("numel", [0, 1, 33, _CHUNK, _CHUNK + 1])
def test_scales_then_narrows(
    numel: int, narrow: torch.dtype, wide: torch.dtype, scale: float
) -> None:
    x = torch.randn(numel, dtype=wide, generator=torch.Generator().manual_seed(numel)) * 1e5
    kept = x.clone()
    out = scaled_cast(x, scale, out=torch.empty(numel, dtype=narrow))
    assert torch.equal(out, (x * scale).to(narrow))
    assert torch.equal(x, kept)


def test_takes_any_shape() -> None:
    x = torch.arange(12.0).view(3, 4)
    out = scaled_cast(x, 0.25, out=torch.empty(3, 4, dtype=torch.bfloat16))
    assert torch.equal(out, (x * 0.25).bfloat16())
