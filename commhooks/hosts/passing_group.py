"""Defines ``PassingGroup``, a process group that passes everything on to the group inside."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from commhooks._torch import COLLECTIVES
from commhooks.hook.tracing import not_traced
from commhooks.hosts.carrier import discard
from ddp_core._torch import add_backend, backend_of, device_types

__all__ = ["PassingGroup"]

_NOTHING_TO_CONNECT = SimpleNamespace(supports_splitting=False)


class PassingGroup(dist.ProcessGroup):
    """Has the ranks and the backends of another group, and sends by it.

    Args:
        inside: that group.
        owns: shuts it down together with this one; else it is somebody else's.
    """

    _name = ""

    def __init__(self, inside: dist.ProcessGroup, *, owns: bool) -> None:
        super().__init__(inside.rank(), inside.size())  # type: ignore[call-arg]
        self.inside, self._owns, self._shows_backends = inside, owns, owns
        kinds = dist.ProcessGroup.BackendType
        for device in device_types(inside):
            backend = backend_of(inside, device)
            # What is not passed on below goes straight to the backend, in C++.
            kind = getattr(kinds, backend.name().upper(), kinds.CUSTOM)
            add_backend(self, device, kind, backend)

    def shutdown(self) -> None:
        """Shuts down the group inside; one that is somebody else's goes on."""
        if self._owns:
            discard(self.inside)

    # torch tells its name to a group that it makes. The base class would hand name and description
    # to the backends, which are those of the group inside, and rename that: a DeviceMesh, which
    # finds groups by name, would then take this group for it.
    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        pass

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """Returns the name by which torch.distributed knows the group."""
        return self._name

    def show_backends(self) -> None:
        """Hears that torch.distributed has made the group."""
        self._shows_backends = True

    # torch connects the backends of a group that it makes, if the default group has a device: those
    # of a group that was there before would get a second communicator, and leave one behind.
    def _get_backend(self, device: torch.device) -> Any:
        return super()._get_backend(device) if self._shows_backends else _NOTHING_TO_CONNECT


def _passed_on(name: str) -> Any:
    # Reducers call collectives while torch.compile looks at every Python function that runs.
    @not_traced
    def method(self: PassingGroup, *args: Any, **options: Any) -> Any:
        return getattr(self.inside, name)(*args, **options)

    return method


for _name in COLLECTIVES:
    if hasattr(dist.ProcessGroup, _name):
        setattr(PassingGroup, _name, _passed_on(_name))
