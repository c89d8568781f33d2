"""What stands behind a registered hook: scheme, memory, ledger, driver of its collectives."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from commhooks._version import __version__
from commhooks.checkpoint.checksum import digest
from commhooks.checkpoint.form import SavedBuckets
from commhooks.core.scheme import Scheme, slot_error, walk
from commhooks.core.settings import fitting, shown
from commhooks.errors import HookNotAttachedError, RegistrationError
from commhooks.hook import pickling as _checkpoint_pickle
from commhooks.hook import saving as _checkpoint_hook
from commhooks.hook.attachment import Attendance
from commhooks.hook.brief import brief
from commhooks.hook.engine import Engine
from commhooks.hook.handshake import MEETING, handshake
from commhooks.hook.ledger import Ledger
from commhooks.hook.parameters import Parameters, check_group, find_owner
from commhooks.hook.runner import Runner
from commhooks.schemes.hierarchical import Hierarchical
from commhooks.wrappers.feedback import RESIDUAL, FlushResidual, keeps_residual, without_flush
from commhooks.wrappers.make import describe, make
from commhooks.wrappers.per_parameter import warn_of_idle_rules
from ddp_core import DistributedDataParallel as CoreDDP
from ddp_core import Drivers

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["HookState"]

Future = torch.futures.Future


class HookState:
    """The state of one hook on one model; what ``register`` returns.

    Args:
        scheme: a scheme or a registered name.
        model: the model (DistributedDataParallel or what it wraps) whose parameter names key the
            memory. Without it, the model is looked up at the first bucket.
        process_group: ranks to average over; the model's, or the default group.
        seed: base of all random draws; the same on every rank.
        history: ledger rows kept for ``report``.
        options: of the scheme, see :func:`commhooks.make`.

    Example:
        >>> state = HookState(ErrorFeedback(PowerSGD(rank=4)), ddp_model)
        >>> ddp_model.register_comm_hook(state, comm_hook)
    """

    def __init__(
        self,
        scheme: str | Scheme = "none",
        model: nn.Module | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
        seed: int = 0,
        history: int = 100_000,
        **options: Any,
    ) -> None:
        check_group(process_group)
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"HookState(scheme, model): a module, got {type(model).__name__}")
        history = fitting("HookState", "history", history, int)
        self._init(make(scheme, **options), seed, history, process_group)
        self._attendance.report_at_the_end_of(self, f"HookState({describe(self.scheme)})")
        if model is not None:
            self._adopt(model)
            if isinstance(model, DistributedDataParallel):
                self._attendance.watch(self, model)
            else:
                self._attendance.dismiss()

    def _init(
        self,
        scheme: Scheme,
        seed: int,
        history: int,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._engine = Engine(scheme, rank=-1, world_size=0, seed=seed)
        self._history = history
        self.ledger = Ledger(history)
        self._process_group = process_group
        self._follows_model = False  # the group is the model's
        self._model: weakref.ref[nn.Module] | None = None
        self._drivers = Drivers(scheme.traits.rounds)
        self._runner = Runner(self._engine, self._drivers, self.ledger)
        self._agreed = False
        self._closed = False
        self._pickled_on: tuple[int, int] | None = None  # rank and world size
        self._since = 0  # the step from which on this scheme runs
        self._loaded_buckets = SavedBuckets()
        self._handed_over = True  # they were, or the model is not one that takes them
        self._attendance = Attendance()

    # ---- what users read and do

    @property
    def scheme(self) -> Scheme:
        """The scheme that runs, wrappers included."""
        return self._engine.scheme

    @property
    def calls(self) -> int:
        """Buckets that came to the hook in this process."""
        return self._attendance.calls

    @property
    def step(self) -> int:
        """Synchronised backward passes so far."""
        return self._engine.step

    @property
    def rank(self) -> int:
        """This process's rank within the hook's process group."""
        self._bind()
        return self._engine.rank

    @property
    def world_size(self) -> int:
        """Number of ranks averaged over."""
        self._bind()
        return self._engine.world_size

    @property
    def bucket_cap_mb(self) -> float | None:
        """What it asks of ``ddp_core.DistributedDataParallel``: large buckets for several rounds.

        A small payload is soon sent, but each of its rounds waits for an answer.
        """
        return 25 if self.scheme.traits.rounds > 1 else None

    def switch(self, scheme: str | Scheme, **options: Any) -> None:
        """Runs another scheme from the next step on; all ranks call it, between two steps.

        A residual stays if the new scheme has error feedback. Otherwise it is added to the next
        gradient and forgotten, so nothing that was held back is lost.

        Args:
            scheme: a name, or a scheme; ``"none"`` pauses compression.
            options: see :func:`commhooks.make`.

        Raises:
            RegistrationError: called in the middle of a step.
            MismatchError: the ranks do not switch to the same scheme, or (MissingRankError) not
                all of them have called it within 5 minutes or the group's timeout.
        """
        if self._closed:
            raise RegistrationError("HookState.switch: the hook was closed; register another")
        built = make(scheme, **options)
        if self._runner.under_way:
            raise RegistrationError(
                f"HookState.switch: step {self.step} is under way; switch between two steps, "
                f"after loss.backward() returned"
            )
        if self._agreed:
            handshake("HookState.switch", self._facts(built), self._group(), MEETING)
        self._replace(built)

    def _replace(self, built: Scheme) -> None:
        memory = self._engine.memory
        if memory.has(RESIDUAL) and not keeps_residual(built) and built.traits.averages:
            built = FlushResidual(built)
        shapes = self._parameters.shapes
        for key in {key for key, _, _ in memory.items()}:
            values = [(name, value) for stored, name, value in memory.items() if stored == key]
            if key != RESIDUAL and any(
                slot_error(built, key, value, shapes.get(name, value.shape)) == "unknown"
                for name, value in values
            ):
                memory.drop(key)
        self._engine.scheme, self._since = built, self.step
        warn_of_idle_rules(built, self._parameters)
        self._drivers.ensure(built.traits.rounds)
        owner = self._model() if self._model is not None else None
        if isinstance(owner, CoreDDP):
            owner.refresh_layout()

    def report(self) -> pd.DataFrame:
        """A row per step, bucket and round; see :meth:`commhooks.hook.Ledger.report`."""
        return self.ledger.report()

    def summary(self, steps: int = 100) -> str:
        """Says in words what this scheme's latest steps sent; see :meth:`Ledger.summary`."""
        name = brief(without_flush(self.scheme))
        world_size = max(self._engine.world_size, 1)
        return self.ledger.summary(name, world_size, steps, since=self._since)

    def add_scalars(self, writer: Any, prefix: str = "commhooks") -> None:
        """Writes the latest step's sums to a TensorBoard ``SummaryWriter``; cheap enough a step."""
        for name, value in self.ledger.last_step().items():
            writer.add_scalar(f"{prefix}/{name}", value, self.step)
        writer.add_scalar(f"{prefix}/memory_bytes", self._engine.memory.nbytes(), self.step)
        writer.add_scalar(f"{prefix}/skipped_steps", self._engine.skipped, self.step)

    @property
    def skipped_steps(self) -> int:
        """Steps whose non-finite gradient left the memory as it was (counted on the CPU)."""
        return self._engine.skipped

    def residual(self, name: str) -> Tensor | None:
        """What this rank has not sent yet of one parameter; None if the scheme keeps none.

        Raises:
            ValueError: the model has no parameter of this name.
        """
        if not isinstance(name, str):
            raise TypeError(f"HookState.residual takes a parameter's name, got {shown(name)}")
        name = self._parameters.find(name)
        if len(self._parameters) and name not in self._parameters:
            raise ValueError(f"HookState.residual: the model has no parameter {name!r}")
        value = self._engine.memory.get(RESIDUAL, name)
        return None if value is None else self._parameters.in_order(name, value).clone()

    def close(self) -> None:
        """Stops the driver thread and destroys the extra process groups. Safe to call twice."""
        self._closed = True
        self._drivers.close()

    def __repr__(self) -> str:
        self._attendance.excused = True
        return f"HookState({brief(self.scheme)}, step={self.step})"

    # ---- checkpoint

    def state_dict(self, *, gather: bool = False, to: int | None = None) -> dict[str, Any]:
        """Copies of tensors, numbers and strings to continue from: this rank's, or all ranks'.

        Args:
            gather: one state of all ranks, on the CPU, the same on every rank; all of them call
                it, after the same step. Without it every rank saves its own.
            to: with ``gather``, the only rank of the hook's that gets it; others get an empty dict.

        Raises:
            RegistrationError: called in the middle of a step.
            MismatchError: with ``gather``, the ranks are not at the same step.
        """
        return _checkpoint_hook.save(self, gather, to)

    def load_state_dict(
        self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, strict: bool = True
    ) -> None:
        """Continues from a saved state, as if there had been no stop.

        Args:
            state: a gathered one, on any number of ranks; this rank's own; or the list of all
                ranks' states. Where a scheme keeps nothing that differs between ranks, any rank's.
            strict: refuse a state of another scheme, or one that lacks memory. Otherwise keep what
                fits: the residual always does, for it is flushed where the scheme keeps none.

        Raises:
            CheckpointError: foreign, newer, incomplete, damaged or mismatching; nothing was
                changed.
        """
        loaded = _checkpoint_hook.prepare(self, state, strict, "HookState.load_state_dict")
        _checkpoint_hook.take_up(self, loaded)

    def __getstate__(self) -> dict[str, Any]:
        return _checkpoint_pickle.to_pickle(self)

    def __setstate__(self, saved: dict[str, Any]) -> None:
        scheme = _checkpoint_pickle.check_pickled(saved)
        self._init(scheme, saved["seed"], saved["history"])
        self._pickled_on = saved.get("ranks")
        self._engine.step = saved["step"]
        self._engine.memory.load(saved["memory"])
        self._loaded_buckets = _checkpoint_pickle.buckets_of(saved)
        self._handed_over = False
        self._runner.restore(self._loaded_buckets.layout)

    # ---- what the hook calls

    def launch(self, bucket: Any) -> Future[Tensor]:
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
        model: Any = self._model() if self._model is not None else None
        if self._follows_model and model is not None:
            self._check_group(model)
        return self._runner.launch(
            bucket,
            self._group(),
            finds_unused=_may_leave_alone(model, bucket),
            told=self._core() is not None,
        )

    def _check_group(self, model: Any) -> None:
        if model.process_group is not self._process_group:
            raise RegistrationError(
                "the model now averages over another process group (_update_process_group), which "
                "the hook does not follow: its residuals and random draws belong to the ranks it "
                "was registered with. Wrap the module anew, register a hook on it, and load this "
                "one's state_dict"
            )

    def no_more_buckets(self) -> None:
        """Backward has ended; ``ddp_core`` calls it. What was held back travels now."""
        self._runner.no_more_buckets()

    def step_landed(self, left_alone: Iterable[Tensor] = ()) -> None:
        """The step is over; ``ddp_core`` calls it.

        Args:
            left_alone: parameters that no rank has used, whose gradient stayed as it was.
        """
        self._runner.step_landed(left_alone)

    def step_abandoned(self) -> None:
        """The step's backward pass has raised; ``ddp_core`` calls it."""
        self._runner.step_abandoned()

    def attached_to_model(self, model: nn.Module) -> None:
        """The hook runs on this model from the next step on; ``ddp_core`` calls it.

        A state that was loaded before then hands the model the saved buckets.
        """
        known = self._model() if self._model is not None else None
        if known is None or (known is not model and not self._bound):  # no step was taken with it
            self._model = None
            self._adopt(model)
            self._handed_over = self._agreed or self._loaded_buckets == SavedBuckets()
        if not self._handed_over:
            self._go_on_with(self._loaded_buckets)

    def forward_begins(self) -> None:
        """The model's forward pass begins; the guard that ``register`` adds calls it."""
        self._runner.forward_begins()

    def _saved_buckets(self) -> SavedBuckets:
        """What another run needs to have the same buckets."""
        if self._runner.layout_to_come or not self._handed_over:
            return self._loaded_buckets
        core = self._core()
        if core is None:
            return SavedBuckets(self._runner.layout)
        buckets, limits, arrival = core.saved_layout()
        layout = [self._names(one) for one in buckets]
        return SavedBuckets(layout, limits, self._names(arrival))

    def _names(self, parameters: Iterable[Tensor]) -> list[str]:
        return [known for one in parameters if (known := self._parameters.name(one))]

    def _go_on_with(self, buckets: SavedBuckets) -> None:
        """Takes up the buckets of a saved state, where the model can."""
        core = self._core()
        self._runner.restore(buckets.layout, regroups=core is None)
        self._loaded_buckets, self._handed_over = buckets, core is not None
        if core is None:
            return
        by_name = {self._parameters.name(one): one for one in core.module.parameters()}
        layout, arrival = buckets.layout, buckets.arrival or ()
        if not all(name in by_name for names in [*layout, arrival] for name in names):
            layout = arrival = ()  # of a model with other parameters
        members = [[by_name[name] for name in names] for names in layout]
        order = [by_name[name] for name in arrival]
        core.restore_layout(members, buckets.bucket_bytes, order, self._agree_after_load)

    def _core(self) -> CoreDDP | None:
        """The model, if it is ``ddp_core``'s and tells this hook of its steps."""
        model: Any = self._model() if self._model is not None else None
        told = isinstance(model, CoreDDP) and model.reducer.launcher.tells(self)
        return model if told else None

    def _agree_after_load(self) -> None:
        if not self._agreed:
            self.agree("the first step with this hook, or after load_state_dict")

    # ---- binding to a model and a process group

    @property
    def _parameters(self) -> Parameters:
        return self._runner.parameters

    @property
    def _bound(self) -> bool:
        return self._engine.world_size > 0

    def _adopt(self, model: nn.Module) -> None:
        """Takes the parameter names, and the process group, of ``model``."""
        known = self._model() if self._model is not None else None
        if known is not None and known is not model:
            raise RegistrationError(
                "this HookState belongs to another model: one state serves one model, since "
                "residuals are keyed by its parameter names; make a HookState for each"
            )
        self._model = weakref.ref(model)
        self._runner.parameters = Parameters(model)
        self._runner.static_graph = bool(getattr(model, "static_graph", False))
        if isinstance(model, DistributedDataParallel) and self._process_group is None:
            self._process_group, self._follows_model = model.process_group, True
        warn_of_idle_rules(self.scheme, self._parameters)

    def _group(self) -> dist.ProcessGroup:
        if self._process_group is not None:
            return self._process_group
        if not dist.is_initialized():
            raise RegistrationError(
                "no process group: call torch.distributed.init_process_group before a hook is "
                "registered or runs"
            )
        world = dist.group.WORLD
        assert world is not None
        return world

    def _bind(self) -> None:
        """Settles model, ranks and driver; once, the same on all ranks."""
        if self._bound and len(self._parameters):
            return
        group = self._group()
        if not self._parameters:
            owner = find_owner(self)
            if owner is not None:
                self._adopt(owner)
                group = self._group()
        self._engine.rank, self._engine.world_size = group.rank(), group.size()

    def _facts(self, scheme: Scheme) -> dict[str, Any]:
        """What must be the same on all ranks."""
        to_come = self._runner.layout_to_come or not self._agreed
        loaded = self._loaded_buckets if to_come else SavedBuckets()
        # A rank that a checkpoint of fewer ranks has left nothing to flush sends the same.
        return {
            "scheme and options": describe(without_flush(scheme)),
            "commhooks version": __version__,
            "torch version": str(torch.__version__),
            "seed": self._engine.seed,
            "step": self.step,
            "order of the saved buckets": digest(
                [loaded.layout, loaded.bucket_bytes, bool(loaded.arrival)], {}
            ),
            "world size": self._engine.world_size,
            "memory": _checkpoint_pickle.origin(self),
            "ranks of a node": [
                one.node_size(self._engine.world_size)
                for one in walk(scheme)
                if isinstance(one, Hierarchical)
            ],
            "parameters": [
                f"{name} {tuple(shape)} {dtype}" for name, shape, dtype, _ in self._parameters
            ],
        }

    def agree(
        self, call: str, also: Mapping[str, Any] | None = None, limit: timedelta | None = None
    ) -> None:
        """Handshake with the other ranks, and the driver's groups; a collective.

        Args:
            also: what else must be the same on all ranks, by name.
            limit: longest wait for the other ranks; at most, and by default, the group's timeout.
        """
        self._bind()
        self._drivers.check(self._devices())
        facts = {**(also or {}), **self._facts(self.scheme)}
        handshake(call, facts, self._group(), limit)
        _checkpoint_pickle.need_own_memory(self)
        self._agreed = self._handed_over = True
        if self._devices() <= {"cpu"}:
            self._drivers.open_lanes(self._group())

    def _devices(self) -> set[str]:
        model = self._model() if self._model is not None else None
        return {parameter.device.type for parameter in model.parameters()} if model else set()


# A pickle has the class by this name, which does not move, and
# torch.load(..., weights_only=True) then takes a pickled state, which is plain values.
HookState.__module__ = "commhooks"
torch.serialization.add_safe_globals([HookState])


def _may_leave_alone(model: Any, bucket: Any) -> bool:
    """Whether a parameter's ``.grad`` tells what became of the average of its gradient."""
    if isinstance(model, DistributedDataParallel):
        return bool(model.find_unused_parameters or model.static_graph)
    # A hook that was made for the inner module, or ``replicate``: a reducer calls it all the same.
    # Other hosts' parameters may never get a gradient.
    return isinstance(bucket, dist.GradBucket)  # type: ignore[attr-defined]
