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
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin

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
        bucket = ShardedBucket(self._module.number, input_tensor, layout, shards, output_tensor)
        average(self._hook, bucket)
        if op == dist.ReduceOp.AVG:
            return
        # A sum, which FSDP2 divides afterwards; or a sum of products with its divide factor.
        factor = 1.0 if op == dist.ReduceOp.SUM else self._module.group.gradient_divide_factor
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
        average(self._hook, ShardedBucket(self._module.number, reduced, layout))
        if self._module.group.gradient_divide_factor is not None:
            # By which FSDP2 has divided: it stands for the number of all ranks, of replicas too.
            reduced.mul_(self._hook.world_size)
