"""Defines the base classes of schemes that run one other scheme, or one of several."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from commhooks.core._bucket import Bucket, SchemeExchange
from commhooks.core._scheme import Scheme, children, walk
from commhooks.core._traits import Traits, worst

__all__ = ["Choice", "Coalesced", "Wrapper", "check_is_scheme", "check_own_keys"]


def check_is_scheme(owner: object, scheme: object) -> None:
    """Raises unless ``scheme`` is a scheme; ``owner`` is the wrapper that is made."""
    if not isinstance(scheme, Scheme):
        name = type(owner).__name__
        raise TypeError(
            f"{name}(scheme) wraps a Scheme, got {scheme!r}: "
            f"use commhooks.make(name, ...) for a name"
        )


def check_own_keys(owner: Scheme) -> None:
    """Raises if a scheme inside keeps its memory under the same keys as ``owner``.

    Both run in the same step, and each would overwrite the values of the other.
    """
    keys = {slot.key for slot in owner.keeps}
    for child in children(owner) if keys else ():
        for inside in walk(child):
            shared = keys & {slot.key for slot in inside.keeps}
            if shared:
                raise ValueError(
                    f"{type(owner).__name__}({type(child).__name__}(...)): "
                    f"{type(inside).__name__} inside keeps {', '.join(sorted(shared))}, too; one "
                    f"of the two is enough"
                )


class Wrapper(Scheme):
    """Runs one scheme inside, and has its traits unless a subclass replaces some."""

    scheme: Scheme

    def __post_init__(self) -> None:
        check_is_scheme(self, self.scheme)
        check_own_keys(self)

    @property
    def traits(self) -> Traits:
        return self.scheme.traits

    def bucket_group(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Hashable:
        return self.scheme.bucket_group(name, shape, dtype)


class Choice(Scheme):
    """Runs one of several schemes, chosen by step or by parameter."""

    @property
    def schemes(self) -> list[Scheme]:
        """Returns the schemes to choose from."""
        raise NotImplementedError

    @property
    def traits(self) -> Traits:
        return worst(scheme.traits for scheme in self.schemes)


@dataclass(frozen=True)
class Coalesced(Wrapper):
    """Exchanges all buckets of a step together, when the last one is ready.

    Collectives are fewer and larger, and do not overlap with the backward pass: for slow links with
    a long round trip, and for schemes whose payloads are tiny.
    """

    scheme: Scheme

    @property
    def traits(self) -> Traits:
        return self.scheme.traits._replace(coalesce=True)  # the hook joins buckets by this trait

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        return (yield from self.scheme.exchange(bucket))
