"""Recognises the buckets of torch's DistributedDataParallel in the all-reduces of its group."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from commhooks.core.dense import Dense
from commhooks.core.scheme import Scheme
from commhooks.errors import HookNotAttachedError, RegistrationError
from commhooks.hook.handshake import MEETING
from commhooks.hook.only_here import OnlyHere
from commhooks.hook.reducer_bucket import ReducerBucket
from commhooks.hook.state import HookState
from ddp_core import DistributedDataParallel as CoreDDP

__all__ = ["AttachedModel"]

# torch lays out its buckets anew after the first step, with a static graph after the second.
_LOOKS = 3


class AttachedModel:
    """Runs a hook on the buckets of a model that has none.

    The reducer tells nobody which parameters it reduces. It is asked for its buckets in the forward
    passes after which it may have others, and launches them in their order. A tensor is taken for a
    bucket if it has the bucket's size and the gradients of the bucket have been computed since, so
    that another model may train over the same group: its gradients travel as they are.

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
        if isinstance(model, CoreDDP) or model._comm_hooks:
            raise RegistrationError(
                "process_group(...).attach(model): this DistributedDataParallel takes, or has, a "
                "hook; commhooks.register(model, scheme) with a plain process group does the same"
            )
        self.hook = HookState(scheme, model, process_group=ranks, seed=seed)
        self.hook.agree("process_group(...).attach", {}, MEETING)
        self._model = weakref.ref(model)
        self._buckets: list[tuple[tuple[int, torch.dtype], ReducerBucket]] = []
        self._next = self._looks = self._calls = self._strange = 0
        self._reduces = False  # this pass, whose gradients are not accumulated (no_sync)
        self._computed: set[Tensor] = set()  # gradients of this pass
        self._told: list[Any] = []  # handles of what tells it
        self._look(model)
        # Of the module inside, since it runs after torch has laid out buckets.
        model.module.register_forward_pre_hook(OnlyHere(self._forward))

    @property
    def lives(self) -> bool:
        """Whether the program still has the model."""
        return self._model() is not None

    def start(self, tensor: Tensor, op: Any) -> torch.futures.Future[Tensor] | None:
        """Starts the exchange of a bucket; returns None if the tensor is none."""
        if torch._C._current_graph_task_id() < 0 or op != dist.ReduceOp.SUM:
            return None
        key = (tensor.numel(), tensor.dtype)
        order = [*range(self._next, len(self._buckets)), *range(self._next)]
        same = (at for at in order if self._buckets[at][0] == key)
        found = next((at for at in same if self._is_computed(self._buckets[at][1], tensor)), None)
        if found is None:
            self._strange = tensor.numel()
            return None
        self._next, known = found + 1, self._buckets[found][1]
        self._computed.difference_update(known.members)
        exact = type(self.hook.scheme) is Dense
        if not exact:
            # Shares of a sum: the reducer has divided. A hook gets gradients, and keeps theirs.
            tensor.mul_(self.hook.world_size)
        bucket = ReducerBucket(known.number, known.members, known.last, tensor, exact)
        return self.hook.start(bucket)

    def _is_computed(self, bucket: ReducerBucket, tensor: Tensor) -> bool:
        """Whether backward has computed the gradients of a bucket, and nobody has reduced them."""
        if not self._reduces:
            return False
        if not self._computed.isdisjoint(bucket.members):
            return True
        # A bucket of which this rank uses no parameter: zeros.
        model = self._model()
        return model is not None and model.find_unused_parameters and not bool(tensor.any())

    def _forward(self, module: nn.Module, inputs: Any) -> None:
        model = self._model()
        if model is None or not torch.is_grad_enabled() or torch._C._current_graph_task_id() >= 0:
            return
        if getattr(model.process_group, "hook", None) is not self.hook:
            raise RegistrationError(
                "process_group(...).attach(model): the model now averages over another process "
                "group (_update_process_group), in which nothing is compressed; wrap the module "
                "again over a group of commhooks.process_group, attach it, and load this hook's "
                "state_dict"
            )
        if model._join_config.enable:
            raise RegistrationError(
                "process_group(...).attach(model): a rank without inputs (join) is not told whose "
                "gradients it reduces; commhooks.register(model, scheme) runs with join"
            )
        self.hook.forward_begins()
        computed = self._reduces and bool(self._computed)
        if self._strange and computed and self.hook.calls == self._calls:
            raise HookNotAttachedError(
                f"process_group(...).attach(model): the latest gradients of the model were reduced "
                f"without the scheme: {self._strange} entries are in none of the buckets that it "
                f"had when it was attached. Attach it after all changes of the model; "
                f"commhooks.register(model, scheme) with a plain process group does without"
            )
        self._calls, self._strange, self._next = self.hook.calls, 0, 0
        self._reduces = model.require_backward_grad_sync
        self._computed.clear()
        if self._looks < _LOOKS and self._looked_at != self.hook.step:
            self._look(model)

    def _look(self, model: DistributedDataParallel) -> None:
        self._looked_at, self._looks = self.hook.step, self._looks + 1
        # It allocates the memory of all gradients, which is why it is not done in every step, and
        # why no view of it is kept.
        try:
            buckets = model.reducer._get_zeros_like_grad_buckets()
        except RuntimeError as error:
            raise RegistrationError(
                "process_group(...).attach(model): torch does not tell the buckets of a model with "
                "sparse gradients; commhooks.register(model, scheme) runs with them"
            ) from error
        self._buckets = [
            (
                (one.buffer().numel(), one.buffer().dtype),
                ReducerBucket(
                    *(one.index(), one.parameters(), one.is_last()), one.buffer().new_empty(0)
                ),
            )
            for one in buckets
        ]
        while self._told:
            self._told.pop().remove()
        # One parameter of each bucket will do, unless a pass may leave that one out.
        most = None if model.find_unused_parameters else 1
        for _, bucket in self._buckets:
            for parameter in bucket.members[:most]:
                told = parameter.register_post_accumulate_grad_hook(self._computed.add)
                self._told.append(told)
