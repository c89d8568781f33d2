"""Runs a hook on torch's DistributedDataParallel by the all-reduces of its group."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from commhooks._torch import comm_hooks
from commhooks.core.dense import Dense
from commhooks.core.scheme import Scheme
from commhooks.errors import HookNotAttachedError, RegistrationError
from commhooks.hook.handshake import MEETING
from commhooks.hook.only_here import OnlyHere
from commhooks.hook.reducer_bucket import ReducerBucket
from commhooks.hook.state import HookState
from commhooks.hosts.reducer_buckets import ReducerBuckets
from ddp_core import DistributedDataParallel as CoreDDP
from ddp_core._torch import backward_number, in_join

__all__ = ["STAYS", "AttachedModel"]

# The reducer divides by the ranks of its group, whatever the hook averages over.
STAYS = (
    "it runs in a process group, whose ranks are settled; make process_group(scheme, group) of the "
    "others, wrap the module again over it, attach it, and load this hook's state_dict(gather=True)"
)


class AttachedModel:
    """Runs a hook on the buckets of a model that has none.

    Another model may train over the same group: its gradients travel as they are.

    Args:
        model: torch's DistributedDataParallel.
        scheme: what to run.
        ranks: to average over.
        seed: base of random draws.

    Attributes:
        hook: the state of the hook.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        scheme: Scheme,
        ranks: dist.ProcessGroup,
        seed: int,
    ) -> None:
        if isinstance(model, CoreDDP) or comm_hooks(model):
            raise RegistrationError(
                "process_group(...).attach(model): this DistributedDataParallel takes, or has, a "
                "hook; commhooks.register(model, scheme) with a plain process group does the same"
            )
        self.hook = HookState(scheme, model, process_group=ranks, seed=seed)
        self.hook.stays = STAYS
        self.hook.agree("process_group(...).attach", {}, MEETING)
        self._model = weakref.ref(model)
        self._buckets = ReducerBuckets(model)
        self._calls = 0  # before this pass
        self._strange = 0  # entries of its latest tensor that is no bucket
        # Of the module inside, since it runs after torch has laid out buckets.
        model.module.register_forward_pre_hook(OnlyHere(self._forward))

    @property
    def lives(self) -> bool:
        """Whether the program still has the model."""
        return self._model() is not None

    def start(self, tensor: Tensor, op: Any) -> torch.futures.Future[Tensor] | None:
        """Starts the exchange of a bucket; returns None if the tensor is none."""
        if backward_number() < 0 or op != dist.ReduceOp.SUM:
            return None
        model = self._model()
        unused = model is not None and model.find_unused_parameters
        known = self._buckets.take(tensor, unused=unused)
        if known is None:
            self._strange = tensor.numel()
            return None
        exact = type(self.hook.scheme) is Dense
        if not exact:
            # Shares of a sum: the reducer has divided. A hook gets gradients, and keeps theirs.
            tensor.mul_(self.hook.world_size)
        bucket = ReducerBucket(known.number, known.members, known.last, tensor, exact)
        return self.hook.start(bucket)

    def _forward(self, module: nn.Module, inputs: Any) -> None:
        model = self._model()
        if model is None or not torch.is_grad_enabled() or backward_number() >= 0:
            return
        if getattr(model.process_group, "hook", None) is not self.hook:
            raise RegistrationError(
                "process_group(...).attach(model): the model now averages over another process "
                "group (_update_process_group), in which nothing is compressed; wrap the module "
                "again over a group of commhooks.process_group, attach it, and load this hook's "
                "state_dict"
            )
        if in_join(model):
            raise RegistrationError(
                "process_group(...).attach(model): a rank without inputs (join) is not told whose "
                "gradients it reduces; commhooks.register(model, scheme) runs with join"
            )
        self.hook.forward_begins()
        if self._strange and self._buckets.missing and self.hook.calls == self._calls:
            raise HookNotAttachedError(
                f"process_group(...).attach(model): the latest gradients of the model were reduced "
                f"without the scheme: {self._strange} entries are in none of the buckets that it "
                f"had when it was attached. Attach it after all changes of the model; "
                f"commhooks.register(model, scheme) with a plain process group does without"
            )
        self._calls, self._strange = self.hook.calls, 0
        self._buckets.forward_begins(model, self.hook.step)
