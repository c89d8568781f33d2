"""Defines ``GatheredParameters``: the collectives by which FSDP2 gathers a model's parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from commhooks._torch import DefaultAllGather, fsdp2_gather, owner_of, set_fsdp2_gather
from commhooks.core.scheme import Scheme
from commhooks.hook.only_here import OnlyHere
from commhooks.hosts.collectives import Collectives
from commhooks.hosts.fsdp2_differences import DifferencesAllGather
from commhooks.wrappers.make import make

__all__ = ["GatheredParameters"]


class GatheredParameters(Collectives):
    """Gathers the parameters of FSDP2 modules; see :func:`commhooks.hosts.gather_parameters`.

    Args:
        scheme, group, seed: see :class:`commhooks.Collectives`.
        allowed: returns what is to run for a scheme, or raises RegistrationError.
    """

    def __init__(
        self,
        scheme: Scheme,
        group: dist.ProcessGroup,
        *,
        seed: int,
        allowed: Callable[[str | Scheme], Scheme],
    ) -> None:
        super().__init__(scheme, group, seed=seed)
        self.stays = "FSDP2 decides over which ranks it gathers; shard a model over the others"
        self._allowed = allowed
        self._groups: Sequence[Any] = ()
        self._handles: list[Any] = []  # of hooks of modules

    def install(self, groups: Sequence[Any], gather: Callable[[Any], Any]) -> None:
        """Makes FSDP2's groups of parameters gather by ``gather(group)``."""
        self._groups = groups
        for group in groups:
            one = gather(group)
            set_fsdp2_gather(group, one)
            if isinstance(one, DifferencesAllGather):
                # After a load of the model, of one of its modules, or of a part of that.
                begins = OnlyHere(one.begin_anew)
                for module in _owners(group):
                    self._handles.append(module.register_load_state_dict_post_hook(begins))

    def begin_anew(self) -> None:
        """Makes the next forward pass send parameters, not differences; all ranks call it.

        For after other parameters were written into the model in place, as their differences are
        rounded as coarsely as they are large. ``load_state_dict``, of the model or of a module in
        it, does it by itself. A backward pass has the weights of its forward pass all the same.
        """
        for group in self._groups:
            if isinstance(present := fsdp2_gather(group), DifferencesAllGather):
                present.begin_anew()

    def switch(self, scheme: str | Scheme, **options: Any) -> None:
        """Gathers by another scheme from the next call on; "none" sends parameters as they are."""
        super().switch(self._allowed(make(scheme, **options) if options else scheme))

    def close(self) -> None:
        """Ends all calls; FSDP2 gathers by itself from then on. Safe to call twice."""
        for group in self._groups:
            set_fsdp2_gather(group, DefaultAllGather())
        for handle in self._handles:
            handle.remove()
        self._groups, self._handles = (), []
        super().close()


def _owners(group: Any) -> set[nn.Module]:
    """Returns the modules of which an FSDP2 group's parameters are attributes.

    Each of them may be loaded by itself; the module that FSDP2 wraps may only be around them.
    """
    places = [owner_of(one) for one in group.fsdp_params]
    return {module for one in places for module in (one.module, *one.shared_modules)}
