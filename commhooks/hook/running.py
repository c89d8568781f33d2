"""Defines ``Running``: what a hook does while its model trains, and what ``ddp_core`` tells it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from commhooks._torch import forward_pre_hooks
from commhooks.checkpoint.form import SavedBuckets
from commhooks.core.scheme import Scheme
from commhooks.errors import RegistrationError
from commhooks.hook.attachment import AttachmentGuard, Attendance
from commhooks.hook.binding import Binding
from commhooks.hook.capture import need_bucket, need_no_capture
from commhooks.hook.continuation import Continuation
from commhooks.hook.engine import Engine
from commhooks.hook.ledger import Ledger
from commhooks.hook.meeting import Meeting
from commhooks.hook.runner import Runner
from commhooks.verify import Verification, need_verifiable
from ddp_core import DistributedDataParallel as CoreDDP
from ddp_core import Drivers

__all__ = ["Running"]

Future = torch.futures.Future


class Running(Meeting):
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
        self._run = ("", "")
        self._further_rounds = 0  # collectives in an exchange besides those of the scheme
        self.stays = ""  # why its host does not let the hook change its ranks
        self.compared_with = "all-reduce"  # what its bytes are compared with, if it is dense
        self.shards_for = ""  # the host that needs one shard of each mean on each rank, if any

    def _verify_with(self, verification: Verification | None) -> None:
        """Takes what verifies steps, before the hook meets the other ranks."""
        self.verification = self._engine.observer = verification
        if verification is not None:
            verification.take()

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

    # ---- what the hook calls

    def start(self, bucket: Any) -> Future[Tensor]:
        """Starts the exchange of one bucket and returns the future of its averaged gradient."""
        need_bucket(bucket)
        if self._closed:
            raise RegistrationError(
                "the hook was closed (HookState.close), but the model still trains with it; "
                "wrap the model in a new DistributedDataParallel, or close after training"
            )
        need_no_capture(bucket.buffer().device, self.scheme, agreed=self._agreed)
        # A collective. Every rank comes here with its first bucket, before it exchanges anything.
        self._agree_after_load()
        if not self._attendance.calls:
            self._guard_model()
        self._attendance.came(bucket)
        self._binding.check_group()
        self._check_ranks()
        if self.verification is not None:
            need_verifiable(bucket.buffer().device)
            self.verification.step_begins(self.step)
            if self._runner.is_idle:
                self.verification.first_bucket_comes(self.step, self.scheme)
        return self._runner.start(
            bucket,
            self._binding.group(),
            finds_unused=self._binding.may_leave_alone(bucket),
            told=self._binding.core_telling(self) is not None,
        )

    def _guard_model(self) -> None:
        """Guards torch's class where the hook was registered by hand; ``ddp_core`` looks itself."""
        model = self._binding.model
        if not isinstance(model, DistributedDataParallel) or isinstance(model, CoreDDP):
            return
        if not any(isinstance(one, AttachmentGuard) for one in forward_pre_hooks(model).values()):
            model.register_forward_pre_hook(AttachmentGuard(self, model))

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

    def _close(self) -> None:
        self._closed = True
        if self.verification is not None:
            self.verification.close()
        self._drivers.close()
