"""Defines DeMo, which sends the largest cosine coefficients of each rank's own momentum."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from commhooks.core._bucket import Bucket, Result, SchemeExchange
from commhooks.core._layout import Layout
from commhooks.core._registry import register_scheme
from commhooks.core._scheme import Scheme
from commhooks.core._slot import Slot
from commhooks.core._traits import INT32_PLACES, Traits
from commhooks.kernels import Tiles, decode_cosines, encode_cosines
from ddp_core import AllGather

__all__ = ["DeMo"]

_MOMENTUM = Slot("demo.momentum", resize="mean", dtype=torch.float32)
_TILE = 64 * 64


@register_scheme("demo")
@dataclass(frozen=True)
class DeMo(Scheme):
    """Sends the largest cosine coefficients of each rank's momentum, and keeps all others.

    ``m = decay m + g``. The ``k`` largest coefficients of each tile of 64 x 64 entries are sent
    (4 bytes each) and subtracted from m. A coefficient that several ranks sent arrives as the mean
    over these ranks; the result is transformed back, and its sign taken. Matrices of 64 x 64 and
    above are transformed in both directions (edges padded with zeros). All other parameters of a
    bucket (vectors, thin matrices) are joined, transformed in runs of 64 entries, and the ``k``
    largest coefficients of each 4096 are sent; the reference code transforms and chooses within
    each parameter. The momenta of the ranks differ on purpose; use an optimizer without momentum,
    and a learning rate for signs.

    Args:
        k: number of coefficients per tile, 1 to 4096.
        decay: decay of the momentum, 0 <= decay < 1.
        sign: returns the sign of the mean; False: the mean itself.

    Example:
        >>> hook = register(ddp_model, "demo", k=32)

    Reference: Peng, Quesnelle and Kingma, DeMo: Decoupled Momentum Optimization, 2024.
    """

    k: int = 32
    decay: float = 0.999
    sign: bool = True

    # Tiles of small matrices are padded, so that their places are more than entries.
    traits = Traits(returns="update", max_bucket_numel=INT32_PLACES // 2)
    keeps = (_MOMENTUM,)

    def __post_init__(self) -> None:
        if not 1 <= self.k <= _TILE:
            raise ValueError(f"DeMo(k=...) is a number of coefficients, 1 to 4096, got {self.k!r}")
        if not 0 <= self.decay < 1:
            raise ValueError(f"DeMo(decay=...): 0 <= decay < 1, got {self.decay!r}")

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        tiles, x = _tiles_of(bucket.layout), bucket.gradient
        x = x.float() if x.dtype == torch.float64 else x  # which the kernel does not know
        old = bucket.read(_MOMENTUM)
        momentum = torch.empty_like(old)
        payload = torch.empty(2, tiles.count, self.k, dtype=torch.int16, device=x.device)
        encode_cosines(x, old, self.decay, tiles, self.k, momentum, payload)
        bucket.write(_MOMENTUM, momentum)
        gathered = yield AllGather(payload)
        output = bucket.output
        mean = torch.empty_like(x) if output.dtype == torch.float64 else output
        decode_cosines(gathered, tiles, mean, sign=self.sign)
        return Result(mean if mean is output else output.copy_(mean))


@lru_cache(maxsize=1024)
def _tiles_of(layout: Layout) -> Tiles:
    shapes = [(shape[0], shape[1:].numel()) if shape else (1, 1) for shape in layout.shapes]
    return Tiles(shapes)
