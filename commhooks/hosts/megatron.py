"""Puts a scheme into Megatron-Core, with the signature of its own reduce-scatter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from commhooks._torch import coalesced_calls
from commhooks.collectives._functions import reduce_scatter
from commhooks.core._scheme import Scheme, slots_of
from commhooks.errors import RegistrationError
from commhooks.hook._attachment import CallMonitor
from commhooks.wrappers._make import describe, make

__all__ = ["ReduceScatter"]

_ADVICE = (
    "Megatron-Core calls it if it takes the place of param_and_grad_buffer."
    "reduce_scatter_with_fp32_accumulation before DistributedDataParallel is made, with "
    "DistributedDataParallelConfig(reduce_scatter_with_fp32_accumulation=True, "
    "use_distributed_optimizer=True)"
)


class ReduceScatter:
    """Reduces and scatters the gradients of a bucket by a scheme.

    Takes the place of Megatron-Core's ``reduce_scatter_with_fp32_accumulation``, whose arguments it
    has, with ``DistributedDataParallelConfig(reduce_scatter_with_fp32_accumulation=True)``. Warns
    at the end if it was never called.

    Args:
        scheme: a name or a scheme that keeps nothing between calls, such as "int8".
        options: options of the scheme, see :func:`commhooks.make`.

    Raises:
        RegistrationError: the scheme keeps memory, or averages whole buckets.

    Example:
        >>> from megatron.core.distributed import param_and_grad_buffer
        >>> param_and_grad_buffer.reduce_scatter_with_fp32_accumulation = ReduceScatter("int8")
    """

    def __init__(self, scheme: str | Scheme = "int8", **options: Any) -> None:
        self._scheme = make(scheme, **options)
        memory = bool(slots_of(self._scheme))
        if memory or not self._scheme.traits.shards:
            why = "keeps state, and Megatron-Core does not name its buckets"
            raise RegistrationError(
                f"ReduceScatter: {self._scheme} "
                f"{why if memory else 'averages whole buckets, not shards of them'}; int8, fp8, "
                f"eden, fp16 and bf16 do neither, nor does int4 with error_feedback=False"
            )
        self._call_monitor = CallMonitor()
        name = f"commhooks.hosts.megatron.ReduceScatter({describe(self._scheme)})"
        self._call_monitor.warn_at_exit(self, name, _ADVICE)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        op: dist.ReduceOp.RedOpType,
        group: dist.ProcessGroup | None,
        async_op: bool,
    ) -> Any:
        """Writes this rank's part of the result; returns a handle with ``wait()``, or None.

        Args:
            output_tensor: the part, ``input_tensor.numel() / world_size`` entries; may be a view of
                ``input_tensor``, as Megatron-Core's is.
            input_tensor: the gradients of the bucket.
            op: ``ReduceOp.SUM``, since Megatron-Core scales gradients before, or ``AVG``.
            group: the ranks.
            async_op: returns before the result is there.

        Raises:
            ValueError: another ``op``, or sizes that do not fit.
        """
        self._call_monitor.calls += 1
        with _outside_coalescing(group):
            return reduce_scatter(
                output_tensor, input_tensor, self._scheme, op=op, group=group, async_op=async_op
            )


@contextmanager
def _outside_coalescing(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Lets collectives run in torch's ``_coalescing_manager``, in which Megatron-Core calls this.

    The manager would hold sums of the group back until its end, and return a handle that cannot be
    waited for.
    """
    calls: Any = coalesced_calls()
    of: Any = group or dist.group.WORLD
    coalesced = calls.pop(of, None)
    try:
        yield
    finally:
        if coalesced is not None:
            calls[of] = coalesced
