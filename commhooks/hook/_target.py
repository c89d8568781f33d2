"""Defines ``HookTarget``: the model that a hook serves and the ranks that it averages over."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from commhooks._torch import move_to_group
from commhooks.errors import RegistrationError
from commhooks.hook._parameters import Parameters, find_owner, values_of
from ddp_core import DistributedDataParallel as CoreDDP
from ddp_core import on_device

__all__ = ["HookTarget", "Origin", "check_process_group"]


class Origin(NamedTuple):
    """Describes the rank on which an unpickled state was pickled.

    Attributes:
        placement: shards that the rank trained of parameters that tensor parallelism cuts, by
            name; None if the pickle does not say.
    """

    rank: int
    world_size: int
    placement: Mapping[str, str] | None


def check_process_group(group: object) -> None:
    """Raises if ``group`` is neither a process group that this rank is in, nor None."""
    if group is None or (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        return
    if dist.is_available() and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise RegistrationError(
            "process_group=...: this rank is not in the group; only its ranks make a hook for it"
        )
    raise TypeError(
        f"process_group=... is a torch.distributed.ProcessGroup, or None for the model's own, got "
        f"{type(group).__name__}; torch.distributed.new_group(ranks) makes one of some ranks"
    )


class HookTarget:
    """Holds the model, the parameters and the process group of one hook.

    Args:
        process_group: ranks to average over; by default the model's, or the default group.

    Attributes:
        parameters: the model's parameters, by name.
        static_graph: whether the model was made with ``static_graph=True``.
        launches_ahead: whether the caller launches all buckets of a step before it waits for any;
            a function that calls the hook may wait for its future.
        exchange_device: device of the exchanged tensors, if it is not that of the parameters.
        verdict_groups: process groups of the other shards (HSDP); whether a step was finite is
            agreed on over them, too.
        shards: the ranks that have the other shards of this rank's parameters; None: this rank has
            whole parameters.
        pickled_on: the rank that pickled an unpickled state; None for other states.
    """

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.parameters = Parameters()
        self.static_graph = self.launches_ahead = False
        self.exchange_device: torch.device | None = None
        self.verdict_groups: list[dist.ProcessGroup] = []
        self.shards: dist.ProcessGroup | None = None
        self.pickled_on: Origin | None = None
        self._process_group = process_group
        self._follows_model = False  # the group is the model's
        self._shards_of: Callable[[], Mapping[str, Tensor]] | None = None  # of a host with shards
        # Weak: DistributedDataParallel holds the state, and no cycle should keep a model alive.
        self._model: weakref.ref[nn.Module] | None = None

    @property
    def model(self) -> Any:
        """Returns the model, or None if it is not known or was deleted."""
        return None if self._model is None else self._model()

    @property
    def knows_model(self) -> bool:
        """Whether a model was adopted, even if it was deleted since."""
        return self._model is not None

    def adopt(self, model: nn.Module) -> None:
        """Takes the parameter names and the process group from ``model``."""
        known = self.model
        if known is not None and known is not model:
            raise RegistrationError(
                "this HookState belongs to another model: one state serves one model, since "
                "residuals are keyed by its parameter names; make a HookState for each"
            )
        self._model = weakref.ref(model)
        self.parameters = Parameters(model)
        self.static_graph = bool(getattr(model, "static_graph", False))
        if isinstance(model, DistributedDataParallel):
            if self._process_group is None:
                if _unwrapped(model.process_group) is not model.process_group:
                    raise RegistrationError(
                        "the process group of this model runs a scheme already "
                        "(commhooks.process_group), and a hook would run in addition: wrap the "
                        "module with a plain group, and register the scheme"
                    )
                self._process_group = model.process_group
            self._follows_model = self._process_group is model.process_group

    def adopt_sharded(
        self,
        model: nn.Module,
        parameters: Parameters,
        group: dist.ProcessGroup,
        device: torch.device,
        values: Callable[[], Mapping[str, Tensor]] = dict,
    ) -> None:
        """Takes a model whose host reduces gradients to shards, over the ranks of ``group``.

        Args:
            device: device of the gradients, wherever parameters lie between steps (offloading).
            values: returns the parameters, or shards of them, that ranks have in common, by name.
        """
        self._shards_of = values
        self._model, self.parameters, self._process_group = weakref.ref(model), parameters, group
        self.exchange_device = device

    def forget_model(self) -> None:
        """Allows the hook to adopt another model."""
        self._model = None

    def find_model(self, state: object) -> nn.Module | None:
        """Returns the model on which ``state`` was registered, if none is known yet."""
        return None if self.parameters else find_owner(state)

    def group(self) -> dist.ProcessGroup:
        """Returns the process group to average over."""
        if self._process_group is not None:
            return _unwrapped(self._process_group)
        if not dist.is_initialized():
            raise RegistrationError(
                "no process group: call torch.distributed.init_process_group before a hook is "
                "registered or runs"
            )
        world = dist.group.WORLD
        assert world is not None
        return _unwrapped(world)

    def check_group(self) -> None:
        """Raises if the model averages over another process group than the hook."""
        model = self.model
        if not self._follows_model or model is None or model.process_group is self._process_group:
            return
        raise RegistrationError(
            "the model now averages over another process group (_update_process_group) than the "
            "hook, whose residuals and random draws belong to the former ranks. Call "
            "hook.change_group(group) on all ranks of the new group, between two steps; it moves "
            "the model, too. (Of a state of torch's names, PowerSGDState, set process_group.)"
        )

    def change_group(self, group: dist.ProcessGroup) -> None:
        """Averages over ``group`` from now on, and moves torch's model if it shared the group."""
        model, follows = self.model, self._follows_model
        self._process_group = group
        # ``ddp_core`` moves itself, and has called the hook in the course of that. Torch's forgets
        # a step that has raised by this call, so it comes also where the model has moved already.
        if follows and model is not None and not isinstance(model, CoreDDP):
            move_to_group(model, group)

    def core_model_to_move(self, group: dist.ProcessGroup) -> CoreDDP | None:
        """Returns the model if it is ``ddp_core``'s and still has to move to ``group``."""
        model = self.model
        moves = isinstance(model, CoreDDP) and self._follows_model
        return model if moves and model.process_group is not group else None

    def notifying_core(self, state: object) -> CoreDDP | None:
        """Returns the model if it is ``ddp_core``'s and reports its steps to ``state``."""
        model = self.model
        reports = isinstance(model, CoreDDP) and model.reducer.launcher.notifies(state)
        return model if reports else None

    def values(self) -> Mapping[str, Tensor]:
        """Returns the parameters, or shards of them, that the ranks have in common, by name."""
        if self._shards_of is not None:
            return self._shards_of()
        model = self.model
        return {} if model is None else values_of(model)

    def devices(self) -> set[str]:
        """Returns the types of the devices that the model's parameters are on."""
        model = self.model
        used = {parameter.device.type for parameter in model.parameters()} if model else set()
        also = set() if self.exchange_device is None else {self.exchange_device.type}
        return (used - {"meta"}) | also  # there parameters are before they are made

    @property
    def device(self) -> torch.device:
        """Returns the device of the exchanged tensors; of the first ones, if there are several."""
        if self.exchange_device is not None:
            return self.exchange_device
        model = self.model
        parameters = model.parameters() if model else iter(())
        return next((parameter.device for parameter in parameters), torch.device("cpu"))

    def on_device(self) -> AbstractContextManager[object]:
        """Makes the device of the exchanged tensors the current one."""
        return on_device(self.device)

    def may_skip_unused(self, bucket: Any) -> bool:
        """Whether the reducer may leave ``.grad`` of an unused parameter unwritten."""
        model = self.model
        if isinstance(model, DistributedDataParallel):
            return bool(model.find_unused_parameters or model.static_graph)
        # A hook that was made for the inner module, or for ``replicate``, is called by a reducer
        # whose settings are not known. Other hosts (DiLoCo) exchange values of parameters that may
        # have no gradient, so a missing ``.grad`` says nothing there.
        return isinstance(bucket, dist.GradBucket)  # type: ignore[attr-defined]

    def names(self, parameters: Iterable[Tensor]) -> list[str]:
        """Returns the names of ``parameters``, without those that the model does not have."""
        return [known for value in parameters if (known := self.parameters.name(value))]


def _unwrapped(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns the group inside a ``SchemeGroup``, whose scheme would round the hook's sums."""
    wrapped: dist.ProcessGroup = getattr(group, "wrapped", group)
    return wrapped
