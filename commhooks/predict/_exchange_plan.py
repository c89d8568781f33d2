"""Traces what a scheme sends and computes for a bucket, without data or ranks."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from commhooks._torch import UNSAFE_VIEW, TorchDispatchMode
from commhooks.core._layout import Layout
from commhooks.core._memory import Initial, Memory
from commhooks.core._scheme import Scheme
from commhooks.core._settings import shown
from commhooks.errors import Error
from commhooks.hook._engine import Engine
from ddp_core import AllGather, AllToAll, Collective, as_request

__all__ = [
    "STEADY_STEP",
    "ExchangePlan",
    "Message",
    "PredictionError",
    "Work",
    "meta_result",
    "trace_exchange",
]

# Steps of schedules, warm-ups and dense starts are over by then. Even, as a run's first step is.
STEADY_STEP = 10**9


class Message(NamedTuple):
    """Describes one collective of an exchange.

    Attributes:
        collective: "all_reduce", "all_gather" or "all_to_all".
        nbytes: bytes that each rank passes to the collective.
        wire_nbytes: bytes that each rank sends in it, by the formula of the collective.
        ranks: the ranks that take part, from the point of view of rank 0. None: all.
    """

    collective: str
    nbytes: int
    wire_nbytes: float
    ranks: tuple[int, ...] | None = None


class Work(NamedTuple):
    """Describes the computations between two collectives, or during one.

    Attributes:
        nbytes: bytes that all operations read and write.
        calls: number of operations; on a GPU each is one launch, at least.
    """

    nbytes: int
    calls: int


@dataclass(frozen=True)
class ExchangePlan:
    """Describes the exchange of one bucket by one rank.

    Attributes:
        messages: the collectives of the exchange, in order.
        work: computations, in order: before the first message, while it travels, between it and
            the next one, and so on: twice as many as ``messages``, and one more.
    """

    messages: tuple[Message, ...]
    work: tuple[Work, ...]


@lru_cache(maxsize=16384)
def trace_exchange(scheme: Scheme, shapes: tuple[torch.Size, ...], world_size: int) -> ExchangePlan:
    """Returns what rank 0 sends and computes for a bucket late in training.

    The scheme itself runs, on tensors without data (PyTorch's "meta" device): payloads, rounds and
    computations are those of a real run, also for a scheme that was written a minute ago.

    Args:
        scheme: the scheme, wrappers included.
        shapes: of the bucket's parameters, float32.
        world_size: number of ranks.

    Raises:
        PredictionError: the scheme reads values of the gradient, and so cannot run without data.

    Example:
        >>> trace_exchange(make("none"), (torch.Size([1000]),), 8).messages
        (Message(collective='all_reduce', nbytes=4000, wire_nbytes=7000.0, ranks=None),)
    """
    layout = Layout([f"p{i}" for i in range(len(shapes))], shapes)
    engine = Engine(scheme, rank=0, world_size=world_size)
    engine.memory = _Shapes()
    engine.scheme = scheme  # declares what that memory keeps
    counter = _Counter()
    with _undisturbed():
        engine.step = STEADY_STEP
        _run(engine, layout, None)  # makes what is kept: residuals, factors, tables
        engine.step = STEADY_STEP + 2
        return ExchangePlan(tuple(_run(engine, layout, counter)), tuple(counter.work))


class PredictionError(Error, RuntimeError):
    """Reports that a prediction is not possible; the message says why."""


class _Shapes(Memory):
    """Keeps tensors without data: initial values, as large as the model, are not computed."""

    def read(
        self,
        key: str,
        layout: Layout,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        initial: Initial | None = None,
    ) -> Tensor:
        return super().read(key, layout, device=device, dtype=dtype)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Limits torch to one thread and disables garbage collection inside the ``with`` block.

    The few operations on data here are too small for more threads. A plan for thousands of ranks
    makes as many small objects, which stay; looking through them again and again would take half
    of the time.
    """
    threads, collects = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(1)
    gc.disable()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if collects:
            gc.enable()


class _Counter(TorchDispatchMode):
    """Counts the bytes and calls of all operations, separately for each part of an exchange."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here. By default torch imports its compiler at the first operation,
        # which takes a second.
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work: list[Work] = []
        self._nbytes = self._calls = 0

    def end_part(self) -> None:
        """Ends a part: at a collective, before its result, or at the end of the exchange."""
        self.work.append(Work(self._nbytes, self._calls))
        self._nbytes = self._calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view or func.overloadpacket in _FREE:
            return result
        returned = result if isinstance(result, tuple | list) else (result,)
        seen = {
            id(tensor): tensor
            for tensor in (*_tensors(args), *_tensors(returned))
            if tensor.is_meta
        }
        if seen:
            self._calls += 1
            if func.name() != "commhooks::restore":  # after a good step it reads a flag
                self._nbytes += sum(
                    tensor.numel() * tensor.element_size() for tensor in seen.values()
                )
        return result


_ATEN = torch.ops.aten
# Operations that only allocate, or describe memory.
_FREE = {_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.detach}
_FREE |= {_ATEN.new_empty_strided, _ATEN.alias, UNSAFE_VIEW, torch.ops.prim.device}


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    tensors = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += _tensors(value)
    return tensors


def _run(engine: Engine, layout: Layout, counter: _Counter | None) -> list[Message]:
    messages = []
    gradient = torch.empty(layout.numel, dtype=torch.float32, device="meta")
    engine.begin_bucket(0, is_last=True)
    exchange = engine.exchange(gradient, layout)
    try:
        with counter or nullcontext():
            request = as_request(next(exchange))
            while True:
                if counter:
                    counter.end_part()
                messages.append(_message(request, engine.world_size))
                request.run_overlap()
                if counter:
                    counter.end_part()
                request = as_request(exchange.send(meta_result(request, engine.world_size)))
    except StopIteration:
        if counter:
            counter.end_part()
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error):
            raise
        raise PredictionError(
            f"predicting {shown(engine.scheme)}: its exchange reads values of the gradient on the "
            f"host, so that what it sends is not known beforehand: {error}"
        ) from error
    return messages


def _message(request: Collective, world_size: int) -> Message:
    ranks = getattr(request, "ranks", None)
    part = None if ranks is None else tuple(ranks)
    return Message(request.name, request.payload_nbytes, request.wire_nbytes(world_size), part)


def meta_result(request: Collective, world_size: int) -> Tensor:
    """Returns a tensor of the shape of a collective's result."""
    tensor = request.tensor
    if not isinstance(request, AllGather | AllToAll):
        return tensor
    size = world_size if request.ranks is None else len(request.ranks)
    shape = (size, *tensor.shape) if isinstance(request, AllGather) else tuple(tensor.shape)
    return tensor.new_empty(shape)
