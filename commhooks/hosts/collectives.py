"""Defines ``Collectives``: torch's collectives by a scheme, on tensors with names."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from commhooks.core.scheme import Scheme
from commhooks.hook.call import Call, Handle, sums
from commhooks.hook.calls import Calls

__all__ = ["Collectives"]

SUM = dist.ReduceOp.SUM


class Collectives(Calls):
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
        super().__init__(scheme, process_group=group, seed=seed, history=history, **options)
        self._attendance.dismiss()  # no backward pass calls it, of which a hook would warn

    def all_reduce(
        self, tensor: Tensor, name: str | None = None, *, op: Any = SUM, async_op: bool = False
    ) -> Handle | None:
        """Reduces ``tensor`` over all ranks, in place.

        Args:
            tensor: dense, of any dtype, shape and strides. Integers and complex numbers travel
                exactly.
            name: of the tensor, the same on every rank; needed if the scheme keeps memory.
            op: ``ReduceOp.SUM``, or ``ReduceOp.AVG`` for the mean.
            async_op: returns a handle at once; the tensor has the result after ``handle.wait()``.

        Raises:
            ValueError: another ``op``, no name where one is needed, or a name of another tensor.
            MismatchError: the ranks differ in scheme, options or versions (first call).
        """
        return self.run(Call("all_reduce", tensor, tensor, sums("all_reduce", op)), name, async_op)

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
        call = Call("reduce_scatter", input, output, sums("reduce_scatter", op))
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
        return self.run(Call("all_gather", input, output), name, async_op)
