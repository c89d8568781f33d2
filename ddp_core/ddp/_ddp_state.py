"""Builds the parts of a DistributedDataParallel, at first and for another process group."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ddp_core.ddp._construct import check_no_sync_batch_norm
from ddp_core.ddp._delayed import DelayedAllReduce
from ddp_core.ddp._hooks import CommHooks
from ddp_core.ddp._replica import Buffers, Replica, UnevenInputs, max_candidate_rank
from ddp_core.ddp._torch_reducer import TorchReducer
from ddp_core.reducer._known import KnownParameters, has_another_wrapper
from ddp_core.reducer._launch import ReducerSettings
from ddp_core.reducer._optimizer import (
    OptimizersInBackward,
    has_optimizer_in_backward,
    replace_backward_optimizers,
)
from ddp_core.reducer._parameters import watch_frozen
from ddp_core.reducer._precision import Precision

__all__ = ["DDPState"]

# By group, whose ranks all construct their modules, or change to the group, in the same order.
_reducers: weakref.WeakKeyDictionary[dist.ProcessGroup, list[weakref.ref[TorchReducer]]]
_reducers = weakref.WeakKeyDictionary()


class DDPState:
    """Holds the parts of a DistributedDataParallel.

    Args:
        replica: the model, and its ranks.
        settings: of the reducer; kept for a new reducer.
        buffers: the buffers of the model.
        mixed_precision: the settings of mixed precision, if any.
        delayed: parameters that are averaged together, if any.
        reduces: whether there are other parameters, which a reducer averages.

    Attributes:
        known: detects that the model trains other parameters.
        reducer: averages gradients; not set if all parameters are delayed.
        hooks: the communication hooks.
        precision: mixed precision of the parameters, if any.
        uneven: how the module takes part in ``join``.
    """

    known: KnownParameters
    reducer: TorchReducer
    hooks: CommHooks

    def __init__(
        self,
        replica: Replica,
        settings: ReducerSettings,
        buffers: Buffers,
        *,
        mixed_precision: Any,
        delayed: DelayedAllReduce | None,
        reduces: bool,
    ) -> None:
        self.replica, self.settings, self.buffers = replica, settings, buffers
        self._mixed_precision = mixed_precision
        self.precision: Precision | None = None
        self.delayed, self.reduces = delayed, reduces
        self.uneven = UnevenInputs()
        self._looked_for_optimizers = False

    def build(self, model: nn.Module) -> None:
        """Builds the parts that belong to one module, after construction or unpickling."""
        # Held weakly, for the module holds its hooks: no cycle keeps a model alive.
        self._model: weakref.ref[Any] = weakref.ref(model)
        self.hooks = CommHooks(self._model, self.settings.caps)
        if self.reduces:
            self._make_reducer()
        settings, replica = self.settings, self.replica
        averaged = {entry.name: entry.parameter for entry in replica.trained()}
        if self.delayed is not None:
            averaged |= self.delayed.named(replica.module)
        self.known = KnownParameters(
            model,
            averaged,
            ignored=replica.ignored,
            may_lack=settings.find_unused or settings.static_graph,
            watches_nodes=self._mixed_precision is None,
        )

    def _make_reducer(self) -> None:
        replica, config = self.replica, self._mixed_precision
        trained = replica.trained()
        watch_frozen(replica, replica.ignored)
        self.precision = None
        if config is not None:
            self.precision = Precision(config, replica.module, trained, replica.ignored)
        of_group = _reducers.setdefault(replica.group, [])
        self.reducer = TorchReducer(
            trained,
            replica.group,
            self.settings,
            precision=self.precision,
            name=str(len(of_group)),
        )
        of_group.append(weakref.ref(self.reducer))
        unreduced = self.reducer.backward.unreduced
        unreduced.is_syncing = partial(_synchronises, self._model)
        unreduced.is_shared = partial(_is_shared, self._model)
        self.hooks.attach(self.reducer)
        if self.precision is not None:
            self.reducer.accumulators.watch_other_nodes()
        if replica.device.type == "cpu":
            check_no_sync_batch_norm(replica.module)

    def change_group(self, group: dist.ProcessGroup) -> None:
        """Continues with other ranks, from buckets that they agree on anew.

        Raises:
            RuntimeError: a hook cannot change its group; nothing is changed if a hook raises.
        """
        group_before = self.replica.group
        if self.reduces:
            self.hooks.check_states_follow(self.buffers.hook)
            # They see the model with its new ranks, and go first: they may not agree.
            self.replica.group = group
            try:
                self.hooks.change_group(group, self.buffers.hook)
            except BaseException:
                self.replica.group = group_before
                raise
        if self.precision is not None:
            # The next one takes the parameters' data as it finds them for full precision.
            self.precision.restore()
        self.replica.group = group
        if self.delayed is not None:
            self.delayed.group = group
        if self.reduces:
            self.buffers.find()
            before = self.reducer
            self._make_reducer()
            self.reducer.continue_from(before)
            before.accumulators.close()
            self.hooks.launch_with_hooks()

    # ---- what forward passes do

    def find_optimizers(self) -> None:
        """Adopts optimizers that step in backward, which users set up before the first forward."""
        if self._looked_for_optimizers:
            return
        self._looked_for_optimizers = True
        parameters = [entry.parameter for entry in self.reducer.parameters]
        if has_optimizer_in_backward(parameters):
            replace_backward_optimizers(parameters)
            self.reducer.exchange.optimizer = OptimizersInBackward()

    def before_collectives(self) -> None:
        """Raises after a backward pass that raised, unless all ranks raised at the same place.

        This includes other models in the same group, whose buckets travel there as well.
        """
        for known in _reducers.get(self.replica.group, ()):
            reducer = known()
            if reducer is not None:
                reducer.drop_raised_step()
                reducer.launcher.abort_agreement.agree()

    def synchronise_buffers(self, *, joins: bool, awaits: bool, candidate: bool = True) -> None:
        """Makes buffers equal on all ranks.

        Args:
            joins: ranks may have run out of inputs, so rank 0 may have old buffers.
            awaits: a backward pass follows; what a hook started is awaited at its end.
            candidate: whether this rank's buffers may be those that all take.
        """
        source = max_candidate_rank(self.replica, candidate=candidate) if joins else 0
        futures = self.buffers.synchronise(source)
        if awaits:
            self.reducer.await_futures(futures)
        else:
            self.reducer.launcher.await_futures(futures)

    def broadcast_model(self, *, candidate: bool) -> None:
        """Broadcasts the model of one candidate rank to all ranks, which all call this."""
        source = max_candidate_rank(self.replica, candidate=candidate)
        self.replica.broadcast_from(source, buffers=self.buffers.enabled)

    # ---- pickling

    def __getstate__(self) -> dict[str, Any]:
        # Parts of a process group are built again; a hook has to be registered again.
        state = {**vars(self), "precision": None, "_looked_for_optimizers": False}
        for name in ("hooks", "reducer", "known", "_model"):
            state.pop(name, None)
        return state

    def restore(self) -> None:
        """Uses the default process group after unpickling."""
        self.replica.use_default_group()
        if self.delayed is not None:
            self.delayed.attach(self.replica.group)
        self.buffers.find()


def _synchronises(model: weakref.ref[Any]) -> bool:
    """Whether a model is outside of ``no_sync`` and ``hold``; trainers set the attribute, too."""
    owner = model()
    return owner is None or bool(owner.require_backward_grad_sync)


def _is_shared(model: weakref.ref[Any], parameter: Tensor) -> bool:
    """Whether another wrapper has the parameter, too, or this one is gone."""
    owner = model()
    return owner is None or has_another_wrapper(owner, parameter)
