"""Defines sparse schemes whose ranks agree on indices, by a collective or by shared random bits."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from commhooks.core.bucket import Bucket, Result, SchemeExchange, nan_unless
from commhooks.core.registry import register_scheme
from commhooks.core.scheme import Scheme
from commhooks.core.traits import INT32_PLACES, Biased, Traits
from commhooks.kernels import (
    RandomBits,
    all_finite,
    gather_random,
    random_places,
    scatter_random,
    top_k,
)
from commhooks.schemes._ratio import check_ratio, number_kept
from ddp_core import AllReduce, Collective

__all__ = ["AlignedTopK", "RandomBlock", "RandomK"]

IndexExchange = Generator[Collective, Tensor, Any]  # returns indices, see ``_Agreed.agree``


@dataclass(frozen=True)
class _Agreed(Scheme):
    """Sends entries at indices that every rank knows: values only, in one all-reduce.

    If any value of any rank is not finite, sent or not, the whole bucket arrives as NaN.
    """

    ratio: float = 0.01

    traits = Traits(error=Biased(), most_entries=INT32_PLACES, keeps_zeros=True)

    def __post_init__(self) -> None:
        check_ratio(self, self.ratio)

    def agree(self, bucket: Bucket) -> IndexExchange:
        """Returns indices that are the same on all ranks, by a collective or by shared random bits.

        Subclasses choose their form: ``take`` and ``put`` get what this method returns.
        """
        raise NotImplementedError
        yield  # makes this a generator function

    def take(self, bucket: Bucket, indices: Any) -> Tensor:
        """Returns the gradient's entries at ``indices``; writes others to ``bucket.unsent``.

        At least one of the values is NaN unless all entries are finite, also those that are not
        sent: so the sum of the values tells the other ranks.
        """
        raise NotImplementedError

    def put(self, values: Tensor, out: Tensor, indices: Any, finite: Tensor | None = None) -> None:
        """Writes values to ``out`` at ``indices``, and zeros elsewhere; NaN unless ``finite``."""
        raise NotImplementedError

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        if not bucket.raw.numel():
            return (yield from bucket.all_reduce())
        unsent = bucket.unsent
        indices = yield from self.agree(bucket)
        values = self.take(bucket, indices)
        own_values = values if unsent is None else values.clone()
        request = AllReduce(values)
        values = yield request
        if unsent is not None and request.sent is not None:  # rounded on the way
            error = torch.empty_like(unsent)
            self.put(own_values - request.sent, error, indices)
            unsent.add_(error)
        finite = all_finite(values)
        self.put(values, bucket.output, indices, finite)
        return Result(bucket.output, unsent=unsent, finite=finite)


def _spoil_unless(finite: Tensor | None, out: Tensor) -> None:
    """Makes all entries NaN unless ``finite``."""
    # Reading the flag is free on a CPU only; on a GPU it would wait for the device.
    if finite is not None and (finite.device.type != "cpu" or not finite):
        out.add_(nan_unless(finite))


@register_scheme("random_k")
@dataclass(frozen=True)
class RandomK(_Agreed):
    """Sends random entries of a bucket; all ranks draw the same ones, so no indices are sent.

    The bucket is cut into k equal stretches, and one entry of each is sent. Biased: use with
    ``ErrorFeedback``, which sends the others in later steps. Payload: 4 bytes per sent entry.

    Args:
        ratio: share of the entries that is sent; at least one entry is.

    Reference: Stich, Cordonnier and Jaggi, Sparsified SGD with Memory, 2018.
    """

    def agree(self, bucket: Bucket) -> IndexExchange:
        return bucket.random("random_k", shared=True), bucket.step
        yield

    def take(self, bucket: Bucket, indices: tuple[RandomBits, int]) -> Tensor:
        x, unsent = bucket.raw, bucket.unsent
        k = number_kept(self.ratio, x.numel())
        if x.dtype == torch.float64:  # which the kernel does not know
            at = _random_indices(x.numel(), k, *indices, x.device)
            finite = all_finite(bucket.gradient)
            return _take_at(at, bucket.gradient, unsent).add_(nan_unless(finite))
        values = x.new_empty(k, dtype=torch.float32)
        gather_random(x, values, indices[0], residual=bucket.residual, unsent=unsent)
        return values

    def put(
        self,
        values: Tensor,
        out: Tensor,
        indices: tuple[RandomBits, int],
        finite: Tensor | None = None,
    ) -> None:
        if out.dtype == torch.float64:
            at = _random_indices(out.numel(), values.numel(), *indices, out.device)
            out.zero_().index_copy_(0, at, values)
            _spoil_unless(finite, out)
        else:
            scatter_random(values, out, indices[0], finite=finite)


def _random_indices(n: int, k: int, stream: RandomBits, step: int, device: torch.device) -> Tensor:
    return random_places(n, k, step, stream.seed, stream.number, device=device)


@register_scheme("random_block")
@dataclass(frozen=True)
class RandomBlock(_Agreed):
    """Sends one contiguous stretch of a bucket; all ranks draw the same random begin.

    The cheapest scheme: no selection, no indices. Biased: use with ``ErrorFeedback``.

    Args:
        ratio: share of the entries that is sent; at least one entry is.

    Reference: Xu et al., GRACE, 2021 (as a baseline).
    """

    def agree(self, bucket: Bucket) -> IndexExchange:
        """Returns the stretch; it goes on at the bucket's begin where it passes the end."""
        n = bucket.raw.numel()
        k = number_kept(self.ratio, n)
        generator = bucket.generator(f"{bucket.layout.names[0]}/random_block", shared=True)
        begin = int(torch.randint(n, (), generator=generator, device="cpu"))
        over = max(0, begin + k - n)
        return [slice(begin, begin + k - over), *([slice(0, over)] if over else [])]
        yield

    def take(self, bucket: Bucket, indices: list[slice]) -> Tensor:
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

    def put(
        self, values: Tensor, out: Tensor, indices: list[slice], finite: Tensor | None = None
    ) -> None:
        out.zero_()
        sizes = [part.stop - part.start for part in indices]
        for part, piece in zip(indices, values.split(sizes), strict=True):
            out[part] = piece
        _spoil_unless(finite, out)


@register_scheme("aligned_topk")
@dataclass(frozen=True)
class AlignedTopK(_Agreed):
    """Sends the rows of entries that are largest in the mean over ranks; all ranks send the same.

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

    traits = Traits(rounds=2, error=Biased(), most_entries=INT32_PLACES, keeps_zeros=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("row", "directions"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(
                    f"AlignedTopK({name}=...) is a whole number, 1 or more, got {value!r}"
                )

    def agree(self, bucket: Bucket) -> IndexExchange:
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

    def take(self, bucket: Bucket, indices: Tensor) -> Tensor:
        finite = all_finite(bucket.gradient)
        rows = self._rows(bucket.gradient.to(bucket.wide_dtype))
        values = rows[indices].flatten()
        if bucket.unsent is not None:
            others = rows.index_fill(0, indices, 0.0).view(-1)
            bucket.unsent.copy_(others[: bucket.unsent.numel()])  # without the padding
        return values.add_(nan_unless(finite))

    def put(
        self, values: Tensor, out: Tensor, indices: Tensor, finite: Tensor | None = None
    ) -> None:
        rows = torch.zeros_like(self._rows(out))
        rows[indices] = values.view(-1, self.row).to(rows.dtype)
        out.copy_(rows.view(-1)[: out.numel()])
        _spoil_unless(finite, out)

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


def _take_at(indices: Tensor, x: Tensor, unsent: Tensor | None) -> Tensor:
    values = x[indices]
    if unsent is not None:
        unsent.copy_(x).index_fill_(0, indices, 0.0)
    return values
