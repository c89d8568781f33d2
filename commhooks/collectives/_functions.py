"""Defines ``Collectives``, torch's collectives with compression, and functions of them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch import Tensor

from commhooks.collectives._calls import CollectiveCall, CollectiveState, Handle, is_sum_op
from commhooks.core._scheme import Scheme, slots_of
from commhooks.errors import RegistrationError
from commhooks.hook._target import check_process_group
from commhooks.wrappers._make import describe, make
from ddp_core._torch import dynamo_disable

__all__ = [
    "Collectives",
    "all_gather",
    "all_reduce",
    "close_idle",
    "collectives_of",
    "reduce_scatter",
]


SUM = dist.ReduceOp.SUM


class Collectives(CollectiveState):
    """Exchanges tensors by a scheme as ``torch.distributed`` does, and keeps the scheme's memory.

    Memory and random bits belong to the name of a tensor, and each call is one step of the tensor
    of that name. All ranks make the same calls in the same order; the first call compares scheme,
    options and versions across ranks.

    Args:
        scheme: a scheme or a registered name.
        group: ranks; the default group by default.
        seed, history, options: see :func:`commhooks.register`.

    Example:
        >>> collectives = commhooks.Collectives("topk", ratio=0.01)
        >>> collectives.all_reduce(gradient, "embedding", op=dist.ReduceOp.AVG)
    """

    def __init__(
        self,
        scheme: str | Scheme = "none",
        group: dist.ProcessGroup | None = None,
        *,
        seed: int = 0,
        history: int = 100_000,
        **options: Any,
    ) -> None:
        # Tensors need not be gradients, and a rounded one no feedback.
        built = make(scheme, **options)
        super().__init__(
            built, process_group=group, seed=seed, history=history, error_feedback=False
        )
        self.call_monitor.disable()  # no backward pass calls this hook, which would warn

    def all_reduce(
        self, tensor: Tensor, name: str | None = None, *, op: Any = SUM, async_op: bool = False
    ) -> Handle | None:
        """Reduces ``tensor`` over all ranks, in place.

        Args:
            tensor: dense, of any dtype, shape and strides. Integers and complex numbers travel
                exactly.
            name: name of the tensor, the same on every rank; needed if the scheme keeps memory.
            op: ``ReduceOp.SUM``, or ``ReduceOp.AVG`` for the mean.
            async_op: returns a handle at once; the tensor has the result after ``handle.wait()``.

        Raises:
            ValueError: another ``op``, no name where one is needed, or a name of another tensor.
            MismatchError: the ranks differ in scheme, options or versions (first call).
        """
        return self.run(
            CollectiveCall("all_reduce", tensor, tensor, is_sum_op("all_reduce", op)),
            name,
            async_op,
        )

    def reduce_scatter(
        self,
        output: Tensor,
        input: Tensor,
        name: str | None = None,
        *,
        op: Any = SUM,
        async_op: bool = False,
    ) -> Handle | None:
        """Reduces ``input`` over all ranks, and writes this rank's part of it to ``output``.

        A scheme rounds once, not twice as in an all-reduce.

        Args:
            output: as many entries as the part of one rank.
            input: the parts of all ranks, one after the other, all of the same size.
            name, op, async_op: see :meth:`all_reduce`.

        Raises:
            RegistrationError: the scheme averages whole tensors only.
        """
        call = CollectiveCall("reduce_scatter", input, output, is_sum_op("reduce_scatter", op))
        return self.run(call, name, async_op)

    def all_gather(
        self, output: Tensor, input: Tensor, name: str | None = None, *, async_op: bool = False
    ) -> Handle | None:
        """Gathers the inputs of all ranks into ``output``, the same bits on every rank.

        Each input is rounded once, also in the output of the rank that sent it.

        Args:
            output: the inputs of all ranks, one after the other.
            input: as many entries on every rank.
            name, async_op: see :meth:`all_reduce`.

        Raises:
            RegistrationError: the scheme has no payload of one rank's tensor.
        """
        return self.run(CollectiveCall("all_gather", input, output), name, async_op)


# ---- functions


_made: dict[dist.ProcessGroup, dict[tuple[str, str], Collectives]] = {}
_registered: set[dist.ProcessGroup] = set()  # those of them that torch.distributed had made


@dynamo_disable
def all_reduce(
    tensor: Tensor,
    scheme: str | Scheme = "none",
    *,
    op: Any = SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    **options: Any,
) -> Handle | None:
    """Reduces ``tensor`` over all ranks by a scheme, in place, as torch's function of that name.

    Args:
        tensor: dense, of any dtype, shape and strides. Integers and complex numbers travel exactly.
        scheme: a name or a scheme that keeps nothing between calls, such as "int8"; others need
            :class:`commhooks.Collectives`.
        op: ``ReduceOp.SUM``, or ``ReduceOp.AVG`` for the mean.
        group: ranks; the default group by default.
        async_op: returns a handle with ``wait()`` at once.
        options: of the scheme, see :func:`commhooks.make`.

    Raises:
        RegistrationError: the scheme keeps memory between calls.
        ValueError: another ``op``.
        MismatchError: the ranks differ in scheme, options or versions (first call).

    Example:
        >>> commhooks.all_reduce(tensor, "int8", op=dist.ReduceOp.AVG)
    """
    call = CollectiveCall("all_reduce", tensor, tensor, is_sum_op("all_reduce", op))
    return collectives_of(scheme, group, call, **options).run(call, None, async_op)


@dynamo_disable
def reduce_scatter(
    output: Tensor,
    input: Tensor,
    scheme: str | Scheme = "none",
    *,
    op: Any = SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    **options: Any,
) -> Handle | None:
    """Reduces ``input`` over all ranks by a scheme; ``output`` gets this rank's part of it.

    Args:
        output: as many entries as the part of one rank.
        input: the parts of all ranks, one after the other, all of the same size.
        scheme, op, group, async_op, options: see :func:`commhooks.all_reduce`.

    Example:
        >>> commhooks.reduce_scatter(output, input, "int8")
    """
    call = CollectiveCall("reduce_scatter", input, output, is_sum_op("reduce_scatter", op))
    return collectives_of(scheme, group, call, **options).run(call, None, async_op)


@dynamo_disable
def all_gather(
    output: Tensor,
    input: Tensor,
    scheme: str | Scheme = "none",
    *,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    **options: Any,
) -> Handle | None:
    """Gathers the inputs of all ranks into ``output``, rounded by a scheme.

    Args:
        output: the inputs of all ranks, one after the other; the same bits on every rank.
        input: as many entries on every rank.
        scheme, group, async_op, options: see :func:`commhooks.all_reduce`.

    Example:
        >>> commhooks.all_gather(output, input, "fp8")
    """
    call = CollectiveCall("all_gather", input, output)
    return collectives_of(scheme, group, call, **options).run(call, None, async_op)


def collectives_of(
    scheme: str | Scheme, group: dist.ProcessGroup | None, call: CollectiveCall, **options: Any
) -> Collectives:
    """Returns the ``Collectives`` of a function call, which the first such call makes.

    Raises:
        RegistrationError: there is no process group, or the scheme keeps memory between calls.
    """
    check_process_group(group)
    close_idle()
    group = group or dist.group.WORLD
    if group is None:
        raise RegistrationError(
            f"commhooks.{call.kind}: no process group; call torch.distributed.init_process_group "
            f"first"
        )
    key = (scheme if isinstance(scheme, str) else describe(scheme), repr(sorted(options.items())))
    collectives = _made.get(group, {}).get(key)
    if collectives is None:
        collectives = Collectives(scheme, group, **options)
        if slots_of(collectives.scheme):
            call.check_scheme(collectives.scheme)
            raise RegistrationError(
                f"commhooks.{call.kind}: {collectives.scheme} keeps state between calls, which "
                f"belongs to a tensor by name: collectives = commhooks.Collectives(scheme, group), "
                f"then collectives.{call.kind}(..., name=...)"
            )
        collectives._called = "commhooks"
        _made.setdefault(group, {})[key] = collectives
        if _is_known(group):
            _registered.add(group)
    return collectives


def close_idle() -> None:
    """Closes the ``Collectives`` of process groups that were destroyed since."""
    for group in [known for known in _registered if not _is_known(known)]:
        _registered.remove(group)
        for collectives in _made.pop(group).values():
            collectives.close()


def _is_known(group: dist.ProcessGroup) -> bool:
    """Whether torch.distributed has made a group and not destroyed it."""
    # Not by its store, which a group keeps after it was destroyed.
    with suppress(KeyError, ValueError, RuntimeError):
        return bool(dist.get_process_group_ranks(group))
    return False
