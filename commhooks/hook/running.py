"""Defines ``Running``: what a hook does while its model trains, and what ``ddp_core`` tells it."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from commhooks.checkpoint.form import SavedBuckets
from commhooks.core.scheme import Scheme
from commhooks.errors import RegistrationError
from commhooks.hook.agreement import facts_of, need_own_memory
from commhooks.hook.attendance import Attendance
from commhooks.hook.binding import Binding
from commhooks.hook.capture import need_bucket, need_no_capture
from commhooks.hook.continuation import Continuation
from commhooks.hook.engine import Engine
from commhooks.hook.handshake import handshake
from commhooks.hook.ledger import Ledger
from commhooks.hook.parameters import Parameters
from commhooks.hook.runner import Runner
from commhooks.hook.verify import Verification, need_verifiable
from commhooks.wrappers.per_parameter import warn_of_idle_rules
from ddp_core import Drivers

__all__ = ["Running"]

Future = torch.futures.Future


class Running:
    """Runs a scheme on a model, bucket by bucket; the base of :class:`commhooks.HookState`.

    Attributes:
        ledger: bytes and times of what was sent, see :class:`commhooks.hook.Ledger`.
        verification: compares some steps with the dense mean; None if that was not asked for.
    """

    def _init(
        self,
        scheme: Scheme,
        seed: int,
        history: int,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        # Not ``__init__``: an unpickled state comes here without it. The ranks are settled by
        # ``_bind``, since a state may be made before the process group; 0 ranks means "not yet".
        self._engine = Engine(scheme, rank=-1, world_size=0, seed=seed)
        self.ledger = Ledger(history)
        self._binding = Binding(process_group)
        self._drivers = Drivers(scheme.traits.rounds)
        self._runner = Runner(self._engine, self._drivers, self.ledger, self._binding)
        self._continuation = Continuation(self._binding, self._runner)
        self._attendance = Attendance()
        self.verification: Verification | None = None
        self._agreed = False
        self._closed = False
        # Names the run of these ranks, the present one and the one before the ranks last changed.
        self._run = ("", "")
        self._left: tuple[int, ...] = ()  # ranks of the present group that have handed over
        self.stays = ""  # why its host does not let the hook change its ranks

    @property
    def scheme(self) -> Scheme:
        """Returns the scheme that runs, wrappers included."""
        return self._engine.scheme

    @property
    def step(self) -> int:
        """Returns the number of synchronised backward passes so far."""
        return self._engine.step

    @property
    def calls(self) -> int:
        """Returns the number of buckets that came to the hook in this process."""
        return self._attendance.calls

    @property
    def bucket_cap_mb(self) -> float | None:
        """Returns the bucket size for ``ddp_core``, or None for its default.

        Larger for several rounds: a small payload is sent quickly, but each round waits for an
        answer.
        """
        # PowerSGD at 1 Gbit/s is 6 % slower with ddp_core's 8 MiB than with 25; a single round is
        # faster with 8 (docs/design/reducer.md).
        return 25 if self.scheme.traits.rounds > 1 else None

    @property
    def _parameters(self) -> Parameters:
        return self._binding.parameters

    # ---- what the hook calls

    def start(self, bucket: Any) -> Future[Tensor]:
        """Starts the exchange of one bucket and returns the future of its averaged gradient."""
        need_bucket(bucket)
        if self._closed:
            raise RegistrationError(
                "the hook was closed (HookState.close), but the model still trains with it; "
                "wrap the model in a new DistributedDataParallel, or close after training"
            )
        if self._left:
            raise RegistrationError(
                f"HookState.leave: ranks {list(self._left)} have handed over what they kept; call "
                f"change_group with a group of the others before the next step"
            )
        need_no_capture(bucket.buffer().device, self.scheme, agreed=self._agreed)
        # A collective. Every rank comes here with its first bucket, before it exchanges anything.
        self._agree_after_load()
        self._attendance.calls += 1
        self._binding.check_group()
        self._check_ranks()
        if self.verification is not None:
            need_verifiable(bucket.buffer().device)
            self.verification.step_begins(self.step)
        return self._runner.start(
            bucket,
            self._binding.group(),
            finds_unused=self._binding.may_leave_alone(bucket),
            told=self._binding.core_telling(self) is not None,
        )

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

    # ---- what ddp_core calls

    def no_more_buckets(self) -> None:
        """Starts the exchange of buckets that were held back; backward has ended."""
        self._runner.no_more_buckets()

    def step_landed(self, left_alone: Iterable[Tensor] = ()) -> None:
        """Ends the step: the averaged gradients are in ``.grad``.

        Args:
            left_alone: parameters that no rank has used, whose gradient was not written.
        """
        self._runner.step_landed(left_alone)

    def step_abandoned(self) -> None:
        """Drops the step, whose backward pass has raised."""
        self._runner.step_abandoned()

    def attached_to_model(self, model: nn.Module) -> None:
        """Adopts the model on which the hook runs from the next step on.

        Hands the model the saved buckets of a state that was loaded before.
        """
        binding, continuation = self._binding, self._continuation
        known = binding.model
        # Until the ranks are settled no step was taken, so no memory is keyed by the known model,
        # which is often the module inside this one.
        if known is None or (known is not model and not self._bound):
            binding.forget_model()
            self._adopt(model)
            nothing_loaded = continuation.loaded == SavedBuckets()
            continuation.handed_over = self._agreed or nothing_loaded
        if not continuation.handed_over:
            self._take_up(continuation.loaded)

    def forward_begins(self) -> None:
        """Ends or drops an open step; the guard of ``register`` calls it before each forward."""
        self._runner.forward_begins()
        if self.verification is not None:
            self.verification.step_begins(self.step)

    def saved_plan(self) -> str:
        """Returns what a hook that chooses its scheme goes on with; empty if it chooses none."""
        return ""

    def follow_plan(self, plan: str, scheme: str) -> None:
        """Runs what the ranks run that this one joins; a hook that chooses its scheme does so.

        Args:
            plan, scheme: what :meth:`saved_plan` returns there, and the description of the scheme.
        """

    def ranks_changed(self) -> None:
        """Called on all ranks when they have changed and agreed."""

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
        return facts | {"verify_every": getattr(self.verification, "every", None)}

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
        self._agreed = self._continuation.handed_over = True
        # On a GPU one group serves all rounds (``ddp_core.Drivers``): there are no lanes.
        if devices <= {"cpu"}:
            self._drivers.open_lanes(self._binding.group())
        if self.verification is not None:
            self.verification.open(self._binding.group(), devices, self._drivers.join)

    def _meet(
        self,
        call: str,
        facts: Mapping[str, Any],
        limit: timedelta | None = None,
        *,
        tells: object = None,
    ) -> list[Any]:
        with self._binding.on_device():
            return handshake(call, facts, self._binding.group(), limit, tells=tells)

    def _close(self) -> None:
        self._closed = True
        if self.verification is not None:
            self.verification.close()
        self._drivers.close()
