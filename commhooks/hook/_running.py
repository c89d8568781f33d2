"""Defines ``Running``, the part of ``HookState`` that runs during training."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from commhooks._torch import forward_pre_hooks
from commhooks.checkpoint._format import SavedBuckets
from commhooks.core._names import parameter_name
from commhooks.core._scheme import Scheme
from commhooks.core._user_line import user_stacklevel
from commhooks.errors import RegistrationError
from commhooks.hook._attachment import AttachmentGuard, CallMonitor
from commhooks.hook._capture import check_cuda_graph, check_is_bucket
from commhooks.hook._engine import Engine, ExactParameters, replicated_parameters
from commhooks.hook._exchanges import HookBucket, Step
from commhooks.hook._handshake import check_memory_origin, handshake, handshake_fields
from commhooks.hook._ledger import Ledger
from commhooks.hook._parameters import Parameters
from commhooks.hook._runner import Runner
from commhooks.hook._target import HookTarget
from commhooks.verify import Verification, check_verifiable
from commhooks.wrappers._per_parameter import warn_of_idle_rules
from ddp_core import DistributedDataParallel as CoreDDP
from ddp_core import Drivers, MismatchError, MissingRankError

__all__ = ["CLOSED", "Running", "SavedBucketLayout"]


class SavedBucketLayout:
    """Saves which buckets a run has, and restores them in another run.

    Attributes:
        loaded: the buckets of the state that was loaded last.
        buckets_restored: whether the model has taken these buckets, or cannot take any.
    """

    def __init__(self, target: HookTarget, runner: Runner) -> None:
        self.target, self.runner = target, runner
        self.loaded = SavedBuckets()
        self.buckets_restored = True

    def pending_buckets(self, agreed: bool) -> SavedBuckets:
        """Returns the loaded buckets until the ranks have compared them and a step was taken."""
        return self.loaded if self.runner.regrouping.target_layout or not agreed else SavedBuckets()

    def saved(self, core: CoreDDP | None) -> SavedBuckets:
        """Returns the buckets that another run needs to continue with the same ones.

        Args:
            core: the model, if it is ``ddp_core``'s.
        """
        # Until the model has the loaded buckets, its own are not those of the saved run.
        if self.runner.regrouping.target_layout or not self.buckets_restored:
            return self.loaded
        if core is None:
            return SavedBuckets(self.runner.regrouping.layout)
        buckets, limits, arrival = core.saved_layout()
        names = self.target.names
        return SavedBuckets([names(members) for members in buckets], limits, names(arrival))

    def defer(self, buckets: SavedBuckets) -> None:
        """Keeps the buckets of an unpickled state until there is a model."""
        self.loaded, self.buckets_restored = buckets, False
        self.runner.regrouping.restore(buckets.layout, regroups=True)

    def apply(self, buckets: SavedBuckets, core: CoreDDP | None) -> None:
        """Continues with the buckets of a saved state.

        Args:
            core: the model, if it is ``ddp_core``'s.
        """
        # torch's class takes no buckets: the runner exchanges in the saved ones until torch has
        # rebuilt its own. ``ddp_core`` lays out the saved buckets at once.
        self.runner.regrouping.restore(buckets.layout, regroups=core is None)
        self.loaded, self.buckets_restored = buckets, core is not None
        if core is None:
            return
        find = self.target.parameters.name
        by_name: dict[Any, Any] = {find(value): value for value in core.module.parameters()}
        layout, arrival = buckets.layout, buckets.arrival or ()
        if not all(name in by_name for names in [*layout, arrival] for name in names):
            layout = arrival = ()  # the saved model had other parameters: lay out as usual
        members = [[by_name[name] for name in names] for names in layout]
        order = [by_name[name] for name in arrival]
        core.restore_layout(members, buckets.bucket_bytes, order)


# ---- the hook


Future = torch.futures.Future

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

_FIRST_STEP = "the first step with this hook, or after load_state_dict"
CLOSED = (
    "the hook was closed (HookState.close); wrap the model in a new DistributedDataParallel and "
    "register there, or close after training"
)


class Running:
    """Runs a scheme on a model, bucket by bucket; the base of :class:`commhooks.HookState`.

    Attributes:
        ledger: bytes and times of what was sent, see :class:`commhooks.hook.Ledger`.
        verification: compares some steps with the dense mean; None if that was not asked for.
        engine: runs the scheme, and holds its memory and the number of the step.
        target: the model and the process group.
        runner: the steps: which bucket belongs to which, and when one ends.
        drivers, call_monitor, continuation: run the exchanges, detect that the hook is not called,
            and restore the buckets of a saved run.
        agreed: whether the ranks have compared what they run. They do so once more in the first
            step (``_compared_in_step``): some may have loaded a state since ``register``.
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
        self.engine = Engine(scheme, rank=-1, world_size=0, seed=seed)
        self.ledger = Ledger(history)
        self.target = HookTarget(process_group)
        self.drivers = Drivers(scheme.traits.rounds)
        self.runner = Runner(self.engine, self.drivers, self.ledger, self.target)
        self.continuation = SavedBucketLayout(self.target, self.runner)
        self.call_monitor = CallMonitor()
        self.verification: Verification | None = None
        self.agreed = self._compared_in_step = False
        self._closed = False
        self._run_ids = ("", "")
        self._extra_rounds = 0  # collectives in an exchange besides those of the scheme
        self.fixed_group_reason = ""  # reason why ``change_group`` is refused
        self.compared_with = "all-reduce"  # the dense collective that bytes are compared with
        self.shards_for = ""  # the host, if it needs one shard of each mean per rank

    def _verify_with(self, verification: Verification | None) -> None:
        """Sets the verification of steps, before the first handshake."""
        self.verification = self.engine.observer = verification

    @property
    def scheme(self) -> Scheme:
        """Returns the scheme that runs, wrappers included."""
        return self.engine.scheme

    @property
    def step(self) -> int:
        """Returns the number of synchronised backward passes so far."""
        return self.engine.step

    @property
    def parameters(self) -> Parameters:
        """Returns the model's parameters, by name."""
        return self.target.parameters

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Returns the ranks to average over."""
        self.bind()
        return self.target.group()

    @property
    def calls(self) -> int:
        """Returns the number of buckets that the hook was called with in this process."""
        return self.call_monitor.calls

    @property
    def bucket_cap_mb(self) -> float | None:
        """Returns the bucket size for ``ddp_core``, or None for its default.

        Larger for several rounds: a small payload is sent quickly, but each round waits for an
        answer.
        """
        # PowerSGD at 1 Gbit/s is 6 % slower with ddp_core's 8 MiB than with 25; a single round is
        # faster with 8 (docs/design/reducer.md).
        return 25 if self.scheme.traits.rounds > 1 else None

    # ---- buckets

    def start(self, bucket: Any) -> Future[Tensor]:
        """Starts the exchange of one bucket and returns the future of its averaged gradient."""
        if self._closed:
            raise RegistrationError(f"the model still trains with its hook, and {CLOSED}")
        if not isinstance(bucket, HookBucket):
            check_is_bucket(bucket)
            bucket = HookBucket.of(bucket, self.target)
        if not bucket.gradient.is_cpu:
            check_cuda_graph(bucket.gradient.device, self.scheme, agreed=self.has_compared)
        self.compare_ranks()
        if not self.call_monitor.calls:
            self._guard_model()  # after the handshake, which finds the model
        self.call_monitor.record_call(is_last=bucket.is_last)
        return self.runner.start(bucket, self._begin_step)

    def _begin_step(self, bucket: HookBucket) -> Step:
        """Looks up what is constant in a step, with its first bucket."""
        target = self.target
        target.check_group()
        group = self._group_of_ranks()
        if self.verification is not None:
            check_verifiable(bucket.gradient.device)
            with self.target.on_device():
                self.verification.on_step_begin(self.step)
            self.verification.on_first_bucket(self.step, self.scheme)
        return Step(
            self.step,
            group,
            finds_unused=target.may_skip_unused(bucket.origin),
            core_notifies=target.notifying_core(self) is not None,
        )

    def _guard_model(self) -> None:
        """Installs a guard on torch's class if ``register`` did not; ``ddp_core`` needs none."""
        model = self.target.model
        if not isinstance(model, DistributedDataParallel) or isinstance(model, CoreDDP):
            return
        if not any(isinstance(hook, AttachmentGuard) for hook in forward_pre_hooks(model).values()):
            model.register_forward_pre_hook(AttachmentGuard(self, model))
        # A state that was made without its model has found it by now.
        if not self.call_monitor.knows_model:
            self.call_monitor.observe(self, model)

    # ---- what ddp_core calls

    @property
    def has_met(self) -> bool:
        """Whether the ranks have compared anything yet, in ``register`` or in a step."""
        return bool(self._run_ids[0])

    @property
    def has_compared(self) -> bool:
        """Whether the next step need not compare the ranks."""
        return self.agreed and self._compared_in_step

    def compare_ranks(self, call: str = _FIRST_STEP) -> None:
        """Compares what the ranks run, before the first step and the first one after loading.

        A collective: every rank comes here with its first bucket, before it exchanges any. On
        ``ddp_core``'s model that is too late, since ranks that have loaded lay out buckets in
        forward, and others synchronise buffers there: the model calls this before.
        """
        if self.has_compared:
            return
        # Ranks that have met in ``register`` come here as to any other collective, and one that has
        # ended meanwhile is noticed at once.
        self.agree(call, waits=self._compared_in_step or not self.has_met)
        self._compared_in_step = True

    def backward_finished(self) -> None:
        """Starts the exchange of held buckets, when the backward pass has ended."""
        self.runner.backward_finished()

    def gradients_written(self, unused: Iterable[Tensor] = ()) -> None:
        """Ends the step, when the averaged gradients are in ``.grad``.

        Args:
            unused: parameters that no rank has used, so that their ``.grad`` was not written.
        """
        self.runner.gradients_written(unused)

    def step_aborted(self) -> None:
        """Drops the open step after its backward pass raised."""
        self.runner.step_aborted()

    def attached_to_model(self, model: nn.Module) -> None:
        """Adopts the model on which the hook runs from the next step on.

        Hands the model the saved buckets of a state that was loaded before.
        """
        target, continuation = self.target, self.continuation
        known = target.model
        # Until the ranks are settled no step was taken, so no memory is keyed by the known model,
        # which is often the module inside this one.
        if known is None or (known is not model and not self._bound):
            target.forget_model()
            self._adopt(model)
            nothing_loaded = continuation.loaded == SavedBuckets()
            continuation.buckets_restored = self.agreed or nothing_loaded
        if not continuation.buckets_restored:
            self._apply_buckets(continuation.loaded)

    def forward_begins(self) -> None:
        """Ends or drops an open step; the guard of ``register`` calls this before each forward."""
        self.runner.forward_begins()
        if self.verification is not None:
            with self.target.on_device():
                self.verification.on_step_begin(self.step)

    def _close(self) -> None:
        self._closed = True
        if self.verification is not None:
            self.verification.close()
        self.drivers.close()

    # ---- for hooks that choose their scheme ("auto")

    def plan_state(self) -> str:
        """Returns the state of a hook that chooses its scheme, as text; empty for other hooks."""
        return ""

    def apply_plan(self, plan: str, scheme: str) -> None:
        """Takes over the choice of the ranks that this rank joins; other hooks ignore it.

        Args:
            plan, scheme: result of :meth:`plan_state` on those ranks, and their scheme in words.
        """

    def on_group_changed(self) -> None:
        """Runs on every rank after ``change_group`` has succeeded."""

    def _apply_buckets(self, buckets: SavedBuckets) -> None:
        """Continues with the buckets of a saved state."""
        self.continuation.apply(buckets, self.target.notifying_core(self))

    # ---- model and ranks

    @property
    def _bound(self) -> bool:
        return self.engine.world_size > 0

    def _adopt(self, model: nn.Module) -> None:
        """Takes the parameter names and the process group from ``model``."""
        self.target.adopt(model)
        warn_of_idle_rules(self.scheme, self.parameters)

    def bind(self) -> None:
        """Looks up the model and the ranks, until both are known."""
        # Repeated while there is no model: a state may be asked for its rank before it has one.
        if self._bound and len(self.parameters):
            return
        self.target.group()  # raises before anything is looked up
        model = self.target.find_model(self)
        if model is not None:
            self._adopt(model)
        group = self.target.group()
        self.engine.rank, self.engine.world_size = group.rank(), group.size()

    def _facts(self, scheme: Scheme) -> dict[str, Any]:
        """Returns the facts that must be the same on all ranks."""
        pending_buckets = self.continuation.pending_buckets(self.agreed)
        facts = handshake_fields(scheme, self.engine, self.target, pending_buckets)
        return facts | {
            "verify": getattr(self.verification, "every", None),
            "action of verify": getattr(self.verification, "action", None),
            # Also of frozen ones, which are no facts without verification.
            "parameters to compare": list(self.target.values()) if self.verification else [],
        }

    def agree(
        self,
        call: str,
        also: Mapping[str, Any] | None = None,
        limit: timedelta | None = None,
        *,
        waits: bool = True,
    ) -> None:
        """Compares settings with the other ranks and opens the driver's groups; a collective.

        Args:
            also: further facts that must be the same on all ranks, by name.
            limit: longest wait for the other ranks; at most, and by default, the group's timeout.
            waits: see :func:`handshake`.
        """
        self.bind()
        devices = self.target.devices()
        self.drivers.check(devices)
        facts = {**(also or {}), **self._facts(self.scheme)}
        run_id = self._run_ids[0] or uuid.uuid4().hex
        run_ids = self._handshake(call, facts, limit, message=run_id, waits=waits)
        self._run_ids = (run_ids[0], self._run_ids[1])
        # After the handshake, which compares the memory's origin: a pickled state on a wrong rank
        # is then an error on all ranks, and not on one rank while the others wait.
        check_memory_origin(self.engine, self.target)
        self._choose_exact_parameters(self.scheme)
        self.agreed = self.continuation.buckets_restored = True
        # On a GPU one group serves all rounds (``ddp_core.Drivers``): there are no lanes.
        if devices <= {"cpu"}:
            self.drivers.open_lanes(self.target.group())
        if self.verification is not None:
            target = self.target
            self.verification.open(
                target.group(),
                devices,
                self.drivers.join,
                target.verdict_groups,
                target.values,
                owner=self,
            )

    def _choose_exact_parameters(self, scheme: Scheme) -> None:
        """Averages parameters that tensor-parallel ranks replicate exactly, from the next step on.

        Warns if ``scheme`` returns updates, which an exact mean cannot replace.
        """
        shared = replicated_parameters(scheme, self.parameters)
        if shared and scheme.traits.returns != "mean":
            names = sorted({parameter_name(name) for name in shared})
            warnings.warn(
                f"{scheme} rounds the gradients of {', '.join(names[:3])} ({len(names)} "
                f"parameters that ranks of tensor parallelism have in common) together with those "
                f"of shards, differently on each of these ranks, where these parameters drift "
                f"apart. Use a scheme that returns the mean of gradients: it sends them exactly",
                RuntimeWarning,
                stacklevel=user_stacklevel(),
            )
            shared = frozenset()
        exactly = self.engine.exactly = ExactParameters(shared)
        self.drivers.ensure(scheme.traits.rounds + exactly.rounds + self._extra_rounds)

    def _handshake(
        self,
        call: str,
        facts: Mapping[str, Any],
        limit: timedelta | None = None,
        *,
        message: object = None,
        waits: bool = True,
    ) -> list[Any]:
        meet = partial(handshake, call, limit=limit, waits=waits)
        with self.target.on_device():
            try:
                answers = meet(facts, self.target.group(), message=message)
            except MissingRankError:
                raise
            except MismatchError as error:
                # Peers with the other shards would wait for this rank in their handshake.
                with suppress(MismatchError):
                    self._meet_peers(meet, facts, str(error))
                raise
            self._meet_peers(meet, facts)
            return answers

    def _meet_peers(
        self, meet: Callable[..., list[Any]], facts: Mapping[str, Any], fault: str = ""
    ) -> None:
        """Compares facts with the ranks of the other shards; a collective."""
        shared = {name: facts[name] for name in _SHARED if name in facts}
        for group in self.target.verdict_groups:
            meet({"what keeps a rank from it": fault or None, **shared}, group)

    def _group_of_ranks(self) -> dist.ProcessGroup:
        """Returns the hook's group; raises if the ranks of that group have changed.

        Some process groups change their ranks by themselves (torchft).
        """
        group, engine = self.target.group(), self.engine
        if group.size() != engine.world_size or group.rank() != engine.rank:
            raise RegistrationError(
                f"the ranks of the hook's {type(group).__name__} have changed: this was rank "
                f"{engine.rank} of {engine.world_size}, and is rank {group.rank()} of "
                f"{group.size()} now, unknown to the hook. Call hook.change_group(group) "
                f"between two steps; for torchft use commhooks.hosts.torchft.register"
            )
        return group
