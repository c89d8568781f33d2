"""Detects that a wrapped model has other parameters, or other autograd nodes, than before."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from operator import is_
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddp_core._torch import children_of
from ddp_core.exchange._errors import listed
from ddp_core.reducer._autograd import accumulator_of, when_accumulated

__all__ = ["KnownParameters", "Structure", "has_another_wrapper"]

_END = object()
_POINTER = torch.Tensor.data_ptr
_AGAIN = (
    "wrap the module again (and register its hook, and make its optimizer, again), or do that "
    "before wrapping"
)


class Structure:
    """Detects a change of a module's modules and parameters, without a loop in Python."""

    def __init__(self, owner: nn.Module) -> None:
        self.record(owner)

    def record(self, owner: nn.Module) -> None:
        """Records the present structure, with which later ones are compared."""
        # The tables of all modules, empty ones, too: something may be put in. Views are live.
        tables = [
            t for module in owner.modules() for t in (children_of(module), module._parameters)
        ]
        self._views = [table.values() for table in tables]
        self._objects = [*chain.from_iterable(self._views), _END]

    @property
    def has_changed(self) -> bool:
        """Whether there are other objects than the recorded ones."""
        present = chain(chain.from_iterable(self._views), (_END,))
        return not all(map(is_, present, self._objects))


class KnownParameters:
    """Detects that a model trains other parameters than those whose gradients are averaged.

    Parameters are replaced by ``load_state_dict(assign=True)``, by new layers and parametrizations;
    ``.double()`` and ``.to(device)`` keep them, and replace autograd's nodes, which a reducer
    watches. Either way gradients would arrive that nothing averages.

    Args:
        owner: the wrapper of the model; held weakly.
        known: parameters whose gradients are averaged, by name.
        ignored: names of other parameters, which may be added and removed.
        first: parameters that the model had when it was wrapped; by default all present ones.
        prefix: prefix of names in the owner that messages leave out.
        may_lack: whether a parameter may get no gradient, or be removed from the model.
        watches_nodes: whether autograd's nodes must stay; with mixed precision they do not.
        kind: the class of errors.
    """

    def __init__(
        self,
        owner: nn.Module,
        known: Mapping[str, nn.Parameter],
        *,
        ignored: Collection[str] = (),
        first: Iterable[Tensor] | None = None,
        prefix: str = "module.",
        may_lack: bool = False,
        watches_nodes: bool = True,
        kind: type[Exception] = RuntimeError,
    ) -> None:
        self._owner, self._prefix, self._ignored = weakref.ref(owner), prefix, ignored
        self._names, self._parameters = list(known), list(known.values())
        self._may_lack, self._kind = may_lack, kind
        self._nodes: list[Any] = []
        if watches_nodes:
            self._nodes = [accumulator_of(parameter) for parameter in self._parameters]
        self._types = [self._type_of(index) for index in range(len(self._parameters))]
        # Other subclasses of Tensor may have no memory of their own.
        self._plain = [
            i for i, parameter in enumerate(self._parameters) if type(parameter) is nn.Parameter
        ]
        self._in_memory = [self._parameters[i] for i in self._plain] if watches_nodes else []
        self._turn, self._is_new = 0, False
        # Parameters that are not averaged, and whether they were in the model from the first. Not
        # weakly: torch does not swap a tensor that has weak references.
        self._unaveraged: dict[int, tuple[Tensor, bool]] = {}
        averaged = set(map(id, self._parameters))
        for parameter in owner.parameters() if first is None else first:
            if id(parameter) not in averaged:
                self._unaveraged[id(parameter)] = parameter, True
        self._structure = Structure(owner)
        self._find_unaveraged()
        self._pointers = self._present_pointers()

    @property
    def averaged(self) -> dict[str, nn.Parameter]:
        """Returns the parameters whose gradients are averaged, by name."""
        return dict(zip(self._names, self._parameters, strict=True))

    def knows(self, parameter: Tensor) -> bool:
        """Whether the model has had the parameter since it was wrapped."""
        return self._was_there(parameter) or any(parameter is known for known in self._parameters)

    def _was_there(self, parameter: Tensor) -> bool:
        """Whether the model has had a parameter since it was wrapped that is not averaged."""
        return self._unaveraged.get(id(parameter), (None, False))[1]

    def check(self) -> None:
        """Checks the model before a forward pass that records a graph.

        Raises:
            RuntimeError: (or ``kind``) a parameter has another node, or is gone. A new parameter
                raises at its first gradient, which may never arrive.
        """
        if self._structure.has_changed:
            self._is_new = True
            self._find_unaveraged()
        if not self._nodes:
            return
        # Another type is other memory. Other memory alone is fine: averages of weights, say.
        looks: list[int] = []
        pointers = self._present_pointers()
        if pointers != self._pointers:
            rows = zip(self._plain, pointers, self._pointers, strict=True)
            changed = [i for i, now, before in rows if now != before]
            changed = [i for i in changed if self._parameters[i].requires_grad]
            looks = [i for i in changed if self._type_of(i) != self._types[i]][:1] + changed[:2]
        # Memory may be the same by chance (``.double().float()``): one more is looked at in turn,
        # and all of them where modules are others (a parametrization).
        looks += range(len(self._parameters)) if self._is_new else [self._turn]
        self._turn = (self._turn + 1) % len(self._parameters)
        for index in looks:
            parameter = self._parameters[index]
            if parameter.requires_grad and accumulator_of(parameter) is not self._nodes[index]:
                self._raise_converted(index)
        # Not before: a second call raises the same error.
        self._pointers, self._is_new = pointers, False

    def _type_of(self, index: int) -> tuple[torch.dtype, torch.device]:
        parameter = self._parameters[index]
        return parameter.dtype, parameter.device

    def _present_pointers(self) -> list[int]:
        return list(map(_POINTER, self._in_memory))

    def _find_unaveraged(self) -> None:
        """Compares the model's parameters with the known ones; raises now or keeps the error."""
        owner = self._owner()
        assert owner is not None  # it runs
        present = {id(parameter): name for name, parameter in owner.named_parameters()}
        known = set(map(id, self._parameters))
        gone = [
            name
            for name, parameter in zip(self._names, self._parameters, strict=True)
            if id(parameter) not in present
        ]
        strange = borrowed = False
        for module in owner.modules():
            for key, parameter in module._parameters.items():
                if parameter is None or id(parameter) in known or self._was_there(parameter):
                    continue
                strange = True
                # Except for torch.func.functional_call, whose tensors replace parameters for now.
                borrowed |= not isinstance(parameter, nn.Parameter)
                name = present[id(parameter)].removeprefix(self._prefix)
                if isinstance(parameter, nn.Parameter) and id(parameter) not in self._unaveraged:
                    self._unaveraged[id(parameter)] = parameter, False
                    if name not in self._ignored:
                        self._watch_gradient(owner, module, key, parameter, name)
        if gone and not strange and not self._may_lack:
            raise self._kind(
                f"the model has no parameter {listed(gone)} any more (deleted, or tied to another "
                f"one), and its gradient is waited for: {_AGAIN}"
            )
        if not borrowed:
            self._structure.record(owner)

    def _watch_gradient(
        self, owner: nn.Module, module: nn.Module, key: str, parameter: nn.Parameter, name: str
    ) -> None:
        """Raises when a new parameter gets a gradient, if the model still has it then."""
        if not (parameter.is_floating_point() or parameter.is_complex()):
            return
        owner_reference, module_reference = weakref.ref(owner), weakref.ref(module)
        kind = self._kind

        def check(came: Tensor) -> None:
            owner, module = owner_reference(), module_reference()
            if owner is None or module is None or module._parameters.get(key) is not came:
                return
            if has_another_wrapper(owner, came):
                return
            raise kind(
                f"the parameter {name} is another object than those that were wrapped in "
                f"DistributedDataParallel (load_state_dict(assign=True), a new layer, a "
                f"parametrization): its gradient is not averaged, and ranks would drift apart; "
                f"{_AGAIN}"
            )

        when_accumulated(parameter, check)

    def _raise_converted(self, index: int) -> NoReturn:
        parameter, (dtype, device) = self._parameters[index], self._types[index]
        name = self._names[index]
        if (parameter.dtype, parameter.device) != (dtype, device):
            reason = (
                f"the parameter {name} is of {parameter.dtype} on {parameter.device} now, and was "
                f"of {dtype} on {device} when it was wrapped in DistributedDataParallel"
            )
        else:
            reason = (
                f"the parameter {name} was of another dtype, or on another device, for a while "
                f"after it was wrapped in DistributedDataParallel (.double().float()), or a "
                f"parametrization has replaced its memory (Tensor.set_)"
            )
        raise self._kind(
            f"{reason}: its gradient is accumulated where nothing waits for it, and would not be "
            f"averaged; {_AGAIN}"
        )


def has_another_wrapper(owner: nn.Module, parameter: Tensor) -> bool:
    """Whether another DistributedDataParallel has a parameter as well, and may average it.

    The first call examines all objects of the process; later calls use its result.
    """
    known = _wrappers.setdefault(owner, {})
    wrapper = known.get(id(parameter))
    if wrapper is not None and wrapper() is not None:
        return True
    known.clear()
    for candidate in gc.get_objects():
        # By type: ``isinstance`` reads ``__class__``, which may be a property of any user's object.
        # ``issubclass`` would ask the abstract base class, millions of times.
        if not type.__subclasscheck__(TorchDDP, type(candidate)):
            continue
        if candidate is owner or not hasattr(candidate, "module"):
            continue
        # All of them at once: this is called for each of the others with its own gradient.
        known |= {id(wrapped): weakref.ref(candidate) for wrapped in candidate.module.parameters()}
    return id(parameter) in known


# For each wrapper, another wrapper that has a parameter, by the parameter's identity.
_wrappers: weakref.WeakKeyDictionary[nn.Module, dict[int, weakref.ref[nn.Module]]] = (
    weakref.WeakKeyDictionary()
)
