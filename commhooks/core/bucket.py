"""``Bucket``: what a scheme is given, and ``Result``: what it returns."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from commhooks.core.layout import Layout
from commhooks.core.memory import Memory
from commhooks.core.slot import Slot
from commhooks.core.step_info import StepInfo, number_of
from commhooks.errors import SchemeError
from commhooks.kernels import RandomBits
from ddp_core import AllReduce, Collective

__all__ = ["Bucket", "Result", "SchemeExchange", "nan_unless"]


class Result(NamedTuple):
    """What one exchange of a bucket gave.

    Attributes:
        mean: flat averaged gradient, the same bits on every rank.
        sent: what this rank's share decoded to, flat; the mean of it over ranks is ``mean``.
            None: everything was sent.
        unsent: ``gradient - sent``, where the scheme computed it cheaper than by subtracting.
        finite: one bool, the same on every rank; None where the scheme did not look.
    """

    mean: Tensor
    sent: Tensor | None = None
    unsent: Tensor | None = None
    finite: Tensor | None = None


SchemeExchange = Generator[Collective, Tensor, Result]


_ATTRIBUTES = {"raw", "output", "residual", "unsent", "layout", "memory", "step", "seed"}
_ATTRIBUTES |= {"rank", "world_size"}


class Bucket(StepInfo):
    """One bucket of one step on one rank: gradient, residual, memory, ranks, random bits.

    A scheme that reads ``gradient`` needs nothing else: error feedback has been added to it. A
    scheme whose kernels add the residual in the pass that encodes reads ``raw`` and ``residual``,
    writes ``unsent``, and returns it in its result.

    Attributes:
        raw: flat gradient of this rank alone. May be overwritten where ``unsent`` is None, or where
            it is ``output``.
        output: flat tensor in the gradient's dtype that may take the mean; may be ``raw`` itself.
        residual: float32, or float64 if the gradient is, flat: what earlier steps have not sent.
            None: nothing.
        unsent: like ``residual``: the place for what this step does not send. None: there is no
            feedback around the scheme, so its result may leave out ``sent`` and ``unsent``.
        memory, step, rank, world_size, seed: see :class:`commhooks.core.StepInfo`.

    Args:
        layout: parameter names and shapes in the flat gradient; a function is called when they are
            first asked for.
        output: ``raw`` by default.

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
    ) -> None:
        super().__init__(memory=memory, step=step, rank=rank, world_size=world_size, seed=seed)
        self.raw, self.residual, self.unsent = raw, residual, unsent
        self.output = raw if output is None else output
        self._layout = layout
        self._sum: list[Tensor] = []  # gradient and residual together, once they were asked for
        self._check()

    def _check(self) -> None:
        if self.residual is not None and self.unsent is None:
            raise ValueError("Bucket(residual=...) needs unsent=..., a place for the new residual")

    def replace(self, **changes: Any) -> Bucket:
        """The same bucket with other attributes.

        A wrapper that gives its scheme another ``raw``, ``residual`` or ``unsent`` says itself what
        was not sent, see :meth:`completed`.
        """
        unknown = changes.keys() - _ATTRIBUTES
        if unknown:
            raise TypeError(
                f"Bucket.replace: no attribute {', '.join(sorted(unknown))}; there are "
                f"{', '.join(sorted(_ATTRIBUTES))}"
            )
        other = copy.copy(self)
        if changes.keys() & {"raw", "residual", "unsent"}:
            other._sum = []
        if "layout" in changes:
            other._layout = changes.pop("layout")
        for name, value in changes.items():
            setattr(other, name, value)
        other._check()
        return other

    # ---- what is to be averaged

    @property
    def gradient(self) -> Tensor:
        """Flat gradient, the residual included.

        Where there is a residual, reading this writes the sum into ``unsent``: it is valid until
        something else is written there.
        """
        if self.residual is None:
            return self.raw
        if not self._sum:
            self._sum.append(torch.add(self.raw, self.residual, out=self.unsent))
        return self._sum[0]

    @property
    def layout(self) -> Layout:
        """Parameter names and shapes in the flat gradient."""
        if not isinstance(self._layout, Layout):
            self._layout = self._layout()
        return self._layout

    def read(self, slot: Slot) -> Tensor:
        """The committed values of ``slot``, flat, one after another; do not write into the tensor.

        A parameter without a value begins with the slot's initial one.
        """
        dtype = slot.dtype or self.wide_dtype
        flat = self.memory.read(
            *(slot.key, slot.layout(self.layout)),
            device=self.raw.device,
            dtype=dtype,
            initial=lambda name, shape: slot.initial(name, shape, self),
        )
        return flat.to(dtype)

    def write(self, slot: Slot, values: Tensor) -> None:
        """Stages new values of ``slot``; they count from the next step on, if this one is good."""
        if values.device.type != "cpu":
            self.read(slot)  # a bad step, which only the device knows of, goes back to these
        self.memory.write(slot.key, slot.layout(self.layout), values.view(-1))

    def scratch(self, slot: Slot, like: Tensor) -> Tensor:
        """A flat tensor for new values of ``slot``; its contents are undefined."""
        return self.memory.scratch(slot.key, slot.layout(self.layout), like)

    @property
    def wide_dtype(self) -> torch.dtype:
        """The dtype of sums of gradients: float32, or float64 if the gradient is."""
        return torch.promote_types(self.raw.dtype, torch.float32)

    # ---- random bits

    def with_draws(self, purpose: str) -> Bucket:
        """The same bucket with random bits of its own."""
        return self.replace(seed=number_of(f"{self.seed}/{purpose}") >> 1)

    def random(self, purpose: str, *, shared: bool) -> RandomBits:
        """Random bits for kernels, on the gradient's device: of this bucket, step and purpose.

        Args:
            purpose: tells apart streams of one bucket.
            shared: the same on every rank.
        """
        text = f"{self.layout.names[0]}/{purpose}/{'shared' if shared else self.rank}"
        step = torch.full((), self.step, dtype=torch.int64, device=self.raw.device)
        return RandomBits(self.seed, step, number=number_of(text) >> 33)

    # ---- what several schemes do

    def all_reduce(self) -> SchemeExchange:
        """Averages the bucket by one all-reduce, in the dtype of ``raw``."""
        gradient, dtype = self.gradient, self.raw.dtype
        payload = gradient.to(dtype, copy=self.unsent is not None)
        # What is kept is float32: feedback gets what rounding the sum to 16 bits has lost.
        sent = None if gradient.dtype == dtype else payload.clone()
        request = AllReduce(payload)
        mean = yield request
        if mean.dtype != self.output.dtype:
            mean = self.output.copy_(mean)
        result = Result(mean, sent=sent if request.sent is None else request.sent)
        return result if self.unsent is None else self.completed(result)

    def completed(self, result: Result) -> Result:
        """Completes a result: ``unsent`` is computed from ``sent`` where the scheme left it out."""
        mean, sent, unsent, finite = result
        assert self.unsent is not None, "nobody asks for what is not sent"
        if mean.data_ptr() == self.unsent.data_ptr():  # averaged where the gradient was
            mean = mean.clone()
        if unsent is None:
            if self.residual is not None and not self._sum:
                raise SchemeError(
                    "a scheme that reads bucket.raw adds bucket.residual itself and returns "
                    "Result(mean, unsent=bucket.unsent); this one returned no unsent, so the "
                    "residual would be lost. Read bucket.gradient, which is the sum"
                )
            if sent is None:
                unsent = self.unsent.zero_()
            else:
                unsent = torch.sub(self.gradient, sent, out=self.unsent)
        return Result(mean, sent, unsent, finite)

    def in_float32(self) -> Bucket:
        """Returns the bucket that kernels take: a float64 gradient is rounded to float32."""
        if self.raw.dtype != torch.float64:
            return self
        raw = self.gradient.float()
        unsent = None if self.unsent is None else torch.empty_like(raw)
        return self.replace(raw=raw, residual=None, unsent=unsent, output=torch.empty_like(raw))

    def result_of(self, inside: Bucket) -> Result:
        """The result, once ``inside`` (:meth:`in_float32`) has its output and what is not sent."""
        if inside is not self:
            if self.unsent is not None and inside.unsent is not None:
                # Feedback gets what rounding to float32 has lost, too.
                torch.sub(self.gradient, inside.raw, out=self.unsent).add_(inside.unsent)
            self.output.copy_(inside.output)
        return Result(self.output, unsent=self.unsent)


def nan_unless(finite: Tensor) -> Tensor:
    """0 if finite, else NaN: added to a factor, it makes every entry of the product NaN."""
    return torch.where(finite, 0.0, float("nan"))
