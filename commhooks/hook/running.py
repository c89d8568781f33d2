"""``Running``: what a hook does while its model trains, and what ``ddp_core`` tells it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from commhooks.checkpoint.form import SavedBuckets
from commhooks.core.scheme import Scheme
from commhooks.errors import HookNotAttachedError, RegistrationError
from commhooks.hook.agreement import facts_of, need_own_memory
from commhooks.hook.attendance import Attendance
from commhooks.hook.binding import Binding
from commhooks.hook.continuation import Continuation
from commhooks.hook.engine import Engine
from commhooks.hook.handshake import handshake
from commhooks.hook.ledger import Ledger
from commhooks.hook.parameters import Parameters
from commhooks.hook.runner import Runner
from commhooks.wrappers.per_parameter import warn_of_idle_rules
from ddp_core import Drivers

__all__ = ["Running"]

Future = torch.futures.Future


class Running:
    """A scheme on a model, from bucket to bucket; the base of :class:`commhooks.HookState`.

    Attributes:
        ledger: rows of what was sent, see :class:`commhooks.hook.Ledger`.
    """

    def _init(
        self,
        scheme: Scheme,
        seed: int,
        history: int,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._engine = Engine(scheme, rank=-1, world_size=0, seed=seed)
        self.ledger = Ledger(history)
        self._binding = Binding(process_group)
        self._drivers = Drivers(scheme.traits.rounds)
        self._runner = Runner(self._engine, self._drivers, self.ledger, self._binding)
        self._continuation = Continuation(self._binding, self._runner)
        self._attendance = Attendance()
        self._agreed = False
        self._closed = False

    @property
    def scheme(self) -> Scheme:
        """The scheme that runs, wrappers included."""
        return self._engine.scheme

    @property
    def step(self) -> int:
        """Synchronised backward passes so far."""
        return self._engine.step

    @property
    def calls(self) -> int:
        """Buckets that came to the hook in this process."""
        return self._attendance.calls

    @property
    def bucket_cap_mb(self) -> float | None:
        """The bucket size that a scheme asks of ``ddp_core``: large buckets for several rounds.

        A small payload is soon sent, but each of its rounds waits for an answer.
        """
        return 25 if self.scheme.traits.rounds > 1 else None

    @property
    def _parameters(self) -> Parameters:
        return self._binding.parameters

    # ---- what the hook calls

    def start(self, bucket: Any) -> Future[Tensor]:
        """Starts the exchange of one bucket and returns the future of its averaged gradient."""
        if isinstance(bucket, tuple):
            raise HookNotAttachedError(
                "torch.compile runs with torch._dynamo.config.optimize_ddp = 'python_reducer', "
                "which hands hooks a (gradient, parameter) tuple and ignores what they return. "
                "Set optimize_ddp = True (the default), which keeps buckets"
            )
        if self._closed:
            raise RegistrationError(
                "the hook was closed (HookState.close), but the model still trains with it; "
                "wrap the model in a new DistributedDataParallel, or close after training"
            )
        self._agree_after_load()
        self._attendance.calls += 1
        self._binding.check_group()
        return self._runner.start(
            bucket,
            self._binding.group(),
            finds_unused=self._binding.may_leave_alone(bucket),
            told=self._binding.core_telling(self) is not None,
        )

    # ---- what ddp_core calls

    def no_more_buckets(self) -> None:
        """Backward has ended: what was held back travels now."""
        self._runner.no_more_buckets()

    def step_landed(self, left_alone: Iterable[Tensor] = ()) -> None:
        """The step is over: the averaged gradients are where they belong.

        Args:
            left_alone: parameters that no rank has used, whose gradient stayed as it was.
        """
        self._runner.step_landed(left_alone)

    def step_abandoned(self) -> None:
        """The step's backward pass has raised."""
        self._runner.step_abandoned()

    def attached_to_model(self, model: nn.Module) -> None:
        """The hook runs on this model from the next step on.

        A state that was loaded before then hands the model the saved buckets.
        """
        binding, continuation = self._binding, self._continuation
        known = binding.model
        if known is None or (known is not model and not self._bound):  # no step was taken with it
            binding.forget_model()
            self._adopt(model)
            nothing_loaded = continuation.loaded == SavedBuckets()
            continuation.handed_over = self._agreed or nothing_loaded
        if not continuation.handed_over:
            self._take_up(continuation.loaded)

    def forward_begins(self) -> None:
        """The model's forward pass begins; the guard that ``register`` adds calls it."""
        self._runner.forward_begins()

    def _take_up(self, buckets: SavedBuckets) -> None:
        """Goes on with the buckets of a saved state."""
        core = self._binding.core_telling(self)
        self._continuation.take_up(buckets, core, self._agree_after_load)

    # ---- model and ranks

    @property
    def _bound(self) -> bool:
        return self._engine.world_size > 0

    def _adopt(self, model: nn.Module) -> None:
        """Takes the parameter names, and the process group, of ``model``."""
        self._binding.adopt(model)
        warn_of_idle_rules(self.scheme, self._parameters)

    def _bind(self) -> None:
        """Settles model and ranks; once, the same on all ranks."""
        if self._bound and len(self._parameters):
            return
        self._binding.group()  # raises before anything is looked up
        model = self._binding.find_model(self)
        if model is not None:
            self._adopt(model)
        group = self._binding.group()
        self._engine.rank, self._engine.world_size = group.rank(), group.size()

    def _facts(self, scheme: Scheme) -> dict[str, Any]:
        """What must be the same on all ranks."""
        to_come = self._continuation.to_come(self._agreed)
        return facts_of(scheme, self._engine, self._binding, to_come)

    def _agree_after_load(self) -> None:
        if not self._agreed:
            self.agree("the first step with this hook, or after load_state_dict")

    def agree(
        self, call: str, also: Mapping[str, Any] | None = None, limit: timedelta | None = None
    ) -> None:
        """Handshake with the other ranks, and the driver's groups; a collective.

        Args:
            also: what else must be the same on all ranks, by name.
            limit: longest wait for the other ranks; at most, and by default, the group's timeout.
        """
        self._bind()
        devices = self._binding.devices()
        self._drivers.check(devices)
        facts = {**(also or {}), **self._facts(self.scheme)}
        handshake(call, facts, self._binding.group(), limit)
        need_own_memory(self._engine, self._binding)
        self._agreed = self._continuation.handed_over = True
        if devices <= {"cpu"}:
            self._drivers.open_lanes(self._binding.group())
