"""Runs schemes in FSDP2 (``torch.distributed.fsdp.fully_shard``).

FSDP2 hands over the gradients of a module, one piece of every parameter for each rank, and needs
the mean of this rank's pieces only. A scheme then runs the first of its two phases: the gradient is
rounded once and not twice, and half of the bytes travel. Between nodes (HSDP) the pieces of a rank
are averaged with those of the same rank on other nodes, by any scheme.

One bucket, step by step: ``register_on_fsdp2`` puts a :class:`SchemeReduceScatter` on each module's
group of parameters. In backward FSDP2 calls it with the flat gradient (``input_tensor``). It looks
up which pieces lie there (:meth:`FSDP2Module.layout`), makes a ``ShardedBucket`` of them, and
``average`` starts the hook's exchange, waits for it, and leaves the mean of this rank's shard in
``output_tensor``. The exchange is ``Engine.exchange``, which runs the scheme; beside tensor
parallelism ``Exactly`` cuts the bucket in two before, and averages exactly what is not cut between
those ranks. What FSDP2 divides by itself, before or after, is undone last.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor

from commhooks._torch import ALL_REDUCE, REDUCE_SCATTER, DefaultAllocMixin, ReduceScatter
from commhooks.core.shards import equal_shards
from commhooks.hook.sharded_bucket import ShardedBucket, average
from commhooks.hook.sharded_parameters import ShardedParameters
from commhooks.hook.state import HookState
from commhooks.hosts.fsdp2_module import FSDP2Module
from ddp_core import borrow_memory

__all__ = ["BetweenNodes", "Replacement", "SchemeReduceScatter"]


class Replacement:
    """Runs a hook in place of one communication of an FSDP2 module.

    Args:
        hook: the hook that runs.
        module: the module whose gradients it averages.
        known: the parameters of all modules.

    Attributes:
        place: the attribute of FSDP2's groups of parameters that holds the communication.
    """

    place: ClassVar[str]

    def __init__(self, hook: HookState, module: FSDP2Module, known: ShardedParameters) -> None:
        self.hook, self._module, self._known = hook, module, known

    @classmethod
    def hook_of(cls, group: Any) -> HookState | None:
        """Returns the hook that a group of parameters has in this place."""
        present = getattr(group, cls.place)
        return present.hook if isinstance(present, cls) else None


class SchemeReduceScatter(Replacement, DefaultAllocMixin, ReduceScatter):
    """Reduces and scatters the gradients of one FSDP2 module by a hook's scheme."""

    place = REDUCE_SCATTER

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        # ``async_op`` is False: FSDP2 reads ``output_tensor`` in stream order.
        numel, ranks = input_tensor.numel(), group.size()
        bucket = ShardedBucket(
            self._module.number,
            input_tensor,
            self._module.layout(self._known, numel, ranks),
            shards=equal_shards(numel, ranks),
            output=output_tensor,
            dense_sends=1.0,
        )
        before = 1.0
        if op == dist.ReduceOp.SUM and _keeps_units(self.hook):
            before = self._module.divided_before(input_tensor)
        if before != 1:
            input_tensor.mul_(before)
        average(self.hook, bucket)
        if op == dist.ReduceOp.AVG:
            return
        # A sum, which FSDP2 divides afterwards; or a sum of products with its divide factor.
        factor = before if op == dist.ReduceOp.SUM else self._module.group.gradient_divide_factor
        output_tensor.mul_(ranks / factor)


class BetweenNodes(Replacement):
    """Averages the reduced gradients of one FSDP2 module over replicas by a hook's scheme."""

    place = ALL_REDUCE

    def __call__(self, reduced: Tensor) -> None:
        # FSDP2 keeps what its own all-reduce works on, and gives this back to the stream of the
        # reduce-scatter, which does not wait for the present one.
        borrow_memory(reduced)
        layout = self._module.layout(self._known, reduced.numel(), 1)
        units = self._module.reduced_units(reduced) if _keeps_units(self.hook) else 1.0
        if units != 1:
            reduced.div_(units)
        average(self.hook, ShardedBucket(self._module.number, reduced, layout))
        if self._module.group.gradient_divide_factor is not None:
            # By which FSDP2 has divided: it stands for the number of all ranks, of replicas too.
            units *= self.hook.world_size
        if units != 1:
            reduced.mul_(units)


def _keeps_units(hook: HookState) -> bool:
    """Whether the scheme keeps memory, which is in units of the gradient on every host."""
    return hook._engine.keeps_memory
