"""The bases of schemes around one scheme, or around several."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from commhooks._bucket import Bucket, SchemeExchange
from commhooks._scheme import Scheme, children, walk

__all__ = ["Coalesced", "Several", "Wrapper", "any_error", "need_own_keys", "need_scheme"]


def need_scheme(owner: object, scheme: object) -> None:
    if not isinstance(scheme, Scheme):
        name = type(owner).__name__
        raise TypeError(
            f"{name}(scheme) wraps a Scheme, got {scheme!r}: "
            f"use commhooks.make(name, ...) for a name"
        )


def need_own_keys(owner: Scheme) -> None:
    """Raises where a scheme inside keeps its memory under the same keys as ``owner``.

    Both run in the same step, and each would write over what the other remembers.
    """
    for child in children(owner) if owner.own_keys else ():
        for inside in walk(child):
            shared = set(owner.own_keys) & set(inside.own_keys)
            if shared:
                raise ValueError(
                    f"{type(owner).__name__}({type(child).__name__}(...)): "
                    f"{type(inside).__name__} inside keeps {', '.join(sorted(shared))}, too; one "
                    f"of the two is enough"
                )


class Wrapper(Scheme):
    """A scheme around one scheme; takes over its flags."""

    scheme: Scheme

    def __post_init__(self) -> None:
        need_scheme(self, self.scheme)
        need_own_keys(self)

    @property
    def rounds(self) -> int:  # type: ignore[override]
        return self.scheme.rounds

    @property
    def biased(self) -> bool:  # type: ignore[override]
        return self.scheme.biased

    @property
    def variance(self) -> float:  # type: ignore[override]
        return self.scheme.variance

    @property
    def linear(self) -> bool:  # type: ignore[override]
        return self.scheme.linear

    @property
    def stateful(self) -> bool:  # type: ignore[override]
        return self.scheme.stateful

    @property
    def averages(self) -> bool:  # type: ignore[override]
        return self.scheme.averages

    @property
    def agrees(self) -> bool:  # type: ignore[override]
        return self.scheme.agrees

    @property
    def optimizes(self) -> bool:  # type: ignore[override]
        return self.scheme.optimizes

    @property
    def coalesce(self) -> bool:  # type: ignore[override]
        return self.scheme.coalesce

    def bucket_group(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Hashable:
        return self.scheme.bucket_group(name, shape, dtype)

    def memory_error(self, key: str, value: Tensor, parameter: torch.Size) -> str | None:
        return self.scheme.memory_error(key, value, parameter)

    def initial_memory(self, name: str, shape: torch.Size, bucket: Bucket) -> dict[str, Tensor]:
        return self.scheme.initial_memory(name, shape, bucket)


class Several(Scheme):
    """A scheme that runs one or another of ``schemes``; has the flags of all."""

    @property
    def schemes(self) -> list[Scheme]:
        """All that it chooses from."""
        raise NotImplementedError

    @property
    def rounds(self) -> int:  # type: ignore[override]
        return max(scheme.rounds for scheme in self.schemes)

    @property
    def biased(self) -> bool:  # type: ignore[override]
        return any(scheme.biased for scheme in self.schemes)

    @property
    def variance(self) -> float:  # type: ignore[override]
        return max(scheme.variance for scheme in self.schemes)

    @property
    def stateful(self) -> bool:  # type: ignore[override]
        return any(scheme.stateful for scheme in self.schemes)

    @property
    def averages(self) -> bool:  # type: ignore[override]
        return all(scheme.averages for scheme in self.schemes)

    @property
    def agrees(self) -> bool:  # type: ignore[override]
        return all(scheme.agrees for scheme in self.schemes)

    @property
    def optimizes(self) -> bool:  # type: ignore[override]
        return any(scheme.optimizes for scheme in self.schemes)

    @property
    def coalesce(self) -> bool:  # type: ignore[override]
        return any(scheme.coalesce for scheme in self.schemes)

    def memory_error(self, key: str, value: Tensor, parameter: torch.Size) -> str | None:
        return any_error(self.schemes, key, value, parameter)


@dataclass(frozen=True)
class Coalesced(Wrapper):
    """Exchanges all buckets of a step at once, when the last one is ready.

    Fewer and larger collectives, no overlap with the backward pass: for slow links with a long
    round trip, and for schemes whose payloads are tiny.
    """

    scheme: Scheme

    coalesce = True

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        return (yield from self.scheme.exchange(bucket))


def any_error(
    schemes: Sequence[Scheme], key: str, value: Tensor, parameter: torch.Size
) -> str | None:
    """None if the value fits one of the schemes, else what the first one that knows it says."""
    errors = [scheme.memory_error(key, value, parameter) for scheme in schemes]
    known = [error for error in errors if error != "unknown"]
    return None if None in known else (known[0] if known else "unknown")
