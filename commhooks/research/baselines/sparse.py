"""Defines sparse schemes whose ranks send the same stretches or rows of a bucket."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from commhooks.core._bucket import Bucket, nan_unless
from commhooks.core._registry import register_scheme
from commhooks.core._traits import INT32_PLACES, Biased, Traits
from commhooks.kernels import all_finite, top_k
from commhooks.schemes._ratio import number_kept
from commhooks.schemes._shared_indices import IndexExchange, SharedIndices, spoil_unless
from ddp_core import AllReduce

__all__ = ["AlignedTopK", "RandomBlock"]


@register_scheme("random_block")
@dataclass(frozen=True)
class RandomBlock(SharedIndices):
    """Sends one contiguous stretch of a bucket, whose random begin all ranks draw alike.

    The cheapest scheme: no selection, no indices. Biased: use with ``ErrorFeedback``.

    Args:
        ratio: share of the entries that is sent; at least one entry is.

    Reference: Xu et al., GRACE, 2021 (as a baseline).
    """

    def choose_indices(self, bucket: Bucket) -> IndexExchange:
        """Returns the stretch, which wraps around at the end of the bucket."""
        n = bucket.raw.numel()
        k = number_kept(self.ratio, n)
        generator = bucket.generator(f"{bucket.layout.names[0]}/random_block", shared=True)
        begin = int(torch.randint(n, (), generator=generator, device="cpu"))
        over = max(0, begin + k - n)
        return [slice(begin, begin + k - over), *([slice(0, over)] if over else [])]
        yield

    def gather(self, bucket: Bucket, indices: list[slice]) -> Tensor:
        source, unsent = bucket.raw, bucket.unsent
        if unsent is not None:
            # The gradient is in ``unsent`` then, where the pieces that are sent are set to zero.
            source = bucket.gradient if bucket.residual is not None else unsent.copy_(source)
        finite = all_finite(source)
        pieces = [source[part] for part in indices]
        values = torch.cat(pieces).to(bucket.wide_dtype)
        if unsent is not None:
            for piece in pieces:
                piece.zero_()
        return values.add_(nan_unless(finite))

    def scatter(
        self, values: Tensor, out: Tensor, indices: list[slice], finite: Tensor | None = None
    ) -> None:
        out.zero_()
        sizes = [part.stop - part.start for part in indices]
        for part, piece in zip(indices, values.split(sizes), strict=True):
            out[part] = piece
        spoil_unless(finite, out)


@register_scheme("aligned_topk")
@dataclass(frozen=True)
class AlignedTopK(SharedIndices):
    """Sends the rows whose entries are largest in the mean over ranks; the same on all ranks.

    A bucket is cut into rows. Each rank projects its rows on a few random directions, the same on
    all ranks; the mean of these sketches estimates how large each row of the mean is. So no indices
    are sent, and both the sketch and the values are all-reduces, whose bytes do not grow with the
    number of ranks. Biased: use with ``ErrorFeedback``.

    Args:
        ratio: share of the rows that is sent; at least one row is.
        row: number of entries of a row.
        directions: number of directions of the sketch, ``4 * directions / row`` bytes per entry.

    Example:
        >>> hook = register(ddp_model, "aligned_topk", ratio=0.05)

    Reference: Chen et al., ARC-Top-K, 2025.
    """

    ratio: float = 0.05
    row: int = 128
    directions: int = 4

    traits = Traits(rounds=2, error=Biased(), max_bucket_numel=INT32_PLACES, keeps_zeros=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("row", "directions"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(
                    f"AlignedTopK({name}=...) is a whole number, 1 or more, got {value!r}"
                )

    def choose_indices(self, bucket: Bucket) -> IndexExchange:
        rows = self._rows(bucket.gradient).to(bucket.wide_dtype)
        sketch = yield AllReduce(rows @ self._directions(bucket, rows))
        # The squared norm of a projection on random signs is that of the row, on average.
        energy = torch.zeros_like(sketch[:, 0], dtype=torch.float32)
        for column in sketch.unbind(1):  # in this order on every device: ranks pick the same rows
            energy += column.square()
        k = number_kept(self.ratio, len(rows))
        indices = torch.empty(k, dtype=torch.int32, device=rows.device)
        top_k(energy, k, indices, torch.empty_like(energy[:k]))
        return indices.long()

    def gather(self, bucket: Bucket, indices: Tensor) -> Tensor:
        finite = all_finite(bucket.gradient)
        rows = self._rows(bucket.gradient.to(bucket.wide_dtype))
        values = rows[indices].flatten()
        if bucket.unsent is not None:
            unsent = rows.index_fill(0, indices, 0.0).view(-1)
            bucket.unsent.copy_(unsent[: bucket.unsent.numel()])  # without the padding
        return values.add_(nan_unless(finite))

    def scatter(
        self, values: Tensor, out: Tensor, indices: Tensor, finite: Tensor | None = None
    ) -> None:
        rows = torch.zeros_like(self._rows(out))
        rows[indices] = values.view(-1, self.row).to(rows.dtype)
        out.copy_(rows.view(-1)[: out.numel()])
        spoil_unless(finite, out)

    def _directions(self, bucket: Bucket, rows: Tensor) -> Tensor:
        """Returns the random directions of this step as columns."""
        generator = bucket.generator(f"{bucket.layout.names[0]}/sketch", shared=True)
        begin = int(torch.randint(_BEGINS, (), generator=generator, device="cpu"))
        count = self.row * self.directions
        table = _signs(count + _BEGINS, rows.dtype, rows.device)
        return table[begin : begin + count].view(self.row, self.directions)

    def _rows(self, flat: Tensor) -> Tensor:
        return pad(flat, (0, -flat.numel() % self.row)).view(-1, self.row)


_BEGINS = 1 << 16


@lru_cache(maxsize=64)
def _signs(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns random signs, the same in every process."""
    # Kept on the device: a host that copied signs there in every step would wait for its GPU.
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (count,), generator=generator, device="cpu")
    return (2.0 * signs - 1.0).to(device, dtype)
