"""Schemes around a scheme: feedback, cast, delayed start, choice per parameter, coalescing."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from commhooks._memory import Layout
from commhooks._scheme import Context, Exchanged, Scheme, SchemeExchange, children
from commhooks.kernels import all_finite
from commhooks.schemes.dense import Dense
from ddp_core import AllReduce, Collective

__all__ = [
    "Cast",
    "Coalesced",
    "DelayedStart",
    "ErrorFeedback",
    "FlushResidual",
    "PerParameter",
    "Rule",
]

RESIDUAL = "residual"


def _need_scheme(owner: object, scheme: object) -> None:
    if not isinstance(scheme, Scheme):
        name = type(owner).__name__
        raise TypeError(
            f"{name}(scheme) wraps a Scheme, got {scheme!r}: "
            f"use commhooks.make(name, ...) for a name"
        )


class Wrapper(Scheme):
    """A scheme around one scheme; takes over its flags."""

    scheme: Scheme

    def __post_init__(self) -> None:
        _need_scheme(self, self.scheme)

    @property
    def rounds(self) -> int:  # type: ignore[override]
        return self.scheme.rounds

    @property
    def biased(self) -> bool:  # type: ignore[override]
        return self.scheme.biased

    @property
    def linear(self) -> bool:  # type: ignore[override]
        return self.scheme.linear

    @property
    def stateful(self) -> bool:  # type: ignore[override]
        return self.scheme.stateful

    @property
    def averages(self) -> bool:  # type: ignore[override]
        return self.scheme.averages

    @property
    def coalesce(self) -> bool:  # type: ignore[override]
        return self.scheme.coalesce

    def memory_error(self, key: str, value: Tensor, parameter: torch.Size) -> str | None:
        return self.scheme.memory_error(key, value, parameter)

    def initial_memory(self, name: str, shape: torch.Size, ctx: Context) -> dict[str, Tensor]:
        return self.scheme.initial_memory(name, shape, ctx)


@dataclass(frozen=True)
class ErrorFeedback(Wrapper):
    """Adds to each gradient what earlier steps did not send: ``c = g + e; e = c - sent(c)``.

    The residual ``e`` is kept per rank and parameter in float32 (float64 for float64 gradients).
    A step in which any gradient of any rank is not finite leaves it as it was.
    On the CPU two gradient-sized buffers are kept, one of them the next step's scratch.

    Args:
        scheme: what to correct; any scheme, though only a biased one needs it.

    Example:
        >>> hook = register(ddp_model, ErrorFeedback(PowerSGD(rank=4)))

    Reference: Karimireddy et al., Error Feedback Fixes SignSGD, 2019.
    """

    scheme: Scheme

    biased = False
    stateful = True

    def exchange(self, grad: Tensor, ctx: Context) -> SchemeExchange:
        memory, layout = ctx.memory, ctx.layout
        dtype = torch.promote_types(grad.dtype, torch.float32)
        residual = memory.read(RESIDUAL, layout, device=grad.device, dtype=dtype)
        corrected = memory.scratch(RESIDUAL, layout, like=residual)
        torch.add(grad, residual, out=corrected)
        result = yield from self.scheme.exchange(corrected, ctx.replace(keep_unsent=True))
        unsent = result.unsent
        if result.mean.data_ptr() == corrected.data_ptr():  # the buffer becomes the residual
            result = result._replace(mean=corrected.clone())
        if unsent is None:
            unsent = corrected.zero_() if result.sent is None else corrected.sub_(result.sent)
        memory.write(RESIDUAL, layout, unsent)
        return result

    def initial_memory(self, name: str, shape: torch.Size, ctx: Context) -> dict[str, Tensor]:
        dtype = torch.promote_types(ctx.output.dtype, torch.float32)
        residual = torch.zeros(shape, dtype=dtype)
        return {**self.scheme.initial_memory(name, shape, ctx), RESIDUAL: residual}

    def memory_error(self, key: str, value: Tensor, parameter: torch.Size) -> str | None:
        if key == RESIDUAL:
            return _residual_error(value, parameter)
        return self.scheme.memory_error(key, value, parameter)


def _residual_error(value: Tensor, parameter: torch.Size) -> str | None:
    if not value.is_floating_point():
        return f"is of {value.dtype}, a residual is floating point"
    if value.shape != parameter:
        return f"has shape {tuple(value.shape)}, the parameter has {tuple(parameter)}"
    return None


@dataclass(frozen=True)
class FlushResidual(Wrapper):
    """Adds the residual that an earlier scheme left to the next gradient, once, and forgets it.

    ``HookState.switch`` puts it around a scheme that keeps no residual of its own.
    """

    scheme: Scheme

    stateful = True

    def exchange(self, grad: Tensor, ctx: Context) -> SchemeExchange:
        memory, layout = ctx.memory, ctx.layout
        if memory.has(RESIDUAL) and any(
            memory.get(RESIDUAL, name) is not None for name in layout.names
        ):
            dtype = torch.promote_types(grad.dtype, torch.float32)
            residual = memory.read(RESIDUAL, layout, device=grad.device, dtype=dtype)
            grad.add_(residual.to(grad.dtype))
            memory.write(RESIDUAL, layout, None)
        return (yield from self.scheme.exchange(grad, ctx))

    def memory_error(self, key: str, value: Tensor, parameter: torch.Size) -> str | None:
        if key == RESIDUAL:
            return _residual_error(value, parameter)
        return self.scheme.memory_error(key, value, parameter)


@dataclass(frozen=True)
class Cast(Wrapper):
    """Sends the floating payloads of a scheme in 16 bits; the scheme itself computes as before.

    The mean divides before the cast, so a sum over many ranks does not overflow. A value that
    does overflow arrives as infinity on every rank, which a loss scaler relies on; the first time,
    a warning says so.

    Args:
        scheme: whose payloads to cast.
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

    def exchange(self, grad: Tensor, ctx: Context) -> SchemeExchange:
        inner = self.scheme.exchange(grad, ctx)
        keep_sent = ctx.keep_unsent or keeps_residual(self.scheme)
        try:
            request = next(inner)
            while True:
                tensor = request.tensor
                narrow, scale = request, 1.0
                passes = tensor.dtype == self.dtype or not tensor.is_floating_point()
                if not passes:
                    narrow, scale = self._narrow(request, ctx.world_size)
                    if keep_sent:
                        request.sent = narrow.tensor.to(tensor.dtype).mul_(scale)
                try:
                    arrived = yield narrow
                except Exception as error:  # a collective failed: the scheme's to see
                    request = inner.throw(error)
                    continue
                if passes:
                    request = inner.send(arrived)
                    continue
                if keep_sent and narrow.sent is not None:  # rounded once more by a cast outside
                    request.sent = narrow.sent.to(tensor.dtype).mul_(scale)
                wide = _widen(arrived, tensor, 1.0 if request_is_mean(request) else scale)
                if self.dtype == torch.float16:
                    _warn_of_overflow(arrived)
                request = inner.send(wide)
        except StopIteration as stop:
            result: Exchanged = stop.value
            return result

    def _narrow(self, request: Collective, world_size: int) -> tuple[Collective, float]:
        """The cast request, and what one rank's share in it has to be multiplied by."""
        sums = isinstance(request, AllReduce) and request.op in ("mean", "sum")
        scale = float(world_size) if sums else 1.0
        # In place, then cast: one pass more than mul(..., out=small), which on the CPU takes four
        # times as long. An all-reduce overwrites its tensor anyway.
        small = (request.tensor.mul_(1.0 / scale) if sums else request.tensor).to(self.dtype)
        return (AllReduce(small, "sum") if sums else request.like(small)), scale


def request_is_mean(request: Collective) -> bool:
    """Whether the request asks for the mean over ranks."""
    return isinstance(request, AllReduce) and request.op == "mean"


def _widen(arrived: Tensor, like: Tensor, scale: float) -> Tensor:
    """The result in the scheme's own dtype; in the request's own memory where it has the shape."""
    wide = like.copy_(arrived) if arrived.shape == like.shape else arrived.to(like.dtype)
    return wide if scale == 1.0 else wide.mul_(scale)


_warned_of_overflow = False


def _warn_of_overflow(arrived: Tensor) -> None:
    """Warns once when float16 payloads arrive as infinity; never waits for a GPU."""
    global _warned_of_overflow
    if _warned_of_overflow or arrived.device.type != "cpu" or not arrived.numel():
        return
    if not all_finite(arrived):
        _warned_of_overflow = True
        warnings.warn(
            "a float16 payload is not finite: the gradient was not, or it overflowed 65504 in the "
            "cast. It arrives as it is on every rank, so that a loss scaler can skip the step; "
            "use bf16 if this is not a loss scaler at work",
            RuntimeWarning,
            stacklevel=2,
        )


@dataclass(frozen=True)
class DelayedStart(Wrapper):
    """Runs ``before`` until step ``start_step``, then ``scheme``.

    Early gradients change fast and compress badly; a tenth of the training is a usual start.

    Args:
        scheme: runs from step ``start_step`` on (steps count from 0).
        start_step: number of dense steps first.
        before: what runs until then; the dense all-reduce.

    Reference: Vogels et al., PowerSGD, 2019 (warm-up).
    """

    scheme: Scheme
    start_step: int
    before: Scheme = field(default_factory=Dense)

    def __post_init__(self) -> None:
        super().__post_init__()
        _need_scheme(self, self.before)
        if not isinstance(self.start_step, int) or self.start_step < 0:
            raise ValueError(
                f"DelayedStart(start_step=...) is a number of steps, 0 or more, "
                f"got {self.start_step!r}"
            )

    @property
    def rounds(self) -> int:  # type: ignore[override]
        return max(self.scheme.rounds, self.before.rounds)

    @property
    def stateful(self) -> bool:  # type: ignore[override]
        return self.scheme.stateful or self.before.stateful

    def memory_error(self, key: str, value: Tensor, parameter: torch.Size) -> str | None:
        return _any_error((self.scheme, self.before), key, value, parameter)

    def exchange(self, grad: Tensor, ctx: Context) -> SchemeExchange:
        scheme = self.before if ctx.step < self.start_step else self.scheme
        if scheme is self.scheme and keeps_residual(self.before):
            scheme = _flushing(scheme)
        return (yield from scheme.exchange(grad, ctx))


@dataclass(frozen=True)
class Coalesced(Wrapper):
    """Exchanges all buckets of a step at once, when the last one is ready.

    Fewer and larger collectives, no overlap with the backward pass: for slow links with a long
    round trip, and for schemes whose payloads are tiny.
    """

    scheme: Scheme

    coalesce = True

    def exchange(self, grad: Tensor, ctx: Context) -> SchemeExchange:
        return (yield from self.scheme.exchange(grad, ctx))


@dataclass(frozen=True)
class Rule:
    """Which parameters a scheme is for; all conditions given must hold.

    Args:
        scheme: what to do with them.
        name: shell-style pattern of the parameter's name, e.g. ``"*.bias"`` or ``"embed*"``.
        min_dim, max_dim: bounds on the number of dimensions.
        min_numel: at least that many entries.
        dtype: the gradient's dtype.
    """

    scheme: Scheme
    name: str = "*"
    min_dim: int = 0
    max_dim: int = 1 << 30
    min_numel: int = 0
    dtype: torch.dtype | None = None

    def matches(self, name: str, shape: torch.Size, dtype: torch.dtype) -> bool:
        """Whether a parameter falls under this rule."""
        return (
            fnmatch.fnmatchcase(name, self.name)
            and self.min_dim <= len(shape) <= self.max_dim
            and shape.numel() >= self.min_numel
            and self.dtype in (None, dtype)
        )


@dataclass(frozen=True)
class PerParameter(Scheme):
    """Chooses a scheme for each parameter: the first rule that matches, else ``default``.

    The chosen schemes run side by side; all-reduces of the same round and dtype share a message.

    Args:
        rules: in order of precedence.
        default: for parameters under no rule.

    Example:
        >>> PerParameter([Rule(Dense(), name="*embed*"), Rule(Dense(), max_dim=1)],
        ...              default=ErrorFeedback(PowerSGD(rank=4)))
    """

    rules: Sequence[Rule]
    default: Scheme

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(self.rules))
        for rule in self.rules:
            if not isinstance(rule, Rule):
                raise TypeError(f"PerParameter(rules=...) holds Rule objects, got {rule!r}")
            _need_scheme(rule, rule.scheme)
        _need_scheme(self, self.default)

    @property
    def schemes(self) -> list[Scheme]:
        """All schemes it chooses from, the default last."""
        return [*(rule.scheme for rule in self.rules), self.default]

    @property
    def rounds(self) -> int:  # type: ignore[override]
        return sum(scheme.rounds for scheme in self.schemes)

    @property
    def biased(self) -> bool:  # type: ignore[override]
        return any(scheme.biased for scheme in self.schemes)

    @property
    def stateful(self) -> bool:  # type: ignore[override]
        return any(scheme.stateful for scheme in self.schemes)

    @property
    def coalesce(self) -> bool:  # type: ignore[override]
        return any(scheme.coalesce for scheme in self.schemes)

    def memory_error(self, key: str, value: Tensor, parameter: torch.Size) -> str | None:
        return _any_error(self.schemes, key, value, parameter)

    def initial_memory(self, name: str, shape: torch.Size, ctx: Context) -> dict[str, Tensor]:
        scheme = self.schemes[self.choose(name, shape, ctx.output.dtype)]
        return scheme.initial_memory(name, shape, ctx)

    def choose(self, name: str, shape: torch.Size, dtype: torch.dtype) -> int:
        """Position in ``schemes`` of the scheme for a parameter."""
        for position, rule in enumerate(self.rules):
            if rule.matches(name, shape, dtype):
                return position
        return len(self.rules)

    def exchange(self, grad: Tensor, ctx: Context) -> SchemeExchange:
        layout = ctx.layout
        chosen: dict[int, list[int]] = {}
        for position, (name, shape) in enumerate(zip(layout.names, layout.shapes, strict=True)):
            which = self.choose(name, shape, ctx.output.dtype)
            chosen.setdefault(which, []).append(position)
        schemes = self.schemes
        if keeps_residual(self):  # a residual of another scheme must not stay behind
            schemes = [_flushing(scheme) for scheme in schemes]
        parts = [_Part(schemes[which], grad, ctx, chosen[which]) for which in sorted(chosen)]
        if len(parts) == 1:
            return (yield from parts[0].scheme.exchange(grad, ctx))
        yield from _side_by_side(parts)
        for part in parts:
            part.put_back(ctx.output)
        flags = [part.result.finite for part in parts if part.result.finite is not None]
        finite = torch.stack(flags).all() if len(flags) == len(parts) else None
        sent = None
        if ctx.keep_unsent:
            sent = torch.empty_like(grad)
            for part in parts:
                part.put_sent(sent)
        return Exchanged(ctx.output, sent=sent, finite=finite)


class _Part:
    """The parameters of a bucket that share a scheme, gathered into a flat tensor of their own."""

    def __init__(self, scheme: Scheme, grad: Tensor, ctx: Context, positions: list[int]) -> None:
        whole = ctx.layout
        self.scheme = scheme
        self.layout: Layout = whole.pick(positions)
        self.spans = [(whole.offsets[i], whole.offsets[i + 1]) for i in positions]
        self.grad = torch.cat([grad[begin:end] for begin, end in self.spans])
        self.before = self.grad.clone() if ctx.keep_unsent else self.grad
        inside = ctx.replace(
            output=torch.empty_like(self.grad, dtype=ctx.output.dtype),
            find_layout=lambda: self.layout,
        )
        self.exchange = scheme.exchange(self.grad, inside)
        self.request: Collective | None = None
        self.result = Exchanged(self.grad)

    def advance(self, answer: Tensor | None) -> None:
        """Runs to the next request, or to the end."""
        try:
            self.request = next(self.exchange) if answer is None else self.exchange.send(answer)
        except StopIteration as stop:
            self.request, self.result = None, stop.value

    def put_back(self, output: Tensor) -> None:
        """Writes the mean to where the parameters are in the bucket."""
        for (begin, end), piece in zip(
            self.spans, self.result.mean.split(self.layout.sizes), strict=True
        ):
            output[begin:end].copy_(piece)

    def put_sent(self, sent: Tensor) -> None:
        """Writes this rank's share to where the parameters are in the bucket."""
        share = self.result.sent if self.result.sent is not None else self.before
        if self.result.unsent is not None:
            share = self.before - self.result.unsent
        for (begin, end), piece in zip(self.spans, share.split(self.layout.sizes), strict=True):
            sent[begin:end].copy_(piece)


def _side_by_side(parts: list[_Part]) -> SchemeExchange:
    """Runs the exchanges of all parts together; equal all-reduces travel in one message."""
    for part in parts:
        part.advance(None)
    while waiting := [part for part in parts if part.request is not None]:
        first = waiting[0].request
        assert first is not None
        together = [part for part in waiting if _mergeable(first, part.request)] or waiting[:1]
        if len(together) == 1:
            together[0].advance((yield first))
            continue
        requests = [part.request for part in together if part.request is not None]
        merged = first.like(torch.cat([request.tensor.view(-1) for request in requests]))
        arrived = yield merged
        sizes = [request.tensor.numel() for request in requests]
        shares = merged.sent.split(sizes) if merged.sent is not None else [None] * len(sizes)
        for part, request, piece, share in zip(
            together, requests, arrived.split(sizes), shares, strict=True
        ):
            request.sent = None if share is None else share.view(request.tensor.shape)
            part.advance(request.tensor.copy_(piece.view(request.tensor.shape)))
    return Exchanged(parts[0].grad)


def _mergeable(first: Collective, other: Collective | None) -> bool:
    return (
        isinstance(first, AllReduce)
        and isinstance(other, AllReduce)
        and (first.op, first.tensor.dtype) == (other.op, other.tensor.dtype)
    )


def keeps_residual(scheme: Scheme) -> bool:
    """Whether the scheme has error feedback somewhere inside."""
    inside = scheme.schemes if isinstance(scheme, PerParameter) else children(scheme)
    return isinstance(scheme, ErrorFeedback) or any(map(keeps_residual, inside))


def _flushing(scheme: Scheme) -> Scheme:
    """``scheme``, or around it what adds a residual that it would leave where it is."""
    return FlushResidual(scheme) if scheme.averages and not keeps_residual(scheme) else scheme


def _any_error(
    schemes: Sequence[Scheme], key: str, value: Tensor, parameter: torch.Size
) -> str | None:
    """None if the value fits one of the schemes, else what the first one that knows it says."""
    errors = [scheme.memory_error(key, value, parameter) for scheme in schemes]
    known = [error for error in errors if error != "unknown"]
    return None if None in known else (known[0] if known else "unknown")
