"""Makes groups of torch's own backends that torch.distributed does not know.

Whoever makes a group because torch.distributed asks for one cannot ask it for another: there may be
no default group yet, and the ranks that are not in the group do not come.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from commhooks._torch import set_timeout
from commhooks.errors import RegistrationError
from ddp_core._torch import (
    add_backend,
    backend_of,
    device_types,
    group_ranks,
    set_default_backend,
    set_group_name,
)

__all__ = ["carrier", "discard"]


def carrier(
    store: Any, ranks: Sequence[int], rank: int, timeout: timedelta | None, name: str
) -> dist.ProcessGroup:
    """Makes a group with the backends of the default group, or those that it would have.

    Args:
        store: seen by all ranks of the group, under keys that no other group has.
        ranks: of the group, as ranks of the job.
        rank: of this process in the group.
        timeout: of a collective; torch's own by default.
        name: for torch's messages.

    Raises:
        RegistrationError: the default group has a backend that is neither Gloo nor NCCL.
    """
    group: dist.ProcessGroup = dist.ProcessGroup(store, rank, len(ranks))
    made: Any = group
    times = {} if timeout is None else {"timeout": timeout}
    backends: dict[str, Any] = {}
    for device, backend in _backends_of_default().items():
        if backend not in backends:
            prefix = dist.distributed_c10d.PrefixStore(f"{backend}/", store)
            if backend == "GLOO":
                backends[backend] = dist.ProcessGroupGloo(prefix, rank, len(ranks), **times)
            else:
                options: Any = dist.ProcessGroupNCCL.Options()
                options.group_name, options.global_ranks_in_group = name, list(ranks)
                set_timeout(options, timeout)
                backends[backend] = dist.ProcessGroupNCCL(prefix, rank, len(ranks), options)
        kind = getattr(dist.ProcessGroup.BackendType, backend)
        add_backend(made, torch.device(device), kind, backends[backend])
        set_default_backend(made, kind)
    set_group_name(made, name)
    # A state is saved under the rank in the job.
    group_ranks()[group] = {one: place for place, one in enumerate(ranks)}
    return group


def discard(group: dist.ProcessGroup) -> None:
    """Shuts down a group of :func:`carrier`. Safe to call twice."""
    group_ranks().pop(group, None)
    group.shutdown()


def _backends_of_default() -> dict[str, str]:
    """Returns the backend for each type of device."""
    default: Any = dist.group.WORLD
    if default is None:  # it is the default group that is made
        with_nccl = torch.cuda.is_available() and dist.is_nccl_available()
        return {"cpu": "GLOO", **({"cuda": "NCCL"} if with_nccl else {})}
    found = {one.type: backend_of(default, one).name().upper() for one in device_types(default)}
    others = sorted(set(found.values()) - {"GLOO", "NCCL"})
    if others:
        raise RegistrationError(
            f"'commhooks' sends over Gloo and NCCL, and the default group has {', '.join(others)}; "
            f"commhooks.process_group(scheme, group) takes a group of any backend"
        )
    return found
