"""Defines ``UnnamedCalls``: the collectives of a process group, which knows no names of tensors."""

from __future__ import annotations

from typing import Any

from commhooks.core.scheme import Scheme, slots_of
from commhooks.errors import RegistrationError
from commhooks.hosts.collectives import Collectives
from commhooks.wrappers.make import make

__all__ = ["UnnamedCalls"]


class UnnamedCalls(Collectives):
    """Runs the calls of a process group, in which tensors of one size are not told apart."""

    def switch(self, scheme: str | Scheme, **options: Any) -> None:
        """Runs another scheme from the next call on, which keeps no memory."""
        built = make(scheme, **options)
        if slots_of(built):
            raise RegistrationError(
                f"process_group(...).hook.switch: {built} keeps memory by parameter, and a group "
                f"knows no names; group.attach(model) tells them"
            )
        super().switch(built)
