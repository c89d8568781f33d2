"""Runs a scheme in the groups of torchft, whose ranks change with the quorum."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from commhooks.core.scheme import Scheme, slots_of
from commhooks.errors import RegistrationError
from commhooks.hook.call import Call
from commhooks.hosts.collectives import Collectives
from commhooks.wrappers.make import describe, make

__all__ = ["calls_of", "fit_for_torchft", "group_inside"]

# What runs a scheme in a group of torchft's, and the group of torch's that was inside then.
_made: WeakKeyDictionary[Any, dict[tuple[str, str], tuple[Collectives, Any]]] = WeakKeyDictionary()


def fit_for_torchft(scheme: Scheme) -> Scheme:
    """Returns a scheme that can make sums of tensors without names.

    Raises:
        RegistrationError: it keeps memory between calls, or returns no mean.
    """
    if slots_of(scheme):
        raise RegistrationError(
            f"torchft: {scheme} keeps memory of each tensor between calls, and torchft does not "
            f"name tensors; commhooks.hosts.torchft.register keeps it by parameter"
        )
    one = torch.empty(1, dtype=torch.float32, device="cpu")
    Call("all_reduce", one, one, total=True).need(scheme)
    return scheme


def group_inside(process_group: Any) -> Any:
    """Returns the group of torch's that torchft's wrappers have inside."""
    while getattr(process_group, "_pg", None) is not None:
        process_group = process_group._pg
    return process_group


def calls_of(
    process_group: Any, device: torch.device, scheme: str | Scheme, options: dict[str, Any]
) -> Collectives:
    """Returns what makes a call, which has followed the quorum."""
    named = scheme if isinstance(scheme, str) else describe(scheme)
    key, made = (named, repr(sorted(options.items()))), _made.setdefault(process_group, {})
    calls, before = made.get(key, (None, None))
    if calls is None:
        built = fit_for_torchft(make(scheme, **options))
        # A group of this rank alone until there is a quorum; nothing is sent in it.
        calls = Collectives(built, dist.ProcessGroup(0, 1))  # type: ignore[call-arg]
    inside = group_inside(process_group)
    if inside is not before:
        # Not made anew: random draws would begin again with every quorum.
        calls._binding.also_on = device
        calls.change_group(inside)
        made[key] = (calls, inside)
    return calls
