"""Defines ``process_group``, which makes a process group whose all-reduce runs a scheme."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch.distributed as dist

from commhooks.core.scheme import Scheme
from commhooks.core.settings import check_seed, fitting
from commhooks.errors import RegistrationError
from commhooks.hook.binding import need_group
from commhooks.hook.handshake import MEETING, handshake
from commhooks.hosts.scheme_group import NAME, SchemeGroup
from commhooks.wrappers.make import describe, make
from ddp_core import group_timeout

__all__ = ["process_group"]


def process_group(
    scheme: str | Scheme = "none",
    group: dist.ProcessGroup | None = None,
    *,
    least: int = 1024,
    seed: int = 0,
    **options: Any,
) -> SchemeGroup:
    """Makes a process group whose all-reduce runs a scheme; all ranks of ``group`` call it.

    Args:
        scheme: a name or a scheme. One that keeps memory needs ``attach(model)`` before the first
            step.
        group: ranks and backends; the default group by default.
        least: number of entries from which on a floating tensor is compressed; smaller ones,
            integers and all other collectives travel as they are.
        seed: base of the scheme's random draws, the same on every rank.
        options: of the scheme, see :func:`commhooks.make`.

    Raises:
        RegistrationError: there is no process group, or ``group`` runs a scheme already.
        MismatchError: the ranks differ in scheme, options or versions.

    Example:
        >>> group = commhooks.process_group("int8")
        >>> model = DistributedDataParallel(module, process_group=group)
    """
    need_group(group)
    inside = group or dist.group.WORLD
    if inside is None or isinstance(inside, SchemeGroup):
        what = "no process group" if inside is None else f"{inside.hook} runs in it already"
        raise RegistrationError(
            f"process_group(scheme, group): {what}; it takes a group of torch.distributed "
            f"(init_process_group or new_group)"
        )
    built, least = make(scheme, **options), fitting("process_group", "least", least, int)
    facts = {"scheme and options": describe(built), "least": least, "seed": seed}
    handshake("commhooks.process_group", facts, inside, MEETING)
    ranks = dist.get_process_group_ranks(inside)
    _register_backend()
    unsorted: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}
    made: SchemeGroup = dist.new_group(
        ranks,
        timeout=group_timeout(inside),
        backend=NAME,
        pg_options=partial(SchemeGroup, inside, built, least, check_seed(seed)),
        # Without it, the ranks of other groups would have to come, too.
        use_local_synchronization=len(ranks) != dist.get_world_size(),
        **unsorted,
    )
    return made


@cache
def _register_backend() -> None:
    # At the first call and not when commhooks is imported: torch treats "cpu:gloo" and the like
    # in another way once it knows of any further backend.
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(_: Any, made: Any) -> SchemeGroup:
    """Makes the group when ``torch.distributed.new_group`` asks for it."""
    if not isinstance(made, partial):
        raise RegistrationError(
            "new_group(backend='commhooks'): it needs a scheme and a group that carries the bytes; "
            "commhooks.process_group(scheme, group) makes both"
        )
    group: SchemeGroup = made()
    return group
