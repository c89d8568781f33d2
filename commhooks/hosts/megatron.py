"""Puts a scheme into Megatron-Core, in the signature of its own reduce-scatter."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

import commhooks
from commhooks.core.scheme import Scheme
from commhooks.wrappers.make import make

__all__ = ["ReduceScatter"]


class ReduceScatter:
    """Reduces and scatters the gradients of a bucket by a scheme.

    Takes the place of Megatron-Core's ``reduce_scatter_with_fp32_accumulation``, whose arguments it
    has, with ``DistributedDataParallelConfig(reduce_scatter_with_fp32_accumulation=True)``.

    Args:
        scheme: a name or a scheme.
        options: of the scheme, see :func:`commhooks.make`.

    Example:
        >>> from megatron.core.distributed import param_and_grad_buffer
        >>> param_and_grad_buffer.reduce_scatter_with_fp32_accumulation = ReduceScatter("int8")
    """

    def __init__(self, scheme: str | Scheme = "int8", **options: Any) -> None:
        self._scheme = make(scheme, **options)
        self._reduce_scatter = getattr(commhooks, "reduce_scatter", None)
        if self._reduce_scatter is None:
            raise NotImplementedError(
                "commhooks.hosts.megatron.ReduceScatter needs commhooks.reduce_scatter, which this "
                "version of the package does not have"
            )

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        op: dist.ReduceOp.RedOpType,
        group: dist.ProcessGroup | None,
        async_op: bool,
    ) -> Any:
        """Writes this rank's part of the sum over ranks; returns a handle with ``wait()``, or None.

        Args:
            output_tensor: the part, ``input_tensor.numel() / world_size`` entries.
            input_tensor: the gradients of the bucket.
            op: the sum, as Megatron scales gradients before.
            group: the ranks.
            async_op: returns before the sum is there.

        Raises:
            ValueError: another ``op``, or sizes that do not fit.
        """
        size = dist.get_world_size(group)
        if op != dist.ReduceOp.SUM:
            raise ValueError(f"ReduceScatter: Megatron-Core's function sums (SUM), got op={op}")
        if output_tensor.numel() * size != input_tensor.numel():
            raise ValueError(
                f"ReduceScatter: an output of {output_tensor.numel()} entries on {size} ranks "
                f"needs an input of {output_tensor.numel() * size}, got {input_tensor.numel()}"
            )
        assert self._reduce_scatter is not None
        return self._reduce_scatter(
            output_tensor, input_tensor, self._scheme, group=group, op=op, async_op=async_op
        )
