"""Describes one FSDP2 module: what is in its buckets, and by what FSDP2 divides them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from commhooks._torch import DDPMeshInfo, divide_factors, fsdp2_module_name, fsdp2_ranks
from commhooks.core.layout import Layout
from commhooks.errors import RegistrationError
from commhooks.hook.sharded_parameters import ShardedParameters

__all__ = ["FSDP2Module"]


class FSDP2Module:
    """Describes one FSDP2 module: its number, and the parameters whose gradients it reduces.

    Args:
        number: the same on all ranks.
        group: FSDP2's group of parameters.
        names: names of the parameters within the model, by identity of FSDP2's objects.
    """

    def __init__(self, number: int, group: Any, names: dict[int, str]) -> None:
        self.number, self.group, self._names = number, group, names

    def layout(self, known: ShardedParameters, numel: int, pieces: int) -> Layout:
        """Returns the layout of a bucket of ``numel`` entries.

        Args:
            known: all parameters.
            numel: number of entries, by which missing gradients are noticed.
            pieces: number of pieces of each parameter in the bucket.
        """
        trained = [one for one in self.group.fsdp_params if one.sharded_param.requires_grad]
        total = sum(one.padded_sharded_param_size.numel() for one in trained) * pieces
        if total != numel:
            raise RegistrationError(
                f"commhooks: FSDP2 reduces {numel} entries of module "
                f"{fsdp2_module_name(self.group) or 'root'}, whose trained parameters have "
                f"{total}: some got no gradient in this step. Call "
                f"model.set_reduce_scatter_unused_params(True), so that zeros stand for them; "
                f"where this torch has no such method, add 0 * parameter.sum() to the loss"
            )
        return known.layout_of([self._names[id(one)] for one in trained])

    def values(self) -> dict[str, Tensor]:
        """Returns this rank's shards of the parameters, by the names of the parameters."""
        return {self._names[id(one)]: one.sharded_param for one in self.group.fsdp_params}

    def divided_before(self, gradient: Tensor) -> float:
        """Returns by what FSDP2 has divided a gradient before its reduce-scatter.

        It does so in dtypes of another range than float32 (float16), and else by 1.
        """
        before, *_ = self._dividers(gradient)
        return float(before or 1)

    def reduced_units(self, reduced: Tensor) -> float:
        """Returns what FSDP2 hands to its all-reduce hook, over the mean of this node's ranks."""
        ranks = fsdp2_ranks(self.group).size()
        given = self.group.gradient_divide_factor
        before, _, op, _ = self._dividers(reduced)
        if ranks == 1:  # no reduce-scatter: it divides by what was asked for at once
            return 1.0 / ((before or 1.0) * (given or 1.0))
        if op == dist.ReduceOp.AVG:
            return 1.0
        return float(ranks / ((before or 1.0) if op == dist.ReduceOp.SUM else given))

    def _dividers(self, gradient: Tensor) -> Any:
        group, mesh = self.group, self.group.mesh_info
        return divide_factors(
            fsdp2_ranks(group),
            mesh.replicate_process_group if isinstance(mesh, DDPMeshInfo) else None,
            gradient.dtype,
            gradient.device.type,
            group.gradient_divide_factor,
            getattr(group, "force_sum_reduction_for_comms", False),
        )
