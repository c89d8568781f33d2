"""Defines ``SchemeGroup``, a process group whose all-reduce and reduce-scatter run a scheme.

Programs that take a process group and no hook compress with it: DistributedDataParallel without a
hook, ``replicate()`` and ``fully_shard`` of FSDP2 over a mesh of the group. Everything but the
all-reduce and the reduce-scatter of floating tensors goes to the backends of the group inside.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from commhooks.core.scheme import Scheme, slots_of
from commhooks.errors import RegistrationError
from commhooks.hook.call import Handle
from commhooks.hook.state import HookState
from commhooks.hook.tracing import not_traced
from commhooks.hosts.attached import STAYS, AttachedModel
from commhooks.hosts.scattering_group import ScatteringGroup, averages

__all__ = ["NAME", "SchemeGroup"]

NAME = "commhooks"  # of the backend


class SchemeGroup(ScatteringGroup):
    """Averages by a scheme, and is otherwise the group that it was made of.

    The scheme runs in ``all_reduce`` and ``reduce_scatter_tensor`` with ``ReduceOp.SUM`` or ``AVG``
    of one floating tensor of at least ``least`` entries; after :meth:`attach`, in the all-reduces
    of the model's buckets only.

    Attributes:
        hook: what runs the scheme, with ledger and reports: :class:`commhooks.Collectives`, or a
            :class:`commhooks.HookState` once a model is attached.
        inside: the group that all others go to.
        least: number of entries from which on a tensor is compressed.
    """

    hook: HookState
    _attached: AttachedModel | None = None

    def __init__(
        self,
        inside: dist.ProcessGroup,
        scheme: Scheme,
        least: int,
        seed: int,
        *,
        owns: bool = False,
    ) -> None:
        super().__init__(inside, scheme, least, seed, owns=owns)
        self.hook = self._calls
        self._calls.stays = STAYS

    def attach(self, model: nn.Module) -> HookState:
        """Tells the group the parameters of a model, by whose names a scheme keeps its memory.

        Args:
            model: torch's DistributedDataParallel over this group; all ranks attach it, before the
                first step.

        Returns:
            The state of the hook, which saves, loads, switches and reports.
        """
        if not isinstance(model, DistributedDataParallel) or model.process_group is not self:
            over = " over another group" * isinstance(model, DistributedDataParallel)
            raise RegistrationError(
                f"process_group(...).attach(model): takes DistributedDataParallel(module, "
                f"process_group=group) over this group, got {type(model).__name__}{over}; for a "
                f"model of replicate() on FSDP2 see commhooks.hosts.replicate"
            )
        if self._attached is not None and self._attached.lives:
            raise RegistrationError(
                f"process_group(...).attach(model): the group has a model already, whose hook is "
                f"group.hook ({self.hook}); make a group for each model, "
                f"commhooks.process_group(scheme)"
            )
        self._attached = AttachedModel(model, self._scheme, self.inside, self._seed)
        self.hook = self._attached.hook
        return self.hook

    @not_traced
    def allreduce(  # type: ignore[override]
        self, tensors: list[Tensor], opts: Any = None
    ) -> Any:
        """Reduces by the scheme what it is for, and else by the group inside."""
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        fits = len(tensors) == 1 and averages(tensors[0], op)
        future = self._run(tensors[0], op) if fits else None
        if future is None:
            return self.inside.allreduce(tensors, *([] if opts is None else [opts]))
        return Handle(future.then(lambda done: [done.value()]), tensors[0].device)

    def _run(self, tensor: Tensor, op: Any) -> torch.futures.Future[Tensor] | None:
        """Starts the exchange of a tensor by the scheme; None: it is not for the scheme."""
        if self._attached is not None:
            return self._attached.start(tensor, op)
        if tensor.numel() < self.least:
            return None
        if slots_of(self._scheme):
            raise RegistrationError(
                f"all_reduce of {tensor.numel()} entries in a process group of {self._scheme}, "
                f"which keeps memory by parameter: tell the group the names first, "
                f"group.attach(model), with the DistributedDataParallel that was made with it"
            )
        # By its size, which is the same on all ranks, with or without a backward pass (join).
        name = f"{tensor.numel()} entries of {tensor.dtype}"
        handle = self._calls.all_reduce(tensor, name, op=op, async_op=True)
        assert handle is not None
        return handle.get_future()

    def shutdown(self) -> None:
        """Stops what runs the scheme; a group inside that is somebody else's goes on."""
        for hook in (self._calls, self.hook):
            hook._close()
        super().shutdown()

    def getBackendName(self) -> str:
        """Returns the name of the backend."""
        return NAME
