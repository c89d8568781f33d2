"""Sparse schemes: the largest entries of a bucket, or places that all ranks agree on."""

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
from commhooks.core.traits import Biased, ErrorKind, Traits
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
    return min(n, max(1, int(ratio * n)))


@register_scheme("topk")
@dataclass(frozen=True)
class TopK(PackedCodec):
    """Sends the entries of largest magnitude of a bucket, with their places; ranks add them up.

    Payload: 8 bytes per entry sent, gathered from every rank, so it pays below a ratio of about
    1 / ranks. NaN counts as largest: it is sent.

    Biased: use with ``ErrorFeedback``, which adds and keeps in the same pass.

    Args:
        ratio: share of the entries that is sent; at least one is.
        sampled: finds the threshold from a sample of the bucket: about as many entries, never more.
        pattern: "all_gather", or "two_phase": each rank sums a shard and sends its largest entries
            on, so that bytes do not grow with the ranks and the mean has no more entries than
            ``ratio``.

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

    def __post_init__(self) -> None:
        _check_ratio(self, self.ratio)

    def is_worthwhile(self, n: int, dense_bytes: int, world_size: int) -> bool:
        received = world_size if self.pattern == "all_gather" else 2
        return received * self.payload_bytes(n) < 2 * dense_bytes

    def payload_bytes(self, n: int) -> int:
        return -(-8 * _kept(self.ratio, n) // 16) * 16

    def _parts(self, payloads: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Places and values; views."""
        k = _kept(self.ratio, n)
        places, values = payloads[..., : 4 * k], payloads[..., 4 * k : 8 * k]
        return places.view(torch.int32), values.view(torch.float32)

    def pack(self, piece: Piece, payload: Tensor, random: Randomness) -> None:
        x, residual, unsent = piece
        places, values = self._parts(payload, x.numel())
        select = top_k_sampled if self.sampled else top_k
        if residual is not None and unsent is None:
            x, residual = x + residual, None
        select(x, len(places), places, values, residual=residual, unsent=unsent)
        payload[8 * len(places) :].zero_()

    def unpack(self, payloads: Tensor, out: Tensor, random: Randomness, factor: float) -> None:
        total = out.zero_() if out.dtype == torch.float32 else torch.zeros_like(out).float()
        places, values = self._parts(payloads, out.numel())
        scatter_add(places.contiguous(), values.contiguous(), total, factor=factor)
        if total is not out:
            out.copy_(total)


Places = Generator[Collective, Tensor, Any]


@dataclass(frozen=True)
class _Agreed(Scheme):
    """Entries at places that every rank knows: nothing but values travels, in an all-reduce.

    Only some entries are looked at, so a value that is not finite anywhere makes the whole bucket
    arrive as NaN.
    """

    ratio: float = 0.01

    traits = Traits(error=Biased())

    def __post_init__(self) -> None:
        _check_ratio(self, self.ratio)

    def agree(self, bucket: Bucket) -> Places:
        """Finds places that all ranks know; ``take`` and ``put`` are given what it returns.

        Without a message of its own it draws them.
        """
        raise NotImplementedError
        yield

    def take(self, bucket: Bucket, places: Any) -> Tensor:
        """Entries of the gradient at these places; the others go to ``bucket.unsent``."""
        raise NotImplementedError

    def put(self, values: Tensor, out: Tensor, places: Any) -> None:
        """Writes them to their places, and zeros elsewhere."""
        raise NotImplementedError

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        if not bucket.raw.numel():
            return (yield from bucket.all_reduce())
        unsent, output = bucket.unsent, bucket.output
        places = yield from self.agree(bucket)
        values = self.take(bucket, places)
        finite = all_finite(bucket.raw if unsent is None else unsent) & all_finite(values)
        values.add_(nan_unless(finite))
        own = values if unsent is None else values.clone()
        request = AllReduce(values)
        values = yield request
        if unsent is not None and request.sent is not None:  # rounded on the way
            lost = torch.empty_like(unsent)
            self.put(own - request.sent, lost, places)
            unsent.add_(lost)
        finite = all_finite(values)
        # Sums of float64 stay in float64: the mean of what is sent is what the mean sends.
        mean = output
        if mean.dtype != values.dtype:
            mean = torch.empty_like(mean, dtype=values.dtype)
        self.put(values, mean, places)
        if finite.device.type != "cpu" or not finite:
            mean.add_(nan_unless(finite))
        if mean.dtype != output.dtype:
            mean = output.copy_(mean)
        return Result(mean, unsent=unsent, finite=finite)


@register_scheme("random_k")
@dataclass(frozen=True)
class RandomK(_Agreed):
    """Sends random entries of a bucket; all ranks draw the same, so no place is sent.

    One entry of each of k equal stretches. Biased: use with ``ErrorFeedback``; what was not drawn
    waits for its turn. Payload: 4 bytes per entry sent.

    Args:
        ratio: share of the entries that is sent; at least one is.

    Reference: Stich, Cordonnier and Jaggi, Sparsified SGD with Memory, 2018.
    """

    def agree(self, bucket: Bucket) -> Places:
        return bucket.random("random_k", shared=True), bucket.step
        yield

    def take(self, bucket: Bucket, places: tuple[RandomBits, int]) -> Tensor:
        x, unsent = bucket.raw, bucket.unsent
        k = _kept(self.ratio, x.numel())
        if x.dtype == torch.float64:
            return _take_at(_places(x.numel(), k, *places, x.device), bucket.gradient, unsent)
        values = x.new_empty(k, dtype=torch.float32)
        gather_random(x, values, places[0], residual=bucket.residual, unsent=unsent)
        return values

    def put(self, values: Tensor, out: Tensor, places: tuple[RandomBits, int]) -> None:
        if out.dtype == torch.float64:
            at = _places(out.numel(), values.numel(), *places, out.device)
            out.zero_().index_copy_(0, at, values)
        else:
            scatter_random(values, out, places[0])


def _places(n: int, k: int, stream: RandomBits, step: int, device: torch.device) -> Tensor:
    return random_places(n, k, step, stream.seed, stream.number, device=device)


@register_scheme("random_block")
@dataclass(frozen=True)
class RandomBlock(_Agreed):
    """Sends one contiguous stretch of a bucket, at a random place that all ranks draw alike.

    The cheapest scheme there is: no selection, no places. Biased: use with ``ErrorFeedback``.

    Args:
        ratio: share of the entries that is sent; at least one is.

    Reference: Xu et al., GRACE, 2021 (as a baseline).
    """

    def agree(self, bucket: Bucket) -> Places:
        """The stretch, in two parts where it goes over the end."""
        n = bucket.raw.numel()
        k = _kept(self.ratio, n)
        generator = bucket.generator(f"{bucket.layout.names[0]}/random_block", shared=True)
        begin = int(torch.randint(n, (), generator=generator))
        over = max(0, begin + k - n)
        return [slice(begin, begin + k - over), *([slice(0, over)] if over else [])]
        yield

    def take(self, bucket: Bucket, places: list[slice]) -> Tensor:
        source, unsent = bucket.raw, bucket.unsent
        if unsent is not None:
            source = bucket.gradient if bucket.residual is not None else unsent.copy_(source)
        pieces = [source[part] for part in places]
        values = torch.cat(pieces).to(bucket.wide_dtype)
        if unsent is not None:
            for piece in pieces:
                piece.zero_()
        return values

    def put(self, values: Tensor, out: Tensor, places: list[slice]) -> None:
        out.zero_()
        sizes = [part.stop - part.start for part in places]
        for part, piece in zip(places, values.split(sizes), strict=True):
            out[part] = piece


@register_scheme("aligned_topk")
@dataclass(frozen=True)
class AlignedTopK(_Agreed):
    """Sends the rows of entries that are largest on average over ranks; all ranks send the same.

    A bucket is cut into rows. Each rank projects its rows on a few random directions, the same on
    all ranks; the sum of these sketches tells how large each row of the mean is. So no place
    travels, and both the sketch and the values are all-reduces: bytes do not grow with the number
    of ranks. Biased: use with ``ErrorFeedback``.

    Args:
        ratio: share of the rows that is sent; at least one is.
        row: entries of a row.
        directions: of the sketch; ``4 * directions / row`` bytes an entry.

    Example:
        >>> hook = register(ddp_model, "aligned_topk", ratio=0.05)

    Reference: Chen et al., ARC-Top-K, 2025.
    """

    ratio: float = 0.05
    row: int = 128
    directions: int = 4

    traits = Traits(rounds=2, error=Biased())

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("row", "directions"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(
                    f"AlignedTopK({name}=...) is a whole number, 1 or more, got {value!r}"
                )

    def agree(self, bucket: Bucket) -> Places:
        rows = self._rows(bucket.gradient).to(bucket.wide_dtype)
        generator = bucket.generator(f"{bucket.layout.names[0]}/sketch", shared=True)
        signs = torch.randint(0, 2, (self.row, self.directions), generator=generator)
        sketch = yield AllReduce(rows @ (2.0 * signs - 1.0).to(rows))
        energy = torch.zeros_like(sketch[:, 0], dtype=torch.float32)
        for column in sketch.unbind(1):  # in this order on every device
            energy += column.square()
        k = _kept(self.ratio, len(rows))
        places = torch.empty(k, dtype=torch.int32, device=rows.device)
        top_k(energy, k, places, torch.empty_like(energy[:k]))
        return places.long()

    def take(self, bucket: Bucket, places: Tensor) -> Tensor:
        rows = self._rows(bucket.gradient.to(bucket.wide_dtype))
        values = rows[places].flatten()
        if bucket.unsent is not None:
            rest = rows.index_fill(0, places, 0.0).view(-1)
            bucket.unsent.copy_(rest[: bucket.unsent.numel()])
        return values

    def put(self, values: Tensor, out: Tensor, places: Tensor) -> None:
        rows = torch.zeros_like(self._rows(out))
        rows[places] = values.view(-1, self.row).to(rows.dtype)
        out.copy_(rows.view(-1)[: out.numel()])

    def _rows(self, flat: Tensor) -> Tensor:
        return pad(flat, (0, -flat.numel() % self.row)).view(-1, self.row)


def _take_at(places: Tensor, x: Tensor, unsent: Tensor | None) -> Tensor:
    values = x[places]
    if unsent is not None:
        unsent.copy_(x).index_fill_(0, places, 0.0)
    return values
