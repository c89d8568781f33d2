"""Describes tensors that are exchanged by name and belong to no model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import torch

from commhooks.core.slot import Slot
from commhooks.hook.parameters import Parameter, Parameters

__all__ = ["NamedTensors"]


class NamedTensors(Parameters):
    """Holds names, shapes and dtypes of tensors, which are declared as they come."""

    def __iter__(self) -> Iterator[Parameter]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def declare(self, name: str, shape: torch.Size, dtype: torch.dtype) -> None:
        """Adds a tensor, or checks that it is the one that was declared before.

        Raises:
            ValueError: a tensor of this name has another shape or dtype.
        """
        known = self._by_name.get(name)
        if known is None:
            self._by_name[name] = Parameter(name, shape, dtype, tuple(range(len(shape))))
        elif (known.shape, known.dtype) != (shape, dtype):
            raise ValueError(
                f"name={name!r} is a tensor of shape {tuple(known.shape)} and {known.dtype}, which "
                f"the scheme's memory belongs to; got shape {tuple(shape)} and {dtype}: give every "
                f"tensor a name of its own"
            )

    def carries(self, slot: Slot) -> bool:
        return False  # a name is the user's, whatever is in it: nothing is a piece of another

    def takes(self, names: Collection[str]) -> bool:
        return True

    def and_also(self, other: NamedTensors) -> NamedTensors:
        """Returns the tensors of both; those of ``other`` where names are equal."""
        both = NamedTensors()
        both._by_name = {**self._by_name, **other._by_name}
        return both

    def having(self, names: Iterable[str]) -> NamedTensors:
        """Returns the tensors of some names, which there need not be."""
        some = NamedTensors()
        some._by_name = {name: self._by_name[name] for name in names if name in self._by_name}
        return some

    def described(self, name: str) -> tuple[list[int], str] | None:
        """Returns shape and dtype of a tensor in a form for JSON; None if it is not declared."""
        known = self._by_name.get(name)
        return None if known is None else (list(known.shape), str(known.dtype).split(".")[1])
