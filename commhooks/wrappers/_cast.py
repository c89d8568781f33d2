"""Defines ``Cast``, which sends the floating-point payloads of any scheme in 16 bits."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from commhooks.core._bucket import Bucket, Result, SchemeExchange
from commhooks.core._dense import Dense
from commhooks.core._layout import Span
from commhooks.core._scheme import Scheme
from commhooks.kernels import all_finite, scaled_cast
from commhooks.wrappers._base import Wrapper
from commhooks.wrappers._feedback import has_feedback
from ddp_core import AllReduce, Collective, ReduceScatter, as_request

__all__ = ["Cast"]


@dataclass(frozen=True)
class Cast(Wrapper):
    """Sends the floating-point payloads of a scheme in 16 bits; its computations do not change.

    Sums are divided before the cast, so that a sum over many ranks does not overflow. A value that
    overflows all the same arrives as infinity on every rank, which a loss scaler relies on; on the
    CPU the first overflow warns.

    Args:
        scheme: the scheme whose payloads are cast.
        dtype: ``torch.float16`` or ``torch.bfloat16``.

    Example:
        >>> hook = register(ddp_model, Cast(ErrorFeedback(PowerSGD(rank=4)), torch.float16))
    """

    scheme: Scheme
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"Cast(dtype=...) is float16 or bfloat16, got {self.dtype}")

    @property
    def gathers(self) -> bool:
        return self.scheme.gathers

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        return (yield from self._cast(self.scheme.exchange(bucket), bucket))

    def all_gather(self, bucket: Bucket, parts: Sequence[Span]) -> SchemeExchange:
        return (yield from self._cast(self.scheme.all_gather(bucket, parts), bucket))

    def _cast(self, inner: SchemeExchange, bucket: Bucket) -> SchemeExchange:
        """Runs an exchange of the inner scheme, whose collectives travel in 16 bits."""
        # Only feedback, around this wrapper or inside, asks what was sent; others save the pass.
        keep_sent = bucket.unsent is not None or has_feedback(self.scheme)
        # A wider mean is finite where its payload is, which has half the bytes.
        judges = isinstance(self.scheme, Dense) and bucket.raw.element_size() > 2
        finite = None
        try:
            request = as_request(next(inner))
            while True:
                tensor = request.tensor
                narrow, scale, overlap = request, 1.0, None
                passes = tensor.dtype == self.dtype or not tensor.is_floating_point()
                if not passes:
                    narrow, scale = self._narrow(request, bucket.world_size)
                    if keep_sent:
                        request.sent = narrow.tensor.to(tensor.dtype).mul_(scale)
                    rounded = partial(_record_sent, request, narrow, scale, keep_sent)
                    if request.overlap is not None:
                        overlap = narrow.overlap = request.overlap.after(rounded)
                # The collective in 16 bits.
                try:
                    arrived = yield narrow
                except Exception as error:  # a collective failed: the scheme may handle it
                    request = as_request(inner.throw(error))
                    continue
                finally:
                    if not passes:
                        narrow.overlap = None  # it has the request: nothing would free both
                if passes:
                    request = as_request(inner.send(arrived))
                    continue
                if overlap is None:
                    rounded()
                else:
                    overlap.finish()
                # A mean was summed in shares of 1 / ranks; a sum has to be multiplied back.
                wide = _widen(arrived, tensor, 1.0 if _is_mean(request) else scale)
                if arrived.device.type == "cpu" and (judges or self.dtype == torch.float16):
                    finite = all_finite(arrived)
                    if self.dtype == torch.float16 and not finite:
                        _warn_of_overflow()
                request = as_request(inner.send(wide))
        except StopIteration as stop:
            result: Result = stop.value
            return result._replace(finite=finite) if judges else result

    def _narrow(self, request: Collective, world_size: int) -> tuple[Collective, float]:
        """Returns the cast request, and the factor by which a rank's share in it is too small."""
        sums = isinstance(request, (AllReduce, ReduceScatter)) and request.op in ("mean", "sum")
        scale = float(world_size) if sums else 1.0
        small = torch.empty_like(request.tensor, dtype=self.dtype)
        scaled_cast(request.tensor, 1.0 / scale, out=small)
        if not sums:
            return request.like(small), scale
        kind = AllReduce if isinstance(request, AllReduce) else ReduceScatter
        return kind(small, "sum"), scale


def _record_sent(request: Collective, narrow: Collective, scale: float, keep: bool) -> None:
    """Records the values that were sent if a cast around this one rounded them again."""
    if keep and narrow.sent is not None:
        request.sent = narrow.sent.to(request.tensor.dtype).mul_(scale)


def _is_mean(request: Collective) -> bool:
    """Whether the request asks for the mean over ranks."""
    return isinstance(request, (AllReduce, ReduceScatter)) and request.op == "mean"


def _widen(arrived: Tensor, like: Tensor, scale: float) -> Tensor:
    """Returns the result in the dtype of ``like``; in its memory where shapes are equal."""
    wide = like.copy_(arrived) if arrived.shape == like.shape else arrived.to(like.dtype)
    return wide if scale == 1.0 else wide.mul_(scale)


_warned_of_overflow = False


def _warn_of_overflow() -> None:
    """Warns once in a process that a float16 payload arrived as infinity."""
    global _warned_of_overflow
    if not _warned_of_overflow:
        _warned_of_overflow = True
        warnings.warn(
            "a float16 payload is not finite: the gradient was not, or it overflowed 65504 in the "
            "cast. Every rank gets it as it is, so that a loss scaler can skip the step; "
            "use bf16 if this is not a loss scaler at work",
            RuntimeWarning,
            stacklevel=2,
        )
