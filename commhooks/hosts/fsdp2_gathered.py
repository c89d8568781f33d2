"""Defines ``GatheredParameters``: the collectives by which FSDP2 gathers a model's parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from commhooks.core.scheme import Scheme
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

    def install(self, model: nn.Module, groups: Sequence[Any], gather: Callable[[], Any]) -> None:
        """Makes FSDP2's groups of parameters of a model gather by ``gather()``."""
        self._groups = groups
        for group in groups:
            group._all_gather_comm = gather()
        me = weakref.ref(self)

        def loaded(*_: Any) -> None:
            collectives = me()
            if collectives is not None:
                collectives.begin_anew()

        model.register_load_state_dict_post_hook(loaded)

    def begin_anew(self) -> None:
        """Makes the next forward pass send parameters, not differences; all ranks call it.

        For after other parameters were written into the model, as their differences are rounded as
        coarsely as they are large. ``load_state_dict`` of the model does it by itself.
        """
        self.wait()
        for group in self._groups:
            if isinstance(group._all_gather_comm, DifferencesAllGather):
                group._all_gather_comm.held = None

    def switch(self, scheme: str | Scheme, **options: Any) -> None:
        """Gathers by another scheme from the next call on; "none" sends parameters as they are."""
        super().switch(self._allowed(make(scheme, **options) if options else scheme))

    def close(self) -> None:
        """Ends all calls; FSDP2 gathers by itself from then on. Safe to call twice."""
        for group in self._groups:
            group._all_gather_comm = DefaultAllGather()
        self._groups = ()
        super().close()
