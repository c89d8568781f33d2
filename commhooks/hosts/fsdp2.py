"""Runs schemes in FSDP2 (``torch.distributed.fsdp.fully_shard``).

FSDP2 hands over the gradients of a module, one piece of every parameter for each rank, and needs
the mean of this rank's pieces only. A scheme then runs the first of its two phases: the gradient is
rounded once and not twice, and half of the bytes travel. Between nodes (HSDP) the pieces of a rank
are averaged with those of the same rank on other nodes, by any scheme.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllocMixin,
    _get_gradient_divide_factors,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo

from commhooks.core.layout import Layout
from commhooks.core.shards import equal_shards
from commhooks.errors import RegistrationError
from commhooks.hook.sharded_bucket import ShardedBucket, average
from commhooks.hook.sharded_parameters import ShardedParameters
from commhooks.hook.state import HookState
from ddp_core import borrow_memory

__all__ = ["BetweenNodes", "Module", "SchemeReduceScatter"]


class Module:
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
                f"{self.group._module_fqn or 'root'}, whose trained parameters have {total}: some "
                f"got no gradient in this step. Call "
                f"model.set_reduce_scatter_unused_params(True), so that zeros stand for them"
            )
        return known.layout_of([self._names[id(one)] for one in trained])

    def divided_before(self, gradient: Tensor) -> float:
        """Returns by what FSDP2 has divided a gradient before its reduce-scatter.

        It does so in dtypes of another range than float32 (float16), and else by 1.
        """
        before, *_ = self._dividers(gradient)
        return float(before or 1)

    def reduced_units(self, reduced: Tensor) -> float:
        """Returns what FSDP2 hands to its all-reduce hook, over the mean of this node's ranks."""
        ranks = self.group._reduce_scatter_process_group.size()
        given = self.group.gradient_divide_factor
        before, _, op, _ = self._dividers(reduced)
        if ranks == 1:  # no reduce-scatter: it divides by what was asked for at once
            return 1.0 / ((before or 1.0) * (given or 1.0))
        if op == dist.ReduceOp.AVG:
            return 1.0
        return float(ranks / ((before or 1.0) if op == dist.ReduceOp.SUM else given))

    def _dividers(self, gradient: Tensor) -> Any:
        group, mesh = self.group, self.group.mesh_info
        return _get_gradient_divide_factors(
            group._reduce_scatter_process_group,
            mesh.replicate_process_group if isinstance(mesh, DDPMeshInfo) else None,
            gradient.dtype,
            gradient.device.type,
            group.gradient_divide_factor,
            getattr(group, "force_sum_reduction_for_comms", False),
        )


class SchemeReduceScatter(DefaultAllocMixin, ReduceScatter):
    """Reduces and scatters the gradients of one FSDP2 module by a hook's scheme."""

    def __init__(self, hook: HookState, module: Module, known: ShardedParameters) -> None:
        self._hook, self._module, self._known = hook, module, known

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        numel, ranks = input_tensor.numel(), group.size()
        layout = self._module.layout(self._known, numel, ranks)
        shards = equal_shards(numel, ranks)
        given = (self._module.number, input_tensor, layout, shards, output_tensor)
        bucket = ShardedBucket(*given, dense_sends=1.0)
        before = 1.0
        if op == dist.ReduceOp.SUM and _keeps_units(self._hook):
            before = self._module.divided_before(input_tensor)
        if before != 1:
            input_tensor.mul_(before)
        average(self._hook, bucket)
        if op == dist.ReduceOp.AVG:
            return
        # A sum, which FSDP2 divides afterwards; or a sum of products with its divide factor.
        factor = before if op == dist.ReduceOp.SUM else self._module.group.gradient_divide_factor
        output_tensor.mul_(ranks / factor)


class BetweenNodes:
    """Averages the reduced gradients of one FSDP2 module over replicas by a hook's scheme."""

    def __init__(self, hook: HookState, module: Module, known: ShardedParameters) -> None:
        self._hook, self._module, self._known = hook, module, known

    def __call__(self, reduced: Tensor) -> None:
        # FSDP2 keeps what its own all-reduce works on, and gives this back to the stream of the
        # reduce-scatter, which does not wait for the present one.
        borrow_memory(reduced)
        layout = self._module.layout(self._known, reduced.numel(), 1)
        units = self._module.reduced_units(reduced) if _keeps_units(self._hook) else 1.0
        if units != 1:
            reduced.div_(units)
        average(self._hook, ShardedBucket(self._module.number, reduced, layout))
        if self._module.group.gradient_divide_factor is not None:
            # By which FSDP2 has divided: it stands for the number of all ranks, of replicas too.
            units *= self._hook.world_size
        if units != 1:
            reduced.mul_(units)


def _keeps_units(hook: HookState) -> bool:
    """Whether the scheme keeps memory, which is in units of the gradient on every host."""
    return hook._engine.keeps_memory
