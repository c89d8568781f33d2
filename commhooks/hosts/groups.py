"""Defines ``process_group``, which makes a process group that averages by a scheme."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist

from commhooks.core.scheme import Scheme
from commhooks.errors import RegistrationError
from commhooks.hook.binding import need_group
from commhooks.hosts.backend import Settings, make_known
from commhooks.hosts.scheme_group import NAME, SchemeGroup
from ddp_core import group_timeout, made_in_time

__all__ = ["process_group"]


def process_group(
    scheme: str | Scheme = "none",
    group: dist.ProcessGroup | None = None,
    *,
    least: int = 1024,
    seed: int = 0,
    **options: Any,
) -> SchemeGroup:
    """Makes a process group that averages by a scheme; all ranks of ``group`` call it.

    The scheme runs in all-reduce and reduce-scatter, all other collectives are those of ``group``.

    Args:
        scheme: a name or a scheme that keeps no memory.
        group: ranks and backends; the default group by default.
        least: number of entries from which on a floating tensor is compressed; smaller ones and
            integers travel as they are.
        seed: base of the scheme's random draws, the same on every rank.
        options: of the scheme, see :func:`commhooks.make`.

    Raises:
        RegistrationError: there is no process group, ``group`` runs a scheme already, or the
            scheme keeps memory, which belongs to names that a group does not know.
        MismatchError: the ranks differ in scheme, options or versions.

    Example:
        >>> group = commhooks.process_group("int8")
        >>> model = DistributedDataParallel(module, process_group=group)
    """
    need_group(group)
    inside = group or dist.group.WORLD
    if inside is None:
        raise RegistrationError(
            "process_group: no process group; call torch.distributed.init_process_group first"
        )
    if isinstance(inside, SchemeGroup):
        raise RegistrationError(
            f"process_group(scheme, group): {inside.hook} runs in it already; pass a group of "
            f"torch.distributed that runs no scheme (init_process_group or new_group)"
        )
    settings = Settings.of("process_group", scheme, least=least, seed=seed, **options)
    settings.compare("commhooks.process_group", inside)
    make_known()
    ranks = dist.get_process_group_ranks(inside)
    unsorted: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}
    make = partial(
        dist.new_group,
        ranks,
        timeout=group_timeout(inside),
        backend=NAME,
        pg_options=partial(SchemeGroup, inside, *settings),
        # Without it, the ranks of other groups would have to come, too.
        use_local_synchronization=len(ranks) != dist.get_world_size(),
        **unsorted,
    )
    made: SchemeGroup = made_in_time(inside, make)
    made.show_backends()
    return made
