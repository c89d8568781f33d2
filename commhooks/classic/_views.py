"""Shows the memory of a PowerSGDState under torch's names: by bucket index, read-only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from commhooks.classic._hook_access import memory_of
from commhooks.classic._powersgd_models import OnModels
from commhooks.core.layout import Layout
from commhooks.hook.state import HookState
from commhooks.schemes.batched_powersgd import KEY as BATCHED_Q
from commhooks.schemes.powersgd import KEY as LAYERWISE_Q
from commhooks.wrappers.feedback import RESIDUAL

__all__ = ["MemoryByBucket"]

_NO_P = (
    "; left factors are computed from the right ones in every step, and are not kept: "
    "see q_memory_dict"
)


class BucketView(Mapping[int, Tensor]):
    """Maps bucket indices to tensors, as they were when the view was made.

    Args:
        name: name of the attribute, for messages.
        values: the tensors, by bucket index.
    """

    def __init__(self, name: str, values: Mapping[int, Tensor]) -> None:
        self._name, self._values = name, dict(values)

    def __getitem__(self, index: int) -> Tensor:
        if index in self._values:
            return self._values[index]
        note = _NO_P if self._name == "p_memory_dict" else ""
        raise KeyError(f"PowerSGDState.{self._name} has nothing of bucket {index!r}{note}")

    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"{self._name}({self._values!r})"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            f"PowerSGDState.{self._name} can be read only: memory is kept by parameter name, and "
            f"this shows it by bucket. To start without memory, register a new PowerSGDState"
        )

    # A script for torch's state may write here; a write to a copy would be lost without a word.
    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = _refuse


def _errors(hook: HookState, buckets: Mapping[int, Layout]) -> dict[int, Tensor]:
    """Returns the residual of each bucket, flat like the bucket."""

    def error(layout: Layout) -> Tensor | None:
        parts = [memory_of(hook).get(RESIDUAL, name) for name in layout.names]
        like = next((part for part in parts if part is not None), None)
        if like is None:
            return None
        # A parameter that joined later has no residual yet.
        sized = zip(parts, layout.sizes, strict=True)
        return torch.cat(
            [like.new_zeros(size) if part is None else part.reshape(-1) for part, size in sized]
        )

    return _by_bucket(error, buckets)


def _factors(hook: HookState, buckets: Mapping[int, Layout]) -> dict[int, Tensor]:
    """Returns the right factors of each bucket as torch lays them out, transposed to those here."""
    memory = memory_of(hook)

    def factors(layout: Layout) -> Tensor | None:
        whole = memory.get(BATCHED_Q, layout.names[0])  # of the whole bucket, under its first name
        if whole is not None:
            return whole.mT.clone()
        kept = [memory.get(LAYERWISE_Q, name) for name in layout.names]
        parts = [factor.mT.reshape(-1) for factor in kept if factor is not None]
        return torch.cat(parts) if parts else None

    return _by_bucket(factors, buckets)


def _by_bucket(
    value: Callable[[Layout], Tensor | None], buckets: Mapping[int, Layout]
) -> dict[int, Tensor]:
    values = {index: value(layout) for index, layout in buckets.items()}
    return {index: tensor for index, tensor in values.items() if tensor is not None}


class MemoryByBucket:
    """Gives PowerSGDState its memory under torch's names; a mixin."""

    __slots__ = ()
    random_seed: int
    _rng: Any
    _on_models: OnModels

    @property
    def error_dict(self) -> Mapping[int, Tensor]:
        """Copies of what this rank has not sent yet, by bucket index, flat like the bucket.

        Buckets are those of the latest compressed step; before the first one there are none.

        Raises:
            RegistrationError: the state is in use on several models.
        """
        return BucketView("error_dict", self._by_bucket("error_dict", _errors))

    @property
    def q_memory_dict(self) -> Mapping[int, Tensor]:
        """Copies of the right factors that the next step starts from, by bucket index.

        Flat, one matrix after the other, for ``powerSGD_hook``; of shape (side, rank) for
        ``batched_powerSGD_hook``.

        Raises:
            RegistrationError: the state is in use on several models.
        """
        return BucketView("q_memory_dict", self._by_bucket("q_memory_dict", _factors))

    @property
    def p_memory_dict(self) -> Mapping[int, Tensor]:
        """Always empty: left factors are computed in every step, and are not kept."""
        return BucketView("p_memory_dict", {})

    @property
    def rng(self) -> Any:
        """Returns a NumPy generator seeded by ``random_seed``, as in torch.

        No hook draws from it: random factors depend only on the parameter's name, the step and
        ``random_seed``, so that a resumed run draws the same ones.
        """
        if self._rng is None:
            from numpy.random import RandomState

            self._rng = RandomState(self.random_seed)
        return self._rng

    def _by_bucket(
        self, name: str, values: Callable[[HookState, Mapping[int, Layout]], dict[int, Tensor]]
    ) -> dict[int, Tensor]:
        inner = self._on_models.only(name)
        if inner is None:
            return {}
        buckets = {index: inner.buckets[index].layout for index in sorted(inner.buckets)}
        return values(inner.hook, buckets)
