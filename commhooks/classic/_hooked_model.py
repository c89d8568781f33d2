"""Finds the model of a bucket, since torch gives a hook only the parameters."""

import weakref
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from commhooks._torch import comm_hooks
from commhooks.core._scheme import Scheme
from commhooks.hook._parameters import ddp_models
from commhooks.hook._state import HookState

__all__ = ["Group", "HookedModel", "hooked_model"]

Group = dist.ProcessGroup | None


class HookedModel:
    """Represents a model by its trained parameters, and holds the hooks' states on it.

    Args:
        model: the model; None if it is not known.
        parameters: its trained parameters.
    """

    def __init__(self, model: DistributedDataParallel | None, parameters: Sequence[Tensor]) -> None:
        # Weak: ``_hooked_models`` holds this object as long as the parameters live, which the model
        # keeps alive.
        self._model = None if model is None else weakref.ref(model)
        self._ids = frozenset(map(id, parameters))
        self._seen: set[tuple[int, ...]] = set()
        self._hooks: dict[tuple[Group, Scheme], HookState] = {}

    def covers(self, parameters: Sequence[Tensor]) -> bool:
        """Whether all ``parameters`` are trained parameters of this model."""
        # Called for every bucket: the answer for a list of parameters is kept.
        key = tuple(map(id, parameters))
        if key not in self._seen:
            if not self._ids.issuperset(key):
                return False
            self._seen.add(key)
        return True

    def extends(self, other: "HookedModel") -> bool:
        """Whether this has all parameters of ``other``, whose model was wrapped once more."""
        return self is not other and self._ids.issuperset(other._ids)

    def make(
        self, scheme: Scheme, group: Group, parameters: Sequence[Tensor], **options: Any
    ) -> HookState:
        """Makes a new state on this model."""
        model = self._model() if self._model is not None else None
        if model is None:  # the module may be in another DistributedDataParallel now
            model = find_model(parameters)
        # Settings such as ``use_error_feedback`` say whether the scheme has feedback.
        return HookState(scheme, model, process_group=group, error_feedback=False, **options)

    def hook(self, scheme: Scheme, group: Group, bucket: GradBucket) -> HookState:
        """Returns the state of ``scheme`` over ``group`` on this model, made at its first use."""
        state = self._hooks.get((group, scheme))
        if state is None:
            state = self._hooks[group, scheme] = self.make(scheme, group, bucket.parameters())
        return state


# By parameter, newest model first: models may share parameters, or be wrapped again. Keys are weak
# and compared by identity, so that an entry is dropped with its parameters.
_hooked_models: MutableMapping[Tensor, list[HookedModel]] = WeakTensorKeyDictionary()


def hooked_model(parameters: Sequence[Tensor]) -> HookedModel:
    """Returns the model of a bucket with these parameters, made at first use."""
    for hooked in _hooked_models.get(parameters[0], ()):
        if hooked.covers(parameters):
            return hooked
    model = find_model(parameters)
    everything = list(parameters)
    if model is not None:
        everything = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hooked = HookedModel(model, everything)
    for parameter in everything:
        _hooked_models.setdefault(parameter, []).insert(0, hooked)
    return hooked


def find_model(parameters: Sequence[Tensor]) -> DistributedDataParallel | None:
    """Returns the model with these parameters; a model with a hook is preferred."""
    # ``ddp_models`` walks all objects of the process, so this is called once per model.
    wanted = set(map(id, parameters))
    candidate: DistributedDataParallel | None = None
    for model in ddp_models():
        if wanted.issubset(map(id, model.parameters())):
            candidate = model
            if comm_hooks(model):
                break
    return candidate
