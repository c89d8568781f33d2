"""Whose bucket it is: torch tells a hook the parameters of a bucket, but not their model."""

import weakref
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from commhooks.core.scheme import Scheme
from commhooks.hook.parameters import ddp_models
from commhooks.hook.state import HookState

__all__ = ["Group", "Owner", "owner_of"]

Group = dist.ProcessGroup | None


class Owner:
    """The model behind some parameters, and what stateless hooks keep for it."""

    def __init__(self, model: DistributedDataParallel | None, parameters: Sequence[Tensor]) -> None:
        self._model = None if model is None else weakref.ref(model)
        self._ids = frozenset(map(id, parameters))
        self._seen: set[tuple[int, ...]] = set()
        self._hooks: dict[tuple[Group, Scheme], HookState] = {}

    def covers(self, parameters: Sequence[Tensor]) -> bool:
        """Whether all ``parameters`` are this model's."""
        key = tuple(map(id, parameters))
        if key not in self._seen:
            if not self._ids.issuperset(key):
                return False
            self._seen.add(key)
        return True

    def extends(self, other: "Owner") -> bool:
        """Whether this is ``other``'s model with more parameters, wrapped anew to train them."""
        return self is not other and self._ids.issuperset(other._ids)

    def make(
        self, scheme: Scheme, group: Group, parameters: Sequence[Tensor], **options: Any
    ) -> HookState:
        """A new state on this model."""
        model = self._model() if self._model is not None else None
        if model is None:  # wrapped anew since
            model = find_model(parameters)
        return HookState(scheme, model, process_group=group, **options)

    def hook(self, scheme: Scheme, group: Group, bucket: GradBucket) -> HookState:
        """The one state of ``scheme`` over ``group`` on this model."""
        state = self._hooks.get((group, scheme))
        if state is None:
            state = self._hooks[group, scheme] = self.make(scheme, group, bucket.parameters())
        return state


# By parameter, newest owner first: models may share parameters, or be wrapped anew.
_owners: MutableMapping[Tensor, list[Owner]] = WeakTensorKeyDictionary()


def owner_of(parameters: Sequence[Tensor]) -> Owner:
    for owner in _owners.get(parameters[0], ()):
        if owner.covers(parameters):
            return owner
    model = find_model(parameters)
    everything = list(parameters)
    if model is not None:
        everything = [parameter for parameter in model.parameters() if parameter.requires_grad]
    owner = Owner(model, everything)
    for parameter in everything:
        _owners.setdefault(parameter, []).insert(0, owner)
    return owner


def find_model(parameters: Sequence[Tensor]) -> DistributedDataParallel | None:
    """The model with these parameters, one with a hook rather than one without.

    torch tells a hook its parameters but not its model. Looked up once per model.
    """
    wanted = set(map(id, parameters))
    found: DistributedDataParallel | None = None
    for model in ddp_models():
        if wanted.issubset(map(id, model.parameters())):
            found = model
            if model._comm_hooks:
                break
    return found
