"""Defines ``register_backend``, which makes "commhooks" the name of a backend of torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import torch.distributed as dist

from commhooks.core.scheme import Scheme
from commhooks.core.settings import check_seed, fitting
from commhooks.errors import RegistrationError
from commhooks.hook.handshake import MEETING, handshake
from commhooks.hosts.carrier import carrier
from commhooks.hosts.scheme_group import NAME, SchemeGroup, need_no_memory
from commhooks.wrappers.make import describe, make

__all__ = ["Settings", "make_known", "register_backend"]


class Settings(NamedTuple):
    """Holds what a group of a scheme is made with, see :func:`commhooks.process_group`."""

    scheme: Scheme
    least: int
    seed: int

    @classmethod
    def of(
        cls,
        call: str,
        scheme: str | Scheme = "none",
        *,
        least: int = 1024,
        seed: int = 0,
        **options: Any,
    ) -> Settings:
        """Checks the arguments of ``call``."""
        built = make(scheme, **options)
        need_no_memory(call, built)
        return cls(built, fitting(call, "least", least, int), check_seed(seed))

    def compare(self, call: str, group: dist.ProcessGroup) -> None:
        """Raises MismatchError on all ranks of ``group`` where theirs differ."""
        facts = {"scheme and options": describe(self.scheme), "least": self.least}
        handshake(call, {**facts, "seed": self.seed}, group, MEETING)


_default: Settings | None = None


def register_backend(
    scheme: str | Scheme = "none", *, least: int = 1024, seed: int = 0, **options: Any
) -> None:
    """Makes "commhooks" the name of a backend, for programs that take one.

    ``torch.distributed.new_group(backend="commhooks")`` and ``init_process_group("commhooks")``
    then make groups as :func:`commhooks.process_group` does, over Gloo and NCCL. A group may have
    another scheme: ``pg_options`` is a name, a scheme, or a dict of these arguments.

    Args:
        scheme, least, seed, options: of groups without ``pg_options``, see
            :func:`commhooks.process_group`.

    Example:
        >>> commhooks.register_backend("int8")
        >>> group = torch.distributed.new_group(backend="commhooks")
        >>> model = DistributedDataParallel(module, process_group=group)
    """
    global _default
    _default = Settings.of("register_backend", scheme, least=least, seed=seed, **options)
    make_known()


@cache
def make_known() -> None:
    """Tells torch the name of the backend."""
    # Not when commhooks is imported: torch treats "cpu:gloo" and the like in another way once it
    # knows of any further backend.
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(asked: Any, given: Any) -> SchemeGroup:
    """Makes the group when torch.distributed asks for it."""
    if isinstance(given, partial):  # of process_group, which has a group that carries the bytes
        made: SchemeGroup = given()
        return made
    call = "new_group(backend='commhooks')"
    settings = _settings(call, given)
    size = range(asked.group_size)
    ranks = asked.global_ranks_in_group or size  # those of the default group are not told
    name = f"{asked.group_id}/carrier"
    inside = carrier(asked.store, ranks, asked.group_rank, asked.timeout, name)
    settings.compare(call, inside)
    return SchemeGroup(inside, *settings, owns=True)


def _settings(call: str, given: Any) -> Settings:
    if given is None:
        if _default is None:
            raise RegistrationError(
                f"{call}: which scheme? commhooks.register_backend('int8') before, or "
                f"pg_options='int8'"
            )
        return _default
    if isinstance(given, Mapping):
        return Settings.of(call, **given)
    if isinstance(given, (str, Scheme)):
        return Settings.of(call, given)
    raise RegistrationError(
        f"{call}: pg_options is a name, a scheme, or a dict of the arguments of "
        f"commhooks.register_backend, got {type(given).__name__}"
    )
