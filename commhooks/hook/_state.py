"""Defines ``HookState``, the object that ``register`` returns and that users call."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from commhooks.core._registry import scheme_names
from commhooks.core._scheme import Scheme, slot_error
from commhooks.core._settings import check_value, shown
from commhooks.errors import RegistrationError
from commhooks.hook import _group_change as group_change
from commhooks.hook import _pickling as pickling
from commhooks.hook import _saving as saving
from commhooks.hook._group_change import GroupChange
from commhooks.hook._handshake import HANDSHAKE_LIMIT, handshake
from commhooks.hook._parameters import names_of, shared_buffers
from commhooks.hook._running import CLOSED, Running
from commhooks.hook._sharded import check_returns_shards
from commhooks.hook._target import check_process_group
from commhooks.verify._equal import check_equal, state_of
from commhooks.wrappers._feedback import RESIDUAL, FlushResidual, keeps_residual, unwrap_flush
from commhooks.wrappers._make import as_typed, describe, make_for_training, short_repr
from commhooks.wrappers._per_parameter import warn_of_idle_rules
from ddp_core import DistributedDataParallel as CoreDDP

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

__all__ = ["CandidateResult", "HookState"]

_logger = logging.getLogger("commhooks")


class CandidateResult(NamedTuple):
    """Holds a candidate of ``register(model, "auto")``; NaN: not measured.

    Attributes:
        candidate: name of the scheme.
        measured_s: seconds that a step took when candidates ran in turns, the median.
        rerun_s: the same where the choice was compared with dense steps once more.
        steps: number of steps that ``measured_s`` is the median of.
    """

    candidate: str
    measured_s: float
    rerun_s: float
    steps: int


F = TypeVar("F", bound=Callable[..., None])


def asks_for_scheme(switch: F) -> F:
    """Makes ``switch`` name the running scheme in its error where a call gives options alone."""

    @functools.wraps(switch)
    def checked(self: Running, *args: Any, **options: Any) -> None:
        if not args and "scheme" not in options and options:
            given = ", ".join(f"{name}={value!r}" for name, value in options.items())
            running = as_typed(describe(unwrap_flush(self.scheme))).partition(",")[0]
            name = running if running in scheme_names() else "powersgd"
            raise TypeError(
                f"{type(self).__name__}.switch({given}): give the scheme again, as in "
                f"switch({name!r}, {given})"
            )
        switch(self, *args, **options)

    return cast(F, checked)


class HookState(Running):
    """Holds the state of one hook on one model; ``register`` returns it.

    Args:
        scheme: a scheme or a registered name.
        model: the model (DistributedDataParallel or the module that it wraps) whose parameter names
            key the memory. Without it, the hook looks the model up at the first bucket.
        process_group: ranks to average over; by default the model's, or the default group.
        seed: base of all random draws; the same on every rank.
        history: number of ledger rows kept for ``report``.
        options: options of the scheme, see :func:`commhooks.make`.

    Attributes:
        ledger: bytes and times of what was sent, see :class:`commhooks.hook.Ledger`.
        verification: the :class:`commhooks.Verification` of ``register(verify=...)``, or None.

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
        check_process_group(process_group)
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"HookState(scheme, model): a module, got {type(model).__name__}")
        history = check_value("HookState", "history", history, int)
        self._init(make_for_training(scheme, **options), seed, history, process_group)
        if model is not None:
            self._adopt(model)
            if isinstance(model, DistributedDataParallel):
                self.call_monitor.observe(self, model)
            else:
                # Gradients of another module show nothing: its host (DiLoCo, local steps) may call
                # the hook in some steps only, and outside of backward.
                self.call_monitor.disable()
        # Now that nothing raises any more: a refused hook is an error already.
        self.call_monitor.warn_at_exit(self, f"HookState({describe(self.scheme)})")

    @asks_for_scheme
    def switch(self, scheme: str | Scheme, **options: Any) -> None:
        """Runs another scheme from the next step on; all ranks call it, between two steps.

        The next step begins with its first bucket: before that, a call within backward is taken.

        The residual stays if the new scheme has error feedback. Otherwise it is added to the next
        gradient and then dropped, so no unsent value is lost.

        Args:
            scheme: a name, or a scheme; ``"none"`` pauses compression.
            options: options of the scheme, see :func:`commhooks.make`.

        Raises:
            RegistrationError: the call is in the middle of a step, or the host needs one shard of
                each mean and the scheme averages whole buckets.
            MismatchError: the ranks do not switch to the same scheme, or (MissingRankError) not
                all ranks have called ``switch`` within 5 minutes or the group's timeout.
        """
        if self._closed:
            raise RegistrationError(f"HookState.switch: {CLOSED}")
        self._switch_to(make_for_training(scheme, **options))

    def _switch_to(self, built: Scheme) -> None:
        """Runs another scheme, as ``switch`` does, without saying what to know of it."""
        if self.shards_for:
            check_returns_shards(built, self.shards_for, "HookState.switch")
        if self.runner.under_way:
            raise RegistrationError(
                f"HookState.switch: step {self.step} is under way; switch between two steps, "
                f"after loss.backward() returned"
            )
        # Ranks that have not met yet compare schemes in the first step.
        if self.has_met:
            self._handshake("HookState.switch", self._facts(built), HANDSHAKE_LIMIT)
        self._replace(built)

    def _replace(self, built: Scheme) -> None:
        """Installs a scheme that all ranks agreed on, and drops memory that it does not keep."""
        memory = self.engine.memory
        # A scheme that does not average sends nothing that a residual could be added to.
        if memory.has(RESIDUAL) and not keeps_residual(built) and built.traits.averages:
            built = FlushResidual(built)
        shapes = self.parameters.shapes
        # ``load_state_dict`` would refuse a state with tensors of an unknown key. Known keys stay,
        # whatever their shape: a slot may use a value of another (rows of a PowerSGD factor).
        for key in {key for key, _, _ in memory.items()}:
            values = [(name, value) for stored, name, value in memory.items() if stored == key]
            if key != RESIDUAL and any(
                slot_error(built, key, value, shapes.get(name, value.shape)) == "unknown"
                for name, value in values
            ):
                memory.drop(key)
        self.engine.scheme, self._scheme_since = built, self.step
        warn_of_idle_rules(built, self.parameters)
        self._choose_exact_parameters(built)
        # The new scheme may want other buckets: ``bucket_cap_mb``, or a layout by the scheme.
        if isinstance(self.target.model, CoreDDP):
            self.target.model.refresh_layout()

    @property
    def skipped_steps(self) -> int:
        """Returns the number of steps whose average was not finite; counted on the CPU only.

        Each counts, whatever the scheme; what a scheme keeps stays as it was before the step.
        """
        return self.engine.skipped

    def residual(self, name: str) -> Tensor | None:
        """Returns the residual of one parameter on this rank, or None if the scheme keeps none.

        Raises:
            ValueError: the model has no parameter of this name.
        """
        if not isinstance(name, str):
            raise TypeError(f"HookState.residual takes a parameter's name, got {shown(name)}")
        name = self.parameters.find(name)
        if len(self.parameters) and name not in self.parameters:
            raise ValueError(f"HookState.residual: the model has no parameter {name!r}")
        value = self.engine.memory.get(RESIDUAL, name)
        # A copy: the tensor in memory is a view of the flat buffer that later steps overwrite.
        return None if value is None else self.parameters.in_parameter_order(name, value).clone()

    def verify_equal(
        self, optimizer: torch.optim.Optimizer | None = None, *, buffers: bool = False
    ) -> None:
        """Raises on every rank if parameters differ between ranks; all ranks call it.

        Compares every bit, by 8 bytes of each parameter. With ``register(verify=...)`` ranks
        do so for parameters while they train.

        Args:
            optimizer: the model's optimizer; settings and state are compared, too.
            buffers: compares buffers, too. Those of batch norm are equal where a forward pass
                begins, when DistributedDataParallel has sent rank 0's, and differ behind it.

        Raises:
            VerificationError: something differs; names the first, and the ranks.
            RegistrationError: the call is in the middle of a step, there is no model, or its host
                or the optimizer keeps another part on each rank.
            MissingRankError: some ranks did not come within 5 minutes or the group's timeout.

        Example:
            >>> hook.verify_equal(optimizer)
        """
        call = "HookState.verify_equal"
        if self.runner.under_way:
            raise RegistrationError(f"{call}: a step is under way; call it after the step")
        self.bind()
        model, values = self.target.model, self.target.values()
        if model is None or not values:
            raise RegistrationError(
                f"{call}: there are no parameters that ranks have in common: the hook has no "
                f"model, or each rank keeps another shard of every parameter"
            )
        compared: dict[str, Any] = {f"parameter {name!r}": value for name, value in values.items()}
        if buffers:
            compared |= {
                f"buffer {name!r}": buffer for name, buffer in shared_buffers(model).items()
            }
        if optimizer is not None:
            compared |= state_of(optimizer, names_of(model))
        with self.target.on_device():
            check_equal(
                call, compared, partial(handshake, call, {}, self.target.group(), HANDSHAKE_LIMIT)
            )

    # ---- other ranks

    @property
    def group_changes(self) -> tuple[GroupChange, ...]:
        """Returns the changes of the process group so far that this process took part in."""
        return self._changes

    _changes: tuple[GroupChange, ...] = ()

    def change_group(self, group: dist.ProcessGroup) -> GroupChange:
        """Moves hook and model to another process group; all ranks of ``group`` call it.

        The former ranks need not answer; they may be gone. A rank that stays keeps its residual,
        scaled so that the mean over ranks, which training applies, stays the same. A rank that
        joins, whose hook was registered over a group of its own, begins without a residual, and
        takes step, seed and all values that are the same on all ranks. The residual of a rank that
        leaves is lost, as the result says. If the rank still runs, gather the state of all ranks
        before the change, and load it afterwards. Make parameters, optimizer and buffers equal
        yourself.

        A step whose backward pass has raised is dropped; memory stays as it was before that step.

        Args:
            group: the ranks from now on.

        Returns:
            The change, see :class:`commhooks.hook.GroupChange`.

        Raises:
            TypeError: ``group`` is no process group.
            RegistrationError: a step is under way, or the hook was closed.
            MismatchError: the ranks differ in scheme, versions or parameters, or (MissingRankError)
                some did not come within the group's timeout.

        Example:
            >>> survivors = torch.distributed.new_group([0, 2, 3], use_local_synchronization=True)
            >>> change = hook.change_group(survivors)
        """
        if group is None:
            raise TypeError(
                "HookState.change_group(group): takes the process group of the ranks from now on, "
                "got None; torch.distributed.group.WORLD is the default group"
            )
        check_process_group(group)
        core = self.target.core_model_to_move(group)
        if core is not None:
            core.change_group(group)  # which calls this method again
            return self._changes[-1]
        change = group_change.change_group(self, group)
        self._changes = (*self._changes, change)
        self._scheme_since = self.step  # ``summary`` describes what these ranks send
        _logger.info("%s", change)
        return change

    # ---- reports

    _scheme_since = 0  # the first step of the current scheme

    @property
    def rank(self) -> int:
        """Returns this process's rank within the hook's process group."""
        self.bind()
        return self.engine.rank

    @property
    def world_size(self) -> int:
        """Returns the number of ranks that gradients are averaged over."""
        self.bind()
        return self.engine.world_size

    @property
    def candidates(self) -> Sequence[CandidateResult]:
        """Returns the schemes that ``register(model, "auto")`` measured; empty for other hooks."""
        return ()

    def report(self) -> pd.DataFrame:
        """Returns a row per step, bucket and round; see :meth:`commhooks.hook.Ledger.report`."""
        return self.ledger.report()

    def summary(self, steps: int = 100) -> str:
        """Describes in words what this scheme's latest steps sent; see :meth:`Ledger.summary`."""
        name = short_repr(unwrap_flush(self.scheme))
        world_size = max(self.engine.world_size, 1)
        return self.ledger.summary(
            *(name, world_size, steps), since=self._scheme_since, dense=self.compared_with
        )

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """Returns numbers of the latest step, for any logger.

        ======================= =================================================================
        ``dense_bytes``         of the gradients
        ``payload_bytes``       that this rank handed to collectives
        ``wire_bytes``          that this rank sent, by the formulas of the collectives
        ``dense_wire_bytes``    that it would send without compression
        ``encode_s``            seconds of work before collectives, summed over buckets
        ``wire_s``              seconds from issue to end of collectives, summed
        ``decode_s``            seconds of work after the last collectives, summed
        ``exposed_s``           seconds that backward waited
        ``memory_bytes``        of residuals and other state of the scheme
        ``skipped_steps``       so far, whose average was not finite (on the CPU)
        ``verify/error``        largest error of a parameter in the last verified step, over the
                                norm of its dense mean
        ``verify/error_median`` that of the parameter in the middle; without those whose dense mean
                                is zero
        ``verify/cosine_min``   smallest cosine of an averaged gradient and the dense mean there
        ``verify/findings``     number of findings of the verification so far
        ======================= =================================================================

        The last four are there with ``register(verify=...)``. Times that are not known, as
        in most steps on a GPU, are left out.

        Args:
            prefix: put before each name.

        Example:
            >>> wandb.log(hook.metrics("comm/"))
        """
        numbers = self.ledger.last_step()
        numbers["memory_bytes"] = float(self.engine.memory.nbytes())
        numbers["skipped_steps"] = float(self.engine.skipped)
        if self.verification is not None:
            numbers |= self.verification.metrics()
        return {prefix + name: value for name, value in numbers.items()}

    def add_scalars(self, writer: Any, prefix: str = "commhooks") -> None:
        """Writes the latest step's :meth:`metrics` to a TensorBoard ``SummaryWriter``."""
        for name, value in self.metrics(f"{prefix}/").items():
            writer.add_scalar(name, value, self.step)

    def plot(self, path: str | Path | None = None, step: int | None = None) -> Axes:
        """Draws the exchanges of a step over time, a line per bucket; on torch's DDP as well.

        Args:
            path: picture to write; its ending decides on the type.
            step: number of the step; by default the latest whose times are known.

        Raises:
            MissingPackageError: matplotlib is not installed.
            ValueError: the times of this step are not kept.
        """
        return _report("timeline:draw")(self.ledger, path, step)  # type: ignore[no-any-return]

    def chrome_trace(self, path: str | Path) -> None:
        """Writes the stored steps as a trace for Perfetto or chrome://tracing."""
        _report("timeline:chrome_trace")(self.ledger, path, rank=self.rank)

    def page(self, path: str | Path, title: str = "") -> None:
        """Writes a page about this run: one HTML file with tables and pictures.

        Without matplotlib it has no pictures, and says so.

        Args:
            path: file to write. Times are those of this rank.
            title: heading; the scheme by default.

        Raises:
            MissingPackageError: pandas is not installed.

        Example:
            >>> if hook.rank == 0:
            ...     hook.page("run.html")
        """
        _report("run:write_page")(self, path, title)

    # ---- saving, copying, closing

    def close(self) -> None:
        """Stops the driver thread and destroys the extra process groups. Safe to call twice."""
        self._close()

    def __repr__(self) -> str:
        # A state that was made only to be printed need not be registered: no warning at exit.
        self.call_monitor.suppressed = True
        return f"HookState({short_repr(self.scheme)}, step={self.step})"

    def state_dict(self, *, gather: bool = False, dst: int | None = None) -> dict[str, Any]:
        """Returns copies of the tensors, numbers and strings that a later run continues from.

        Args:
            gather: returns one state of all ranks, on the CPU, the same on every rank; all ranks
                call this method, after the same step. False: every rank saves its own state.
            dst: with ``gather``, the only rank of the hook's group that gets the state; the others
                get an empty dict. Between nodes of FSDP2: the one that has the first shard.

        Raises:
            RegistrationError: the call is in the middle of a step.
            MismatchError: with ``gather``, the ranks are not at the same step.
        """
        return saving.save(self, gather, dst)

    def load_state_dict(
        self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, strict: bool = True
    ) -> None:
        """Continues from a saved state, as if the run had not stopped.

        Args:
            state: a gathered state, on any number of ranks; this rank's own; or the list of all
                ranks' states. If the scheme keeps nothing that differs between ranks, the state of
                any rank.
            strict: refuses a state of another scheme, or a state that lacks memory. False: keeps
                what fits. The residual always fits: it is flushed if the scheme keeps none.

        Raises:
            CheckpointError: the state is foreign, newer, incomplete, damaged or mismatching;
                nothing was changed.
        """
        strict = check_value("HookState.load_state_dict", "strict", strict, bool)
        loaded = saving.prepare(self, state, strict, "HookState.load_state_dict")
        saving.apply(self, loaded)
        self._scheme_since = min(self._scheme_since, self.step)  # ``summary`` counts from here

    def __getstate__(self) -> dict[str, Any]:
        return pickling.to_pickle(self)

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        # ``torch.load`` calls this with whatever a file says, so all of it is checked first.
        saved = pickling.from_pickle(pickled)
        self._scheme_since = 0
        self._init(saved.scheme, saved.seed, saved.history)
        self.target.pickled_on = saved.origin
        self.engine.step = saved.step
        self.engine.memory.load(saved.memory)
        self.continuation.defer(saved.buckets)

    def __deepcopy__(self, memo: dict[int, Any]) -> HookState:
        copied = memo[id(self)] = type(self).__new__(type(self))
        # The scheme itself, which is frozen: a file's word for it may not name every class.
        copied.__setstate__({**self.__getstate__(), "scheme": self.scheme})
        return copied


# Pickles name the class by its module: this name stays the same when the file moves. A pickled
# state holds plain values only, so ``torch.load(..., weights_only=True)`` may build it.
HookState.__module__ = "commhooks"
torch.serialization.add_safe_globals([HookState])


def _report(name: str) -> Callable[..., Any]:
    """Returns a function of ``commhooks.report``, which imports hooks and further packages."""
    function: Callable[..., Any] = resolve_name(f"commhooks.report._{name}")
    return function
