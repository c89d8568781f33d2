"""Defines ``Guard``, which averages densely for a while if compression errors grow."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from commhooks.core._bucket import Bucket, SchemeExchange
from commhooks.core._scheme import Scheme, checked_result
from commhooks.core._slot import Number, Slot
from commhooks.core._traits import Traits
from commhooks.wrappers._base import Wrapper
from commhooks.wrappers._feedback import RESIDUAL_SLOT, keeps_residual, pop_residual
from ddp_core import AllReduce
from ddp_core.exchange._errors import listed

__all__ = ["Guard"]

_UNTIL, _ERROR, _RESIDUAL = map(Number, ("guard.dense_until", "guard.error", "guard.residual"))
# In units of the gradient's norm: what is held back for a hundred steps is applied to a model that
# has moved on.
_MAX_RESIDUAL = 100.0
# Of a measure over its moving average: from look to look both vary by a small factor where the
# scheme works, so that ten times as much is no noise.
_GROWTH = 10.0
_REST = 1000  # dense steps, as many as ten looks are apart; then the scheme is tried again
_SAMPLE = 4096  # entries: their norm is known to 1 / sqrt(2 * 4096), 1 %, for 32 KB of float64


@dataclass(frozen=True)
class Guard(Wrapper):
    """Watches a scheme, and averages densely for a while if its error or residual grows.

    Every ``every`` steps the ranks compare some contiguous entries of each averaged bucket with
    their exact average, and average the size of the residual (one more all-reduce, of 4096 entries
    and two). Where the error is above ``max_error``, the residual above a hundred gradients, or
    either above ten times its moving average, from the fourth measurement on, the guard warns,
    sends the residual, and averages the bucket densely for 1000 steps; all ranks come to the same
    decision. A step that is not finite is not measured.

    Args:
        scheme: the scheme to watch.
        every: steps between two measurements.
        max_error: largest relative error of the average; None: no bound. The error of sparse
            schemes with feedback is usually about 1.

    Example:
        >>> hook = register(ddp_model, Guard(make("onebit"), every=100))
    """

    scheme: Scheme
    every: int = 100
    max_error: float | None = None

    # Kept per parameter, with one value for all of a bucket: buckets change, names do not.
    keeps = (_UNTIL, _ERROR, _RESIDUAL)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every < 1:
            raise ValueError(f"Guard(every=...) is a whole number, 1 or more, got {self.every!r}")
        if self.max_error is not None and not self.max_error > 0:
            raise ValueError(f"Guard(max_error=...) is above 0, got {self.max_error!r}")
        if self.scheme.traits.returns != "mean":
            raise ValueError(
                f"Guard({type(self.scheme).__name__}(...)): it does not give the average of "
                f"gradients, so there is nothing to compare with"
            )

    @property
    def traits(self) -> Traits:
        return self.scheme.traits._replace(rounds=self.scheme.traits.rounds + 1)

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        if bucket.step < self._largest(_UNTIL, bucket):
            if keeps_residual(self.scheme):
                pop_residual(bucket)
            return (yield from bucket.all_reduce())
        n = bucket.raw.numel()
        if (bucket.step + 1) % self.every or not n:
            return (yield from self.scheme.exchange(bucket))
        # Other entries at each measurement, the same on all ranks.
        size = min(_SAMPLE, n)
        generator = bucket.generator(f"{bucket.layout.names[0]}/guard")
        begin = int(torch.randint(n - size + 1, (), generator=generator, device="cpu"))
        part = slice(begin, begin + size)
        # Copied before the exchange, which may write the mean over the gradient; in float64, since
        # squares of float32 entries can leave the range of float32.
        gradient = bucket.gradient
        squares = torch.stack([gradient.double().square().sum(), self._residual_square(bucket)])
        exact = torch.cat([gradient[part].double(), squares])
        result = checked_result(self.scheme, (yield from self.scheme.exchange(bucket)))
        mean = result.mean.view(-1)
        if bucket.shards is not None:
            exact = torch.cat([exact, _less_own(exact[:size], begin, mean, bucket)])
        exact = yield AllReduce(exact)
        sample, squares, away = exact.split([size, 2, len(exact) - size - 2])
        if bucket.shards is None:
            away = mean[part].double() - sample
        error, sample_norm = float(away.norm()), float(sample.norm())
        # The same numbers on every rank, and so the same decision without a further message.
        norm, residual = (math.sqrt(value) for value in squares.tolist())
        if all(map(math.isfinite, (error, sample_norm, norm, residual))) and sample_norm and norm:
            self._judge(error / sample_norm, residual / norm, bucket)
        return result

    def _residual_square(self, bucket: Bucket) -> Tensor:
        """Returns the squared norm of the scheme's residual, in float64; 0 if it keeps none."""
        if not keeps_residual(self.scheme):
            return bucket.raw.new_zeros((), dtype=torch.float64)
        return bucket.read(RESIDUAL_SLOT).double().square().sum()

    def _judge(self, error: float, residual: float, bucket: Bucket) -> None:
        """Records both measures, and decides until which step to stay dense if one is too large."""
        reasons = []
        if self.max_error is not None and error > self.max_error:
            reasons.append(f"the error of the average is {error:.3g}, at most {self.max_error:.3g}")
        if residual > _MAX_RESIDUAL:
            reasons.append(
                f"the residual is {residual:.3g} times the gradient, at most {_MAX_RESIDUAL:.3g}"
            )
        looks = bucket.step // self.every
        for slot, name, value in ((_ERROR, "error", error), (_RESIDUAL, "residual", residual)):
            before = self._largest(slot, bucket)
            # The first three measurements only fill the average: residuals grow from zero.
            if looks >= 3 and before > 0 and value > _GROWTH * before:
                reasons.append(
                    f"the {name} is {value:.3g}, {value / before:.1f} times what it used to be"
                )
            average = value if not before else 0.8 * before + 0.2 * value
            self._write(slot, average, bucket)
        if not reasons:
            return
        self._write(_UNTIL, bucket.step + 1 + _REST, bucket)
        if bucket.rank == 0:
            warnings.warn(
                f"Guard, step {bucket.step}, bucket of {listed(bucket.layout.names)}: "
                f"{'; '.join(reasons)}. Averaging without compression for {_REST} steps",
                RuntimeWarning,
                stacklevel=2,
            )

    # Values are on the host: which exchange to run is decided before anything is launched, and a
    # value on a GPU would be waited for in every step. They are the same on every rank.

    def _largest(self, slot: Slot, bucket: Bucket) -> float:
        """Returns the largest value of the bucket's parameters."""
        layout, host = slot.layout(bucket.layout), torch.device("cpu")
        values = bucket.memory.read(slot.key, layout, device=host, dtype=torch.float64)
        return float(values.max()) if len(layout) else 0.0

    def _write(self, slot: Slot, value: float, bucket: Bucket) -> None:
        layout = slot.layout(bucket.layout)
        values = torch.full((len(layout),), float(value), dtype=torch.float64, device="cpu")
        bucket.memory.note(slot.key, layout, values)


def _less_own(sample: Tensor, begin: int, mean: Tensor, bucket: Bucket) -> Tensor:
    """Returns a gradient minus the part whose mean over ranks is the error of their mean.

    Each entry's mean is known to one rank, which subtracts it for all.

    Args:
        sample: of this rank's gradient, from ``begin`` on.
        mean: of this rank's shard.
    """
    first, last = bucket.own_slice.start, bucket.own_slice.stop
    low, high = max(first, begin), min(last, begin + len(sample))
    less = sample.clone()
    if low < high:
        less[low - begin : high - begin] -= bucket.world_size * mean[low - first : high - first]
    return less
