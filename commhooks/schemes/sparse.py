"""Defines sparse schemes: the largest entries of a bucket, or indices that all ranks agree on."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from commhooks.core.bucket import Bucket, Result, SchemeExchange, nan_unless
from commhooks.core.packed import PackedCodec, Pattern, Piece, Randomness
from commhooks.core.registry import register_scheme
from commhooks.core.scheme import Scheme
from commhooks.core.traits import INT32_PLACES, Biased, ErrorKind, Traits
from commhooks.kernels import (
    RandomBits,
    all_finite,
    gather_random,
    random_places,
    scatter_add,
    scatter_random,
    top_k,
    top_k_sampled,
)
from ddp_core import AllReduce, Collective

__all__ = ["AlignedTopK", "RandomBlock", "RandomK", "TopK"]


def _check_ratio(scheme: Scheme, ratio: float) -> None:
    if not 0 < ratio <= 1:
        name = type(scheme).__name__
        raise ValueError(
            f"{name}(ratio=...) is a share of the entries, 0 < ratio <= 1, got {ratio!r}"
        )


def _kept(ratio: float, n: int) -> int:
    """Returns how many of ``n`` entries are sent: one at least."""
    return min(n, max(1, int(ratio * n)))


@register_scheme("topk")
@dataclass(frozen=True)
class TopK(PackedCodec):
    """Sends the entries of largest magnitude of a bucket with their indices; ranks add them up.

    Payload: 8 bytes per sent entry, gathered from every rank, which is less than an all-reduce
    below a ratio of about 1 / ranks. NaN counts as largest, and is sent.

    Biased: use with ``ErrorFeedback``; the kernel adds and keeps the residual in the same pass.

    Args:
        ratio: share of the entries that is sent; at least one entry is.
        sampled: finds the threshold from a sample of the bucket: sends at most as many entries,
            usually somewhat fewer.
        pattern: "all_gather", or "two_phase": each rank sums a shard and sends the largest entries
            of the sum, so that bytes do not grow with the number of ranks and the mean has no more
            entries than ``ratio``.

    Example:
        >>> hook = register(ddp_model, "topk", ratio=0.01)

    Reference: Aji and Heafield, Sparse Communication for Distributed Gradient Descent, 2017.
    """

    ratio: float = 0.01
    sampled: bool = False
    pattern: Pattern = "all_gather"

    @property
    def error(self) -> ErrorKind:
        return Biased()

    @property
    def traits(self) -> Traits:
        return super().traits._replace(most_entries=INT32_PLACES)

    def __post_init__(self) -> None:
        _check_ratio(self, self.ratio)

    def is_worthwhile(self, n: int, dense_bytes: int, world_size: int) -> bool:
        # Payloads received, against the two buckets that an all-reduce sends and receives.
        received = world_size if self.pattern == "all_gather" else 2
        return received * self.payload_bytes(n) < 2 * dense_bytes

    def payload_bytes(self, n: int) -> int:
        return -(-8 * _kept(self.ratio, n) // 16) * 16

    def _parts(self, payloads: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Returns indices and values of payloads; views."""
        k = _kept(self.ratio, n)
        indices, values = payloads[..., : 4 * k], payloads[..., 4 * k : 8 * k]
        return indices.view(torch.int32), values.view(torch.float32)

    def pack(self, piece: Piece, payload: Tensor, random: Randomness) -> None:
        x, residual, unsent = piece
        indices, values = self._parts(payload, x.numel())
        select = top_k_sampled if self.sampled else top_k
        # The kernel takes a residual only together with a tensor for what is not sent.
        if residual is not None and unsent is None:
            x, residual = x + residual, None
        select(x, len(indices), indices, values, residual=residual, unsent=unsent)
        payload[8 * len(indices) :].zero_()

    def unpack(self, payloads: Tensor, out: Tensor, random: Randomness, factor: float) -> None:
        total = out.zero_() if out.dtype == torch.float32 else torch.zeros_like(out).float()
        indices, values = self._parts(payloads, out.numel())
        scatter_add(indices.contiguous(), values.contiguous(), total, factor=factor)
        if total is not out:
            out.copy_(total)


IndexExchange = Generator[Collective, Tensor, Any]  # returns indices, see ``_Agreed.agree``


@dataclass(frozen=True)
class _Agreed(Scheme):
    """Sends entries at indices that every rank knows: values only, in one all-reduce.

    If any value of any rank is not finite, sent or not, the whole bucket arrives as NaN.
    """

    ratio: float = 0.01

    traits = Traits(error=Biased(), most_entries=INT32_PLACES)

    def __post_init__(self) -> None:
        _check_ratio(self, self.ratio)

    def agree(self, bucket: Bucket) -> IndexExchange:
        """Returns indices that are the same on all ranks, by a collective or by shared random bits.

        Subclasses choose their form: ``take`` and ``put`` get what this method returns.
        """
        raise NotImplementedError
        yield  # makes this a generator function

    def take(self, bucket: Bucket, indices: Any) -> Tensor:
        """Returns the gradient's entries at ``indices``; writes others to ``bucket.unsent``."""
        raise NotImplementedError

    def put(self, values: Tensor, out: Tensor, indices: Any) -> None:
        """Writes values to ``out`` at ``indices``, and zeros elsewhere."""
        raise NotImplementedError

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        if not bucket.raw.numel():
            return (yield from bucket.all_reduce())
        unsent, output = bucket.unsent, bucket.output
        indices = yield from self.agree(bucket)
        values = self.take(bucket, indices)
        # With feedback, entries are in ``values`` or in ``unsent``. NaN in all values tells other
        # ranks of an entry that is not sent.
        finite = all_finite(bucket.raw if unsent is None else unsent) & all_finite(values)
        values.add_(nan_unless(finite))
        own_values = values if unsent is None else values.clone()
        request = AllReduce(values)
        values = yield request
        if unsent is not None and request.sent is not None:  # rounded on the way
            error = torch.empty_like(unsent)
            self.put(own_values - request.sent, error, indices)
            unsent.add_(error)
        finite = all_finite(values)
        # In the dtype of the values, and rounded to that of the output once, at the end.
        mean = output
        if mean.dtype != values.dtype:
            mean = torch.empty_like(mean, dtype=values.dtype)
        self.put(values, mean, indices)
        # Reading the flag is free on a CPU only; on a GPU it would wait for the device.
        if finite.device.type != "cpu" or not finite:
            mean.add_(nan_unless(finite))
        if mean.dtype != output.dtype:
            mean = output.copy_(mean)
        return Result(mean, unsent=unsent, finite=finite)


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
        k = _kept(self.ratio, x.numel())
        if x.dtype == torch.float64:  # which the kernel does not know
            return _take_at(
                _random_indices(x.numel(), k, *indices, x.device), bucket.gradient, unsent
            )
        values = x.new_empty(k, dtype=torch.float32)
        gather_random(x, values, indices[0], residual=bucket.residual, unsent=unsent)
        return values

    def put(self, values: Tensor, out: Tensor, indices: tuple[RandomBits, int]) -> None:
        if out.dtype == torch.float64:
            at = _random_indices(out.numel(), values.numel(), *indices, out.device)
            out.zero_().index_copy_(0, at, values)
        else:
            scatter_random(values, out, indices[0])


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
        k = _kept(self.ratio, n)
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
        pieces = [source[part] for part in indices]
        values = torch.cat(pieces).to(bucket.wide_dtype)
        if unsent is not None:
            for piece in pieces:
                piece.zero_()
        return values

    def put(self, values: Tensor, out: Tensor, indices: list[slice]) -> None:
        out.zero_()
        sizes = [part.stop - part.start for part in indices]
        for part, piece in zip(indices, values.split(sizes), strict=True):
            out[part] = piece


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

    traits = Traits(rounds=2, error=Biased(), most_entries=INT32_PLACES)

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
        generator = bucket.generator(f"{bucket.layout.names[0]}/sketch", shared=True)
        signs = torch.randint(0, 2, (self.row, self.directions), generator=generator, device="cpu")
        sketch = yield AllReduce(rows @ (2.0 * signs - 1.0).to(rows))
        # The squared norm of a projection on random signs is that of the row, on average.
        energy = torch.zeros_like(sketch[:, 0], dtype=torch.float32)
        for column in sketch.unbind(1):  # in this order on every device: ranks pick the same rows
            energy += column.square()
        k = _kept(self.ratio, len(rows))
        indices = torch.empty(k, dtype=torch.int32, device=rows.device)
        top_k(energy, k, indices, torch.empty_like(energy[:k]))
        return indices.long()

    def take(self, bucket: Bucket, indices: Tensor) -> Tensor:
        rows = self._rows(bucket.gradient.to(bucket.wide_dtype))
        values = rows[indices].flatten()
        if bucket.unsent is not None:
            others = rows.index_fill(0, indices, 0.0).view(-1)
            bucket.unsent.copy_(others[: bucket.unsent.numel()])  # without the padding
        return values

    def put(self, values: Tensor, out: Tensor, indices: Tensor) -> None:
        rows = torch.zeros_like(self._rows(out))
        rows[indices] = values.view(-1, self.row).to(rows.dtype)
        out.copy_(rows.view(-1)[: out.numel()])

    def _rows(self, flat: Tensor) -> Tensor:
        return pad(flat, (0, -flat.numel() % self.row)).view(-1, self.row)


def _take_at(indices: Tensor, x: Tensor, unsent: Tensor | None) -> Tensor:
    values = x[indices]
    if unsent is not None:
        unsent.copy_(x).index_fill_(0, indices, 0.0)
    return values
