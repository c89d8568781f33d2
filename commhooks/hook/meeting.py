"""Defines ``Meeting``: how a hook settles its model and its ranks, and meets the other ranks."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn

from commhooks.checkpoint.form import SavedBuckets
from commhooks.core.names import whole_name
from commhooks.core.scheme import Scheme
from commhooks.core.user_line import user_line
from commhooks.errors import RegistrationError
from commhooks.hook.agreement import facts_of, need_own_memory
from commhooks.hook.binding import Binding
from commhooks.hook.continuation import Continuation
from commhooks.hook.engine import Engine
from commhooks.hook.exactly import Exactly, shared_and_rounded
from commhooks.hook.handshake import handshake
from commhooks.hook.parameters import Parameters
from commhooks.verify import Verification
from commhooks.wrappers.per_parameter import warn_of_idle_rules
from ddp_core import Drivers, MismatchError, MissingRankError

__all__ = ["Meeting"]

# Facts that ranks with other parts of the gradients have in common, too: they decide whether a rank
# takes part in the verdict of a step.
_SHARED = (
    "host",
    "scheme and options",
    "commhooks version",
    "seed",
    "step",
    "verify",
    "action of verify",
)


class Meeting:
    """Knows the model and the ranks of a hook; the base of what runs on them."""

    _engine: Engine
    _binding: Binding
    _drivers: Drivers
    _continuation: Continuation
    verification: Verification | None
    _agreed: bool
    _further_rounds: int
    # Names the run of these ranks: the present one, and the one before the ranks last changed.
    _run: tuple[str, str]

    @property
    def scheme(self) -> Scheme:
        """Returns the scheme that runs, wrappers included."""
        return self._engine.scheme

    @property
    def step(self) -> int:
        """Returns the number of synchronised backward passes so far."""
        return self._engine.step

    @property
    def _parameters(self) -> Parameters:
        return self._binding.parameters

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Returns the ranks to average over."""
        self._bind()
        return self._binding.group()

    def saved_plan(self) -> str:
        """Returns what a hook that chooses its scheme goes on with; empty if it chooses none."""
        return ""

    def follow_plan(self, plan: str, scheme: str) -> None:
        """Runs what the ranks run that this one joins; a hook that chooses its scheme does so.

        Args:
            plan, scheme: what :meth:`saved_plan` returns there, and the description of the scheme.
        """

    def ranks_changed(self) -> None:
        """Hears, on all ranks, that they have changed and agreed."""

    def _take_up(self, buckets: SavedBuckets) -> None:
        """Continues with the buckets of a saved state."""
        core = self._binding.core_telling(self)
        self._continuation.take_up(buckets, core, self._agree_after_load)

    # ---- model and ranks

    @property
    def _bound(self) -> bool:
        return self._engine.world_size > 0

    def _adopt(self, model: nn.Module) -> None:
        """Takes the parameter names and the process group from ``model``."""
        self._binding.adopt(model)
        warn_of_idle_rules(self.scheme, self._parameters)

    def _bind(self) -> None:
        """Looks up the model and the ranks, until both are known."""
        # Repeated while there is no model: a state may be asked for its rank before it has one.
        if self._bound and len(self._parameters):
            return
        self._binding.group()  # raises before anything is looked up
        model = self._binding.find_model(self)
        if model is not None:
            self._adopt(model)
        group = self._binding.group()
        self._engine.rank, self._engine.world_size = group.rank(), group.size()

    def _facts(self, scheme: Scheme) -> dict[str, Any]:
        """Returns the facts that must be the same on all ranks."""
        to_come = self._continuation.to_come(self._agreed)
        facts = facts_of(scheme, self._engine, self._binding, to_come)
        return facts | {
            "verify": getattr(self.verification, "every", None),
            "action of verify": getattr(self.verification, "action", None),
            # Also of frozen ones, which are no facts without verification.
            "parameters to compare": list(self._binding.values()) if self.verification else [],
        }

    def _agree_after_load(self) -> None:
        if not self._agreed:
            self.agree("the first step with this hook, or after load_state_dict")

    def agree(
        self, call: str, also: Mapping[str, Any] | None = None, limit: timedelta | None = None
    ) -> None:
        """Compares facts with the other ranks and opens the driver's groups; a collective.

        Args:
            also: further facts that must be the same on all ranks, by name.
            limit: longest wait for the other ranks; at most, and by default, the group's timeout.
        """
        self._bind()
        devices = self._binding.devices()
        self._drivers.check(devices)
        facts = {**(also or {}), **self._facts(self.scheme)}
        told = self._meet(call, facts, limit, tells=self._run[0] or uuid.uuid4().hex)
        self._run = (told[0], self._run[1])
        # After the handshake, which compares the memory's origin: a pickled state on a wrong rank
        # is then an error on all ranks, and not on one rank while the others wait.
        need_own_memory(self._engine, self._binding)
        self._send_exactly(self.scheme)
        self._agreed = self._continuation.handed_over = True
        # On a GPU one group serves all rounds (``ddp_core.Drivers``): there are no lanes.
        if devices <= {"cpu"}:
            self._drivers.open_lanes(self._binding.group())
        if self.verification is not None:
            binding = self._binding
            self.verification.open(
                binding.group(),
                devices,
                self._drivers.join,
                binding.beside,
                binding.values,
                owner=self,
            )

    def _send_exactly(self, scheme: Scheme) -> None:
        """Averages exactly, from the next step on, what ranks of tensor parallelism share.

        Warns where ``scheme`` returns something else than a mean, whose place a mean cannot take.
        """
        shared = shared_and_rounded(scheme, self._parameters)
        if shared and scheme.traits.returns != "mean":
            names = sorted({whole_name(name) for name in shared})
            warnings.warn(
                f"{scheme} rounds the gradients of {', '.join(names[:3])} ({len(names)} "
                f"parameters that ranks of tensor parallelism have in common) together with those "
                f"of pieces, differently on each of these ranks, where these parameters drift "
                f"apart. Use a scheme that returns the mean of gradients: it sends them exactly",
                RuntimeWarning,
                stacklevel=user_line(),
            )
            shared = frozenset()
        exactly = self._engine.exactly = Exactly(shared)
        self._drivers.ensure(scheme.traits.rounds + exactly.rounds + self._further_rounds)

    def _meet(
        self,
        call: str,
        facts: Mapping[str, Any],
        limit: timedelta | None = None,
        *,
        tells: object = None,
    ) -> list[Any]:
        with self._binding.on_device():
            try:
                told = handshake(call, facts, self._binding.group(), limit, tells=tells)
            except MissingRankError:
                raise
            except MismatchError as error:
                # The others would wait for this rank where they meet those beside them.
                with suppress(MismatchError):
                    self._meet_beside(call, facts, limit, str(error))
                raise
            self._meet_beside(call, facts, limit)
            return told

    def _meet_beside(
        self, call: str, facts: Mapping[str, Any], limit: timedelta | None, fault: str = ""
    ) -> None:
        """Compares facts with ranks that have other parts of the gradients; a collective."""
        shared = {name: facts[name] for name in _SHARED if name in facts}
        for group in self._binding.beside:
            handshake(call, {"what keeps a rank from it": fault or None, **shared}, group, limit)

    def _check_ranks(self) -> None:
        """Raises if the hook's group has other ranks than it had: some change under their users."""
        group, engine = self._binding.group(), self._engine
        if group.size() != engine.world_size or group.rank() != engine.rank:
            raise RegistrationError(
                f"the ranks of the hook's {type(group).__name__} have changed: this was rank "
                f"{engine.rank} of {engine.world_size}, and is rank {group.rank()} of "
                f"{group.size()} now, which the hook was not told. Call hook.change_group(group) "
                f"between two steps; for torchft use commhooks.hosts.torchft.register"
            )
