"""What stands behind a registered hook: scheme, memory, ledger, driver of its collectives."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from commhooks import _checkpoint
from commhooks._coalesce import Coalescer
from commhooks._engine import Engine
from commhooks._errors import CheckpointError, HookNotAttachedError, RegistrationError
from commhooks._feedback import RESIDUAL, FlushResidual, keeps_residual
from commhooks._handshake import handshake
from commhooks._hierarchical import Hierarchical
from commhooks._ledger import Ledger
from commhooks._make import describe, make
from commhooks._memory import Layout
from commhooks._model import Parameters, find_owner
from commhooks._scheme import Scheme, walk
from commhooks._version import __version__
from ddp_core import DistributedDataParallel as CoreDDP
from ddp_core import Drivers, Exchange, RoundRecord, Task

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
        self._init(make(scheme, **options), seed, history, process_group)
        if model is not None:
            self._adopt(model)

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
        self._model: weakref.ref[nn.Module] | None = None
        self._parameters = Parameters()
        self._drivers = Drivers(scheme.rounds)
        self._coalescer = Coalescer()
        self._agreed = False
        self._closed = False
        self.calls = 0

    # ---- what users read and do

    @property
    def scheme(self) -> Scheme:
        """The scheme that runs, wrappers included."""
        return self._engine.scheme

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
        return 25 if self.scheme.rounds > 1 else None

    def switch(self, scheme: str | Scheme, **options: Any) -> None:
        """Runs another scheme from the next step on; all ranks call it, between two steps.

        A residual stays if the new scheme has error feedback. Otherwise it is added to the next
        gradient and forgotten, so nothing that was held back is lost.

        Args:
            scheme: a name, or a scheme; ``"none"`` pauses compression.
            options: see :func:`commhooks.make`.

        Raises:
            RegistrationError: called in the middle of a step.
            MismatchError: the ranks do not switch to the same scheme.
        """
        built = make(scheme, **options)
        if self._engine.under_way:
            raise RegistrationError(
                f"HookState.switch: step {self.step} is under way; switch between two steps, "
                f"after loss.backward() returned"
            )
        if self._agreed:
            handshake("HookState.switch", self._facts(built), self._group())
        self._replace(built)

    def _replace(self, built: Scheme) -> None:
        memory = self._engine.memory
        if memory.has(RESIDUAL) and not keeps_residual(built) and built.averages:
            built = FlushResidual(built)
        shapes = self._parameters.shapes
        for key in {key for key, _, _ in memory.items()}:
            values = [(name, value) for stored, name, value in memory.items() if stored == key]
            if key != RESIDUAL and any(
                built.memory_error(key, value, shapes.get(name, value.shape)) == "unknown"
                for name, value in values
            ):
                memory.drop(key)
        self._engine.scheme = built
        self._drivers.ensure(built.rounds)
        owner = self._model() if self._model is not None else None
        if isinstance(owner, CoreDDP):
            owner.refresh_layout()

    def report(self) -> pd.DataFrame:
        """A row per step, bucket and round; see :meth:`commhooks.Ledger.report`."""
        return self.ledger.report()

    def add_scalars(self, writer: Any, prefix: str = "commhooks") -> None:
        """Writes the latest step's sums to a TensorBoard ``SummaryWriter``."""
        for name, value in self.ledger.last_step().items():
            writer.add_scalar(f"{prefix}/{name}", value, self.step)
        writer.add_scalar(f"{prefix}/memory_bytes", self._engine.memory.nbytes(), self.step)
        writer.add_scalar(f"{prefix}/skipped_steps", self._engine.skipped, self.step)

    @property
    def skipped_steps(self) -> int:
        """Steps whose non-finite gradient left the memory as it was (counted on the CPU)."""
        return self._engine.skipped

    def residual(self, name: str) -> Tensor | None:
        """What this rank has not sent yet of one parameter; None if the scheme keeps none."""
        value = self._engine.memory.get(RESIDUAL, name)
        return None if value is None else self._parameters.in_order(name, value).clone()

    def close(self) -> None:
        """Stops the driver thread and destroys the extra process groups. Safe to call twice."""
        self._closed = True
        self._drivers.close()

    def __repr__(self) -> str:
        return f"HookState({describe(self.scheme)}, step={self.step})"

    # ---- checkpoint

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: copies of tensors, numbers and strings. Every rank saves its own.

        Raises:
            RegistrationError: called in the middle of a step.
        """
        if self._engine.under_way:
            raise RegistrationError("HookState.state_dict: a step is under way; call it after it")
        if self._model is not None or dist.is_initialized():
            self._bind()
        rank = max(self._engine.rank, 0)
        return {
            "format": _checkpoint.FORMAT,
            "version": _checkpoint.VERSION,
            "commhooks": __version__,
            "torch": str(torch.__version__),
            "scheme": describe(self.scheme),
            "structure": _checkpoint.structure(self.scheme),
            "step": self.step,
            "seed": self._engine.seed,
            "world_size": max(self._engine.world_size, 1),
            f"rank{rank}": {"rank": rank, "memory": self._memory_dict()},
        }

    def _memory_dict(self) -> dict[str, dict[str, Tensor]]:
        """All values by key and name, copied; also those that no step has touched yet."""
        engine = self._engine
        values: dict[str, dict[str, Tensor]] = {}
        for name, shape, dtype, _ in self._parameters:
            ctx = engine.context(torch.empty(0, dtype=dtype), lambda: Layout([], []))
            for key, tensor in engine.scheme.initial_memory(name, shape, ctx).items():
                values.setdefault(key, {})[name] = tensor
        for key, name, tensor in engine.memory.items():
            values.setdefault(key, {})[name] = tensor.detach().clone()
        for name, value in values.get(RESIDUAL, {}).items():
            values[RESIDUAL][name] = self._parameters.in_order(name, value).contiguous()
        return values

    def load_state_dict(
        self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, strict: bool = True
    ) -> None:
        """Continues from a saved state, as if there had been no stop.

        Args:
            state: this rank's state; on another number of ranks the list of all ranks' states.
            strict: refuse a state of another scheme. Otherwise keep what fits: the residual
                always does, for it is flushed where the scheme keeps none.

        Raises:
            CheckpointError: foreign, newer, incomplete or mismatching; nothing was changed.
        """
        if self._engine.under_way:
            raise RegistrationError("HookState.load_state_dict: a step is under way; load after it")
        if not dist.is_initialized():
            raise RegistrationError(
                "HookState.load_state_dict: rank and world size are needed to pick this rank's "
                "part: call torch.distributed.init_process_group first"
            )
        self._bind()
        engine = self._engine
        scheme = engine.scheme
        # A residual sums whatever runs now: it may be flushed.
        per_rank = {RESIDUAL: "sum"}
        for one in walk(scheme):
            per_rank |= one.per_rank
        common, memory = _checkpoint.memory_for_rank(
            state, engine.rank, engine.world_size, per_rank
        )
        if isinstance(scheme, FlushResidual):
            scheme = scheme.scheme
        own = _checkpoint.structure(scheme)
        if common["structure"] != own:
            if strict:
                raise CheckpointError(
                    f"load_state_dict: saved by {common['scheme']}, this hook runs {scheme}; "
                    f"register that scheme and switch afterwards, or pass strict=False to keep "
                    f"the residual only"
                )
            memory = {key: values for key, values in memory.items() if key == RESIDUAL}
        residual = memory.get(RESIDUAL)
        if residual:
            in_bucket = self._parameters.in_memory_order
            residual = {name: in_bucket(name, value) for name, value in residual.items()}
            memory[RESIDUAL] = residual
        if residual and not keeps_residual(scheme):
            if any(bool(value.any()) for value in residual.values()):
                scheme = FlushResidual(scheme)
            else:
                del memory[RESIDUAL]
        _checkpoint.check_memory(memory, scheme, self._parameters.shapes)
        engine.scheme = scheme
        engine.memory.load(
            {k: {n: v.detach().clone() for n, v in values.items()} for k, values in memory.items()}
        )
        engine.step, engine.seed = common["step"], common["seed"]

    def __getstate__(self) -> dict[str, Any]:
        memory: dict[str, dict[str, Tensor]] = {}
        for key, name, value in self._engine.memory.items():
            memory.setdefault(key, {})[name] = value.detach().clone()
        return {
            "scheme": self.scheme,
            "seed": self._engine.seed,
            "step": self.step,
            "history": self._history,
            "memory": memory,
        }

    def __setstate__(self, saved: dict[str, Any]) -> None:
        self._init(saved["scheme"], saved["seed"], saved["history"])
        self._engine.step = saved["step"]
        self._engine.memory.load(saved["memory"])

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
        if not self._agreed:
            self.agree("the first step with this hook")
        self.calls += 1
        engine, step, is_last = self._engine, self._engine.step, bucket.is_last()
        buffer: Tensor = bucket.buffer()
        find_layout = partial(self._find_layout, bucket)
        if self.scheme.coalesce:
            future = self._coalescer.hold(bucket.index(), buffer, find_layout)
            if is_last:
                self._exchange_held(step)
        else:
            engine.launch(bucket.index(), is_last=is_last)
            future = self._start(
                engine.exchange(buffer, find_layout),
                step=step,
                bucket=bucket.index(),
                dense_bytes=buffer.numel() * buffer.element_size(),
                device=buffer.device,
                note=getattr(bucket, "note", None),
            )
        if is_last:
            self.ledger.launched_last(step, time.perf_counter())
        return future

    def _exchange_held(self, step: int) -> None:
        """Starts the exchange of all buckets that were held back for the last one."""
        groups = self._coalescer.groups()
        for position, group in enumerate(groups):
            self._engine.launch(group.index, is_last=position == len(groups) - 1)
            self._start(
                group.exchange(self._engine.exchange, self._coalescer.layouts),
                step=step,
                bucket=group.index,
                dense_bytes=group.nbytes,
                device=group.device,
            ).add_done_callback(group.release)

    def _start(
        self,
        exchange: Exchange,
        *,
        step: int,
        bucket: int,
        dense_bytes: int,
        device: torch.device,
        note: Callable[[RoundRecord], None] | None = None,
    ) -> Future[Tensor]:
        """Hands an exchange to the driver for its device; ``note`` is told of its rounds, too."""

        def record(row: RoundRecord) -> None:
            self.ledger.add(row)
            if note is not None:
                note(row)

        task = Task(
            exchange,
            step=step,
            bucket=bucket,
            dense_bytes=dense_bytes,
            world_size=self._engine.world_size,
            max_rounds=self.scheme.rounds,
            record=record,
        )
        return self._drivers.run(task, device, self._group())

    def _find_layout(self, bucket: Any) -> Layout:
        return self._parameters.layout(bucket.parameters())

    # ---- binding to a model and a process group

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
        self._parameters = Parameters(model)
        if isinstance(model, DistributedDataParallel) and self._process_group is None:
            self._process_group = model.process_group

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
        if self._bound:
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
        return {
            "scheme and options": describe(scheme),
            "commhooks version": __version__,
            "torch version": str(torch.__version__),
            "seed": self._engine.seed,
            "step": self.step,
            "ranks of a node": [
                one.node_size(self._engine.world_size)
                for one in walk(scheme)
                if isinstance(one, Hierarchical)
            ],
            "parameters": [
                f"{name} {tuple(shape)} {dtype}" for name, shape, dtype, _ in self._parameters
            ],
        }

    def agree(self, call: str, also: Mapping[str, Any] | None = None) -> None:
        """Handshake with the other ranks, and the driver's groups; a collective.

        Args:
            also: what else must be the same on all ranks, by name.
        """
        self._bind()
        handshake(call, {**(also or {}), **self._facts(self.scheme)}, self._group())
        self._agreed = True
        if self._devices() <= {"cpu"}:
            self._drivers.open_lanes(self._group())

    def _devices(self) -> set[str]:
        model = self._model() if self._model is not None else None
        return {parameter.device.type for parameter in model.parameters()} if model else set()
