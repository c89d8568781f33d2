"""Describes calls of collectives with a scheme, as exchanges of the engine that runs hooks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.core.bucket import Bucket, Result, SchemeExchange
from commhooks.core.dense import Dense
from commhooks.core.layout import Layout
from commhooks.core.scheme import Scheme
from commhooks.core.shards import equal_shards
from commhooks.errors import RegistrationError
from commhooks.hook.engine import Engine
from ddp_core import AllGather, AllReduce, Exchange, ReduceScatter, event_after

__all__ = ["Call", "Handle", "Kind", "sums", "travels_coded", "write_into"]

Kind = Literal["all_reduce", "reduce_scatter", "all_gather"]
Run = Callable[[Bucket], SchemeExchange]
# What has no rounding of ours is committed as it is: nothing was kept of it.
_FINITE = torch.ones((), dtype=torch.bool, device="cpu")


class Handle(dist.Work):
    """Waits for one call that was made with ``async_op=True``, as torch's handles do.

    Args:
        future: of the result.
        device: of the result.
    """

    # A ``dist.Work``, since FSDP2 waits for nothing else.
    def __init__(self, future: torch.futures.Future[Any], device: torch.device) -> None:
        super().__init__()
        self._future, self._device = future, device
        self._happened: Callable[[], bool] | None = None

    def wait(self, timeout: Any = None) -> bool:
        """Waits until the result is there (on a GPU: makes the current stream wait), or raises.

        Args:
            timeout: has no effect: the collectives of the exchange have that of their group.
        """
        self._future.wait()
        return True

    def synchronize(self) -> None:
        """Does what :meth:`wait` does."""
        self.wait()

    def block_current_stream(self) -> None:
        """Does what :meth:`wait` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the call is over, on the device, too."""
        if self._device.type == "cpu" or not self._future.done():
            return self._future.done()
        if self._happened is None:  # the future is done when all is enqueued
            self._happened = event_after(self._future, self._device)
        return self._happened()

    def get_future(self) -> torch.futures.Future[Any]:
        """Returns the future of the tensor that has the result."""
        return self._future


@dataclass(frozen=True)
class Call:
    """Describes one call of a collective.

    Attributes:
        kind: the collective.
        given: what this rank puts in, any shape and strides.
        into: what takes the result; ``given`` itself for an all-reduce.
        total: the sum over ranks is asked for, and not the mean.
    """

    kind: Kind
    given: Tensor
    into: Tensor
    total: bool = False

    def check(self, world_size: int) -> None:
        """Raises unless the tensors fit each other and the collective."""
        call, (given, into) = f"commhooks.{self.kind}", (self.given, self.into)
        for tensor in (given, into):
            if not isinstance(tensor, Tensor):
                one = ", one output for all ranks" * (self.kind == "all_gather")
                raise TypeError(f"{call} takes tensors{one}, got {type(tensor).__name__}")
            if tensor.layout != torch.strided:
                raise TypeError(f"{call} takes dense tensors, got one of {tensor.layout}")
        many = {"all_reduce": (1, 1), "reduce_scatter": (1, world_size)}
        less, more = many.get(self.kind, (world_size, 1))
        if given.numel() * less != into.numel() * more:
            larger, smaller = ("input", "output") if more > less else ("output", "input")
            raise ValueError(
                f"{call}(output, input): {larger} needs {world_size} times the entries of "
                f"{smaller}, a part for each rank; got output {tuple(into.shape)} and input "
                f"{tuple(given.shape)}"
            )
        if (given.dtype, given.device) != (into.dtype, into.device):
            raise ValueError(
                f"{call}(output, input): both of one dtype on one device, got {into.dtype} on "
                f"{into.device} and {given.dtype} on {given.device}"
            )
        whole = not (given.is_floating_point() or given.is_complex())
        if whole and self.kind != "all_gather" and not self.total:
            raise ValueError(f"{call}(op=AVG): a mean of {given.dtype} is not whole; use SUM")

    def is_plain(self, scheme: Scheme) -> bool:
        """Whether the tensor travels as it is: integers, complex numbers, and all with "none".

        So do floating numbers of 8 bits, such as weights that were quantised before.
        """
        return not travels_coded(self.given) or type(scheme) is Dense

    def need(self, scheme: Scheme) -> None:
        """Raises RegistrationError unless a scheme can do what the call asks for."""
        if self.is_plain(scheme):
            return
        if self.kind == "all_gather" and not scheme.gathers:
            raise RegistrationError(
                f"commhooks.all_gather: {scheme} averages, and has no payload of a single rank's "
                f"tensor; int8, int4, fp8, mxfp8, eden, fp16, bf16, none and TwoPhase(codec) have"
            )
        if self.kind == "reduce_scatter" and not scheme.traits.shards:
            raise RegistrationError(
                f"commhooks.reduce_scatter: {scheme} averages whole tensors, of which every rank "
                f"would drop all but its part; use all_reduce, or int8, int4, fp8, mxfp8, eden, "
                f"onebit, fp16, bf16, none or TwoPhase(codec)"
            )
        if self.total and self.kind != "all_gather" and scheme.traits.returns != "mean":
            raise RegistrationError(
                f"commhooks.{self.kind}(op=SUM): {scheme} returns no mean of tensors "
                f"({scheme.traits.returns!r}), so there is no sum; op=AVG gives what it returns"
            )

    def exchange(self, engine: Engine, layout: Layout, number: int, *, agree: bool) -> Exchange:
        """Runs the call as an exchange of ``engine``, and returns ``into``."""
        exact, ranks, into = self.is_plain(engine.scheme), engine.world_size, _real(self.into)
        run: Run = engine.scheme.exchange
        # A view of one dimension may have gaps, which neither kernels nor Gloo know of.
        raw, output, shards = _real(self.given).reshape(-1).contiguous(), None, None
        if self.kind == "all_reduce":
            raw = raw.clone() if raw.is_inference() else raw  # it is reduced in place
        else:
            # A tensor of inference mode is written at the end only.
            fits = into.is_contiguous() and not into.is_inference()
            output = into.view(-1) if fits else raw.new_empty(into.numel())
        if self.kind == "reduce_scatter":
            shards = equal_shards(raw.numel(), ranks)
            raw = raw if exact else raw.clone()  # schemes may overwrite a gradient
        if exact:
            run = _unrounded(self.kind, self.total)
        elif output is not None and self.kind == "all_gather":
            parts = equal_shards(output.numel(), ranks)
            run = _gathering(engine.scheme, parts)
        elif self.total:
            run = _times(run, ranks)
        arrived = yield from engine.exchange(
            raw, layout, number, shards=shards, output=output, run=run, agree=agree and not exact
        )
        if arrived.data_ptr() != into.data_ptr():
            write_into(into, arrived.view(into.shape))
        return self.into


def write_into(into: Tensor, values: Tensor) -> None:
    """Writes values to a tensor, which may be one of inference mode."""
    # Threads of drivers are not in the mode of the caller.
    with torch.inference_mode(into.is_inference()):
        into.copy_(values)


def sums(kind: Kind, op: Any) -> bool:
    """Whether an operation is SUM; raises ValueError unless it is SUM or AVG."""
    if op == dist.ReduceOp.SUM:
        return True
    if op == dist.ReduceOp.AVG:
        return False
    raise ValueError(
        f"commhooks.{kind}(op=...) is ReduceOp.SUM or ReduceOp.AVG, got {op}: schemes average; "
        f"torch.distributed has the other operations"
    )


def travels_coded(tensor: Tensor) -> bool:
    """Whether a scheme codes a tensor: floating numbers of more than 8 bits."""
    return tensor.is_floating_point() and tensor.itemsize > 1


def _real(tensor: Tensor) -> Tensor:
    """Returns a tensor without its history, complex numbers as pairs."""
    plain = tensor.detach()
    return torch.view_as_real(plain) if plain.is_complex() else plain


def _unrounded(kind: Kind, total: bool) -> Run:
    """Returns an exchange without a scheme, of the same bits as torch's own collective.

    The mean of an all-reduce has those of DistributedDataParallel, which divides before the sum.
    """

    def run(bucket: Bucket) -> SchemeExchange:
        op: Literal["sum", "mean"] = "sum" if total else "mean"
        if kind == "all_gather":
            arrived = yield AllGather(bucket.raw)
        elif kind == "reduce_scatter":
            arrived = yield ReduceScatter(bucket.raw.view(bucket.world_size, -1), op)
        else:
            arrived = yield AllReduce(bucket.raw, op)
        return Result(arrived.view(-1), finite=_FINITE)

    return run


def _gathering(scheme: Scheme, parts: Any) -> Run:
    return lambda bucket: scheme.all_gather(bucket, parts)


def _times(run: Run, ranks: int) -> Run:
    """Makes a sum of a mean."""

    def total(bucket: Bucket) -> SchemeExchange:
        result = yield from run(bucket)
        # In place in the result's own memory only: a scheme may keep what it returns.
        own = result.mean.data_ptr() == bucket.output.data_ptr()
        mean = result.mean.mul_(ranks) if own else result.mean * ranks
        return result._replace(mean=mean)

    return total
