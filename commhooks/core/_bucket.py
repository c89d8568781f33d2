"""Defines ``Bucket`` and ``Result``, argument and result of a scheme's ``exchange``."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from commhooks.core._layout import Layout, Span, check_shards, from_rows, to_rows
from commhooks.core._memory import Memory, share_storage
from commhooks.core._slot import Slot, StepInfo, number_of
from commhooks.errors import SchemeError
from commhooks.kernels import RandomBits
from ddp_core import AllGather, AllReduce, Collective, ReduceScatter

__all__ = ["Bucket", "Result", "SchemeExchange", "nan_unless"]


class Result(NamedTuple):
    """Holds the result of one exchange of a bucket on one rank.

    Attributes:
        mean: flat averaged gradient; the same bits on every rank unless ``traits.agrees`` is False.
            With ``bucket.shards`` the mean of this rank's shard.
        sent: flat tensor that this rank's contribution decodes to; the mean of ``sent`` over ranks
            is ``mean``. None: ``gradient - unsent``, or the whole gradient where that is None, too.
        unsent: flat, ``gradient - sent``; None where the scheme leaves the subtraction to
            :meth:`Bucket.with_unsent`.
        finite: one bool, whether the bucket is finite on all ranks; the same on every rank. None:
            the scheme did not check.
    """

    mean: Tensor
    sent: Tensor | None = None
    unsent: Tensor | None = None
    finite: Tensor | None = None


SchemeExchange = Generator[Collective, Tensor, Result]


# ---- a bucket


_ATTRIBUTES = {"raw", "output", "residual", "unsent", "layout", "memory", "step", "seed"}
_ATTRIBUTES |= {"rank", "world_size", "shards"}


class Bucket(StepInfo):
    """Holds one bucket in one step on one rank: gradient, residual, memory, ranks, random bits.

    Most schemes read ``gradient``, which includes the residual of error feedback. A scheme whose
    kernels add the residual in the pass that encodes reads ``raw`` and ``residual`` instead, writes
    ``unsent``, and returns it in its result.

    Attributes:
        raw: flat gradient of this rank, without the residual. A scheme may overwrite ``raw`` where
            ``unsent`` is None, or where ``raw`` is ``output``.
        output: flat tensor in the gradient's dtype that may take the mean; may be ``raw`` itself.
        residual: flat, float32 (float64 if the gradient is), kept from earlier steps; or None.
        unsent: flat, like ``residual``; takes what this step does not send. None: no feedback is
            around the scheme, so its result may leave out ``sent`` and ``unsent``.
        shards: begin and end of the entries whose mean each rank needs, by rank: a scheme whose
            traits say ``shards`` returns the mean of this rank's entries alone, and ``output`` has
            as many. None: every rank needs the whole mean.
        memory, step, rank, world_size, seed: see :class:`commhooks.core.StepInfo`.

    Args:
        layout: parameter names and shapes; or a function for them, called at the first use.
        output: by default ``raw``, or this rank's shard of it.

    Example:
        >>> bucket = Bucket(torch.ones(6), Layout(["weight"], [(2, 3)]), world_size=2)
        >>> bucket.layout.names
        ('weight',)
    """

    def __init__(
        self,
        raw: Tensor,
        layout: Layout | Callable[[], Layout],
        *,
        output: Tensor | None = None,
        residual: Tensor | None = None,
        unsent: Tensor | None = None,
        memory: Memory | None = None,
        step: int = 0,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shards: Sequence[Span] | None = None,
    ) -> None:
        super().__init__(memory=memory, step=step, rank=rank, world_size=world_size, seed=seed)
        self.raw, self.residual, self.unsent = raw, residual, unsent
        self.shards = shards if shards is None else check_shards(shards, raw.numel(), world_size)
        shard = raw if shards is None else raw[self.own_slice]
        self.output = shard if output is None else output
        self._layout = layout
        # Gradient plus residual, once computed. A list, since copies by ``replace`` share it: the
        # sum is computed once, whichever of the copies reads it first.
        self._sum: list[Tensor] = []
        self._check()

    def _check(self) -> None:
        if self.residual is not None and self.unsent is None:
            raise ValueError("Bucket(residual=...) needs unsent=..., a place for the new residual")

    def replace(self, **changes: Any) -> Bucket:
        """Returns a copy of the bucket with some attributes replaced; tensors are shared.

        A wrapper that replaces ``raw``, ``residual`` or ``unsent`` returns its own ``unsent``.
        """
        unknown = changes.keys() - _ATTRIBUTES
        if unknown:
            raise TypeError(
                f"Bucket.replace: no attribute {', '.join(sorted(unknown))}; there are "
                f"{', '.join(sorted(_ATTRIBUTES))}"
            )
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        if changes.keys() & {"raw", "residual", "unsent"}:
            copy._sum = []  # another sum: no longer shared
        if "layout" in changes:
            copy._layout = changes.pop("layout")
        for name, value in changes.items():
            setattr(copy, name, value)
        copy._check()
        return copy

    # ---- the gradient, and the tensors that are kept

    @property
    def gradient(self) -> Tensor:
        """Returns the flat gradient, the residual included.

        Where there is a residual, the first reading writes the sum into ``unsent``; the sum is
        valid until something else is written there.
        """
        if self.residual is None:
            return self.raw
        if not self._sum:
            self._sum.append(torch.add(self.raw, self.residual, out=self.unsent))
        return self._sum[0]

    @property
    def own_slice(self) -> slice:
        """Returns the entries whose mean this rank needs: all, or those of its shard."""
        return slice(None) if self.shards is None else slice(*self.shards[self.rank])

    @property
    def layout(self) -> Layout:
        """Returns the parameter names and shapes in the flat gradient."""
        # Looked up at the first use: many schemes never ask which parameters a bucket holds.
        if not isinstance(self._layout, Layout):
            self._layout = self._layout()
        return self._layout

    def read(self, slot: Slot) -> Tensor:
        """Returns the committed values of ``slot`` of all parameters, flat; do not modify in place.

        A parameter without a value begins with the slot's initial one.
        """
        dtype = slot.dtype or self.wide_dtype
        flat = self.memory.read(
            *(slot.key, slot.layout(self.layout)),
            device=self.raw.device,
            dtype=dtype,
            initial=lambda name, shape: slot.initial(name, shape, self),
        )
        # Memory keeps the dtype in which values were written.
        return flat if flat.dtype == dtype else flat.to(dtype)

    def write(self, slot: Slot, values: Tensor) -> None:
        """Stages new values of ``slot``: committed after the step, if all buckets are finite."""
        layout = slot.layout(self.layout)
        flat = _to_keep(self, slot, layout, values)
        if values.device.type != "cpu":
            # Only the GPU knows whether the step is finite: its commit chooses between old and new
            # values, so old ones have to exist, in the first step, too.
            self.read(slot)
        self.memory.write(slot.key, layout, flat)

    def scratch(self, slot: Slot, like: Tensor) -> Tensor:
        """Returns a flat tensor for new values of ``slot``; its contents are undefined."""
        return self.memory.scratch(slot.key, slot.layout(self.layout), like)

    @property
    def wide_dtype(self) -> torch.dtype:
        """Returns the dtype of sums of gradients: float32, or float64 if the gradient is."""
        return torch.float64 if self.raw.dtype == torch.float64 else torch.float32

    # ---- random bits

    def fork_random(self, purpose: str) -> Bucket:
        """Returns a copy of the bucket whose random bits are keyed by ``purpose``, too."""
        return self.replace(seed=number_of(f"{self.seed}/{purpose}") >> 1)  # 63 bits: fit int64

    def random(self, purpose: str, *, shared: bool) -> RandomBits:
        """Returns random bits for kernels, keyed by bucket, step, ``purpose`` and rank.

        Args:
            purpose: name of the stream; two streams of one bucket in one step have two names.
            shared: leaves out the rank: the same bits on every rank.
        """
        # The first parameter names the bucket: bucket numbers change when DDP rebuilds buckets.
        number = _stream_of(self.layout.names[0], purpose, None if shared else self.rank)
        return RandomBits(self.seed, self.step_on(self.raw.device), number)

    # ---- parts of an exchange that schemes share

    def all_reduce(self) -> SchemeExchange:
        """Averages the bucket by one all-reduce, in the dtype of ``raw``.

        With ``shards``, by one reduce-scatter.
        """
        if self.shards is not None:
            return (yield from _reduce_scatter(self, self.shards))
        return (yield from _all_reduce(self))

    def all_gather(self, parts: Sequence[Span]) -> SchemeExchange:
        """Gathers the buckets of all ranks by one all-gather, in the dtype of ``raw``.

        Args:
            parts: begin and end of the entries of each rank in the result.
        """
        return (yield from _all_gather(self, parts))

    def with_unsent(self, result: Result) -> Result:
        """Completes a result: computes ``unsent`` from ``sent`` where the scheme left it out."""
        return _completed(self, result)

    def in_float32(self) -> Bucket:
        """Returns the bucket that kernels take: a float64 gradient is rounded to float32."""
        if self.raw.dtype != torch.float64:
            return self
        raw = self.gradient.float()  # the residual is added in float64, before rounding
        unsent = None if self.unsent is None else torch.empty_like(raw)
        output = torch.empty_like(self.output, dtype=raw.dtype)
        return self.replace(raw=raw, residual=None, unsent=unsent, output=output)

    def result_of(self, inside: Bucket) -> Result:
        """Returns the result, given ``inside`` of :meth:`in_float32` with output and unsent."""
        if inside is not self:
            if self.unsent is not None and inside.unsent is not None:
                # Feedback keeps the error of rounding to float32, too.
                torch.sub(self.gradient, inside.raw, out=self.unsent).add_(inside.unsent)
            self.output.copy_(inside.output)
        return Result(self.output, unsent=self.unsent)


def _all_reduce(bucket: Bucket) -> SchemeExchange:
    """Averages a bucket on all ranks."""
    gradient, dtype = bucket.gradient, bucket.raw.dtype
    # The collective works in place, and feedback subtracts from the gradient afterwards.
    payload = gradient.to(dtype, copy=bucket.unsent is not None)
    # With a residual the sum is float32: feedback keeps the error of rounding it to 16 bits.
    sent = None if gradient.dtype == dtype else payload.clone()
    request = AllReduce(payload)
    mean = yield request
    if mean.dtype != bucket.output.dtype:
        mean = bucket.output.copy_(mean)
    # A cast around the scheme rounds what travels, and notes the rounded share in the request.
    result = Result(mean, sent=sent if request.sent is None else request.sent)
    return result if bucket.unsent is None else bucket.with_unsent(result)


def _reduce_scatter(bucket: Bucket, shards: Sequence[Span]) -> SchemeExchange:
    """Averages a bucket, of which each rank gets its shard."""
    gradient, dtype = bucket.gradient, bucket.raw.dtype
    payload = gradient.to(dtype)
    request = ReduceScatter(to_rows(payload, shards), "mean")
    arrived = yield request
    mean = bucket.output.copy_(arrived.view(-1)[: bucket.output.numel()])
    sent = None if gradient.dtype == dtype else payload
    if request.sent is not None:
        sent = from_rows(request.sent, shards)
    result = Result(mean, sent=sent)
    return result if bucket.unsent is None else bucket.with_unsent(result)


def _all_gather(bucket: Bucket, parts: Sequence[Span]) -> SchemeExchange:
    """Gathers the buckets of all ranks."""
    gradient, dtype = bucket.gradient, bucket.raw.dtype
    payload = gradient.to(dtype)
    longest, n = parts[0][1], payload.numel()
    # All ranks send as much as the one with the most entries, as a collective needs.
    request = AllGather(payload if n == longest else pad(payload, (0, longest - n)))
    arrived = yield request
    sent = None if gradient.dtype == dtype else payload
    if request.sent is not None:
        sent = request.sent[:n]
    result = Result(from_rows(arrived, parts), sent=sent)
    return result if bucket.unsent is None else bucket.with_unsent(result)


def _completed(bucket: Bucket, result: Result) -> Result:
    """Returns a result with what was not sent."""
    mean, sent, unsent, finite = result
    assert bucket.unsent is not None, "unsent is not asked for"
    if mean.data_ptr() == bucket.unsent.data_ptr():
        mean = mean.clone()  # averaged in place of the gradient, in ``unsent``, written below
    if unsent is None:
        if bucket.residual is not None and not bucket._sum:
            raise SchemeError(
                "a scheme that reads bucket.raw adds bucket.residual itself and returns "
                "Result(mean, unsent=bucket.unsent); this one returned no unsent, so the "
                "residual would be lost. Read bucket.gradient, which is the sum"
            )
        if sent is None:
            unsent = bucket.unsent.zero_()
        else:
            unsent = torch.sub(bucket.gradient, sent, out=bucket.unsent)
    return Result(mean, sent, unsent, finite)


def nan_unless(finite: Tensor) -> Tensor:
    """Returns 0 if ``finite``, else NaN: added to a factor, makes every entry of the product NaN.

    Args:
        finite: one bool.
    """
    # A value to add, not a branch: reading the flag on the host would wait for a GPU.
    # 0 / 1 is 0, and 0 / 0 is NaN. One operation, while ``torch.where`` takes four on a GPU: both
    # numbers become tensors on the device.
    return _ZERO / finite


_ZERO = torch.zeros((), dtype=torch.float32, device="cpu")


def _to_keep(bucket: Bucket, slot: Slot, layout: Layout, values: Tensor) -> Tensor:
    """Returns new values of ``slot``, flat and not in the memory of the bucket's own tensors.

    Raises:
        SchemeError: the scheme does not declare the slot, or the size is wrong.
    """
    declared = bucket.memory.declared
    # An undeclared slot would lose its values without a word: the engine commits nothing for a
    # scheme without slots, and no ``resize`` says how to carry the values to other ranks.
    if declared is not None and slot.key not in declared:
        raise SchemeError(
            f"bucket.write(Slot({slot.key!r}), ...): the scheme does not declare this slot, so its "
            f"values would be lost; list the slot in the scheme's `keeps`"
        )
    if values.numel() != layout.numel:
        raise SchemeError(
            f"bucket.write(Slot({slot.key!r}), ...): the slot has {layout.numel} entries in this "
            f"bucket, got {values.numel()}"
        )
    # DistributedDataParallel uses the bucket's tensors again, in this step for the mean; feedback
    # writes what is not sent where the sum of gradient and residual is.
    is_reused = share_storage(values, bucket.raw) or share_storage(values, bucket.output)
    if is_reused or (bucket.unsent is not None and share_storage(values, bucket.unsent)):
        values = values.clone()
    return values.reshape(-1)


@lru_cache(maxsize=4096)  # a few per bucket, in every step
def _stream_of(name: str, purpose: str, rank: int | None) -> int:
    """Returns the number of a stream of random bits."""
    return number_of(f"{name}/{purpose}/{'shared' if rank is None else rank}") >> 33
