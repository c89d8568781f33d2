"""Defines ``DiLoCo``, which trains locally and averages the changes of parameters now and then."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from commhooks._torch import comm_hooks
from commhooks.checkpoint._format import MAX_STEP, digest, is_int_between, tensor_error
from commhooks.checkpoint._placement import check_placement, stored_placement
from commhooks.core._scheme import Scheme
from commhooks.core._settings import check_value
from commhooks.errors import CheckpointError
from commhooks.hook import GroupChange, HookState
from commhooks.hook import _saving as _checkpoint_hook
from commhooks.hook._parameters import Parameters
from commhooks.local._fragments import Fragment, Pending, fragments_of
from ddp_core import completed

__all__ = [
    "FIXED_GROUP",
    "VERSION",
    "DiLoCo",
    "OuterSettings",
    "add_checksum",
    "broadcast_outer",
    "change_hook_group",
    "check_state",
    "checked_settings",
    "local_sgd",
]


class OuterSettings(NamedTuple):
    """Holds the settings of :class:`commhooks.DiLoCo` on which the ranks have to agree."""

    every: int
    fragments: int
    delay: int
    lr: float
    momentum: float
    nesterov: bool


def checked_settings(
    *,
    every: int,
    fragments: int,
    delay: int,
    lr: float,
    momentum: float,
    nesterov: bool,
) -> OuterSettings:
    """Returns the settings after checking them.

    Raises:
        TypeError: a setting has another type.
        ValueError: a setting is out of range, or does not fit another one.
    """
    every, fragments, delay = (
        check_value("DiLoCo", name, value, int)
        for name, value in (("every", every), ("fragments", fragments), ("delay", delay))
    )
    lr, momentum = (
        check_value("DiLoCo", name, value, float)
        for name, value in (("lr", lr), ("momentum", momentum))
    )
    nesterov = check_value("DiLoCo", "nesterov", nesterov, bool)
    for name, value in (("every", every), ("fragments", fragments)):
        if value < 1:
            raise ValueError(f"DiLoCo({name}=...) is 1 or more, got {value!r}")
    # A fragment is sent every ``every // fragments`` steps, so that each has its turn in ``every``.
    if every % fragments:
        raise ValueError(
            f"DiLoCo(every=..., fragments=...): every is a multiple of fragments, "
            f"got {every} and {fragments}"
        )
    # Each fragment is applied before the next one is sent: one exchange at a time is under way.
    if not 0 <= delay < every // fragments:
        raise ValueError(
            f"DiLoCo(delay=...): 0 <= delay < every / fragments = {every // fragments}, "
            f"got {delay!r}"
        )
    if not 0 <= momentum < 1:
        raise ValueError(f"DiLoCo(momentum=...): 0 <= momentum < 1, got {momentum!r}")
    if not lr > 0:  # NaN is refused, too
        raise ValueError(f"DiLoCo(lr=...) is above 0, got {lr!r}")
    return OuterSettings(every, fragments, delay, lr, momentum, nesterov)


# ---- saved states


# Version 1 had neither "version" nor "checksum". States without shards of tensor parallelism have
# version 2, without a "placement".
VERSION = 3
_FIELDS = ("hook", "steps", "outer_steps", "outer", "momentum", "arriving")


def add_checksum(state: dict[str, Any], placement: Mapping[str, str]) -> dict[str, Any]:
    """Returns a state with its version and checksum; the hook's part has a checksum already.

    Args:
        placement: the shards that this rank trains, by parameter (tensor parallelism).
    """
    if placement:
        state = {**state, "placement": stored_placement(placement)}
    version = VERSION if placement else VERSION - 1
    return {**state, "version": version, "checksum": _checksum(state)}


def check_state(
    state: object, fragments: Mapping[int, Fragment], every: int, parameters: Parameters
) -> Mapping[str, Any]:
    """Checks all of a loaded state but the hook's part, which the hook checks; returns it.

    Args:
        state: anything that was loaded from a file.
        fragments: fragments of the model, by number.
        every: inner steps between two exchanges of a parameter.
        parameters: the model's parameters.

    Raises:
        CheckpointError: the state is foreign, incomplete, damaged, or of another model.
    """
    # Types and shapes come before the checksum, whose computation relies on them.
    if not isinstance(state, Mapping) or any(field not in state for field in _FIELDS):
        raise _load_error(f"takes what state_dict() returned, with {', '.join(_FIELDS)}")
    for field in ("steps", "outer_steps"):
        if not is_int_between(state[field], 0, MAX_STEP):
            raise _load_error(f"{field!r} is no number of steps; the file is damaged")
    for field in ("outer", "momentum"):
        _check_parameters(field, state[field], fragments)
    _check_arriving(state["arriving"], fragments, every)
    version = state.get("version", 1)
    if not is_int_between(version, 1, VERSION):
        raise _load_error("saved in a newer version of the format: update commhooks")
    stored, expected = state.get("checksum"), _checksum(state) if version > 1 else None
    if type(stored) is not type(expected) or stored != expected:
        raise _load_error(
            "the checksum is wrong: the state was changed after it was saved, or the file is "
            "damaged. Load an older checkpoint"
        )
    placement = state.get("placement", [] if version == VERSION else None)
    check_placement("DiLoCo.load_state_dict", placement, parameters.placement, parameters.find)
    return state


def _check_parameters(field: str, values: object, fragments: Mapping[int, Fragment]) -> None:
    """Raises unless ``values`` has one finite tensor for each parameter."""
    expected = {
        name: value
        for fragment in fragments.values()
        for name, value in zip(fragment.names, getattr(fragment, field), strict=True)
    }
    if not isinstance(values, Mapping) or set(values) != set(expected):
        raise _load_error(
            f"{field!r} is not of the {len(expected)} parameters of this model; is the checkpoint "
            f"another model's?"
        )
    for name, like in expected.items():
        # Shapes are compared here: ``copy_`` would broadcast, and a vector of one entry fits all.
        _check_tensor(f"{field!r} of parameter {name!r}", values[name], like.shape)
        if not bool(torch.isfinite(values[name]).all()):
            raise _load_error(f"{field!r} of parameter {name!r} is not finite; it is damaged")


def _check_arriving(arriving: object, fragments: Mapping[int, Fragment], every: int) -> None:
    """Raises unless ``arriving`` lists averages that fragments of this model may still apply."""
    if not isinstance(arriving, (list, tuple)):
        raise _load_error("'arriving' is a list; the file is damaged")
    seen = set()
    for saved in arriving:
        if not isinstance(saved, Mapping) or any(key not in saved for key in ("fragment", "mean")):
            raise _load_error("'arriving' holds fragments and means; the file is damaged")
        number = saved["fragment"]
        if not is_int_between(number, 0, MAX_STEP) or number in seen:
            raise _load_error("'arriving' holds each fragment once; the file is damaged")
        if number not in fragments:
            raise _load_error("saved with more fragments; make it with as many")
        seen.add(number)
        if not is_int_between(saved.get("left"), 0, every):
            raise _load_error("'arriving' has steps left, no more than every; the file is damaged")
        # A mean that is not finite is allowed: ``DiLoCo`` then goes back to the last exchange.
        numel = sum(value.numel() for value in fragments[number].outer)
        _check_tensor(f"the mean arriving of fragment {number}", saved["mean"], torch.Size([numel]))


def _check_tensor(subject: str, value: object, shape: torch.Size) -> None:
    error = tensor_error(value)
    if error is None:
        assert isinstance(value, Tensor)
        if not value.is_floating_point():
            error = f"is of {value.dtype}, not floating point"
        elif value.shape != shape:
            error = f"has shape {tuple(value.shape)}, not {tuple(shape)}"
    if error is not None:
        raise _load_error(f"{subject} {error}; is the checkpoint another model's?")


def _checksum(state: Mapping[str, Any]) -> str:
    """Returns the checksum of all but the hook's part, which has one."""
    tensors: dict[tuple[str, ...], Tensor] = {
        (field, name): value
        for field in ("outer", "momentum")
        for name, value in state[field].items()
    }
    arriving = []
    for saved in state["arriving"]:
        arriving.append([saved["fragment"], saved["left"]])
        tensors["arriving", str(saved["fragment"])] = saved["mean"]
    placement = [state["placement"]] if "placement" in state else []
    return digest([state["steps"], state["outer_steps"], arriving, *placement], tensors)


def _load_error(why: str) -> CheckpointError:
    return CheckpointError(f"DiLoCo.load_state_dict: {why}")


# ---- other ranks


FIXED_GROUP = "it belongs to DiLoCo, which has to share parameters, too: call DiLoCo.change_group"


def change_hook_group(hook: HookState, group: dist.ProcessGroup) -> GroupChange:
    """Changes the process group of DiLoCo's hook."""
    hook.fixed_group_reason = ""
    try:
        return hook.change_group(group)
    finally:
        hook.fixed_group_reason = FIXED_GROUP


def broadcast_outer(
    fragments: Sequence[Fragment],
    counts: Sequence[int],
    change: GroupChange,
    group: dist.ProcessGroup,
) -> list[int]:
    """Broadcasts outer parameters and momenta of one rank; all ranks of ``group`` call it.

    A rank that joins begins with these parameters.

    Returns:
        The counts of that rank.
    """
    device = fragments[0].outer[0].device
    numbers = torch.tensor(list(counts), dtype=torch.int64, device=device)
    dist.broadcast(numbers, group=group, group_src=change.source)
    for fragment in fragments:
        for value in (*fragment.outer, *fragment.momentum):
            real = torch.view_as_real(value) if value.is_complex() else value
            dist.broadcast(real, group=group, group_src=change.source)
        if group.rank() in change.joined:
            fragment.restore()
    return [int(number) for number in numbers.tolist()]


# ---- DiLoCo


class DiLoCo:
    """Trains each rank locally for ``every`` steps, then averages the changes of parameters.

    A rank's change of parameters is its outer gradient (pseudo-gradient). An outer optimizer (SGD
    with Nesterov momentum) steps with the average over ranks, so ranks communicate once in
    ``every`` steps, compressed by any scheme. Call ``step`` after each step of the inner optimizer.
    The model is not in DistributedDataParallel, or its hook is "noop". Buffers (batch norm) stay
    local.

    With ``fragments`` and ``delay`` this is streaming DiLoCo: the parts of the model are exchanged
    one after the other, spread over ``every`` steps, and each average is applied ``delay`` steps
    after it was sent, while training continues. A rank's parameters are then the mean of its own
    and of the outer ones, so that half of what it has learned meanwhile stays.

    Args:
        model: the model that the inner optimizer trains, equal on all ranks at the start.
        scheme: averages the outer gradients; gets error feedback if it is biased.
        every: inner steps between two exchanges of a parameter.
        lr, momentum, nesterov: settings of the outer optimizer.
        fragments: number of parts of the model, of about equal size.
        delay: steps between sending and applying, below ``every / fragments``.
        process_group: the ranks to average over. None: the default group.
        seed, options: see :func:`commhooks.register`.

    Raises:
        ValueError: the settings do not fit together, the scheme does not average, or the model is
            in a DistributedDataParallel that averages gradients.
        TypeError: a setting has another type, or ``model`` is no module.
        MismatchError: the ranks differ in scheme, settings or parameters.

    Example:
        >>> outer = commhooks.DiLoCo(model, "int4", every=100)
        >>> for batch in batches:
        ...     optimizer.zero_grad()
        ...     loss(model, batch).backward()
        ...     optimizer.step()
        ...     outer.step()

    References: Douillard et al., DiLoCo, 2023; Streaming DiLoCo with overlapping communication,
    2025.
    """

    def __init__(
        self,
        model: nn.Module,
        scheme: str | Scheme = "none",
        *,
        every: int = 100,
        lr: float = 0.7,
        momentum: float = 0.9,
        nesterov: bool = True,
        fragments: int = 1,
        delay: int = 0,
        process_group: dist.ProcessGroup | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        _check_local(model)
        settings = checked_settings(
            every=every,
            fragments=fragments,
            delay=delay,
            lr=lr,
            momentum=momentum,
            nesterov=nesterov,
        )
        self.every, self.delay = settings.every, settings.delay
        self.steps = self.outer_steps = 0
        self._settings = settings
        self.hook = HookState(scheme, model, process_group=process_group, seed=seed, **options)
        _check_averages(self.hook.scheme)
        # A hook warns at the end if no backward pass has called it; none calls this one.
        self.hook.call_monitor.disable()
        self.hook.fixed_group_reason = FIXED_GROUP
        # With other settings on some rank, ranks would exchange different fragments, or hang.
        self.hook.agree("DiLoCo", {"settings": settings._asdict()})
        self._fragments = fragments_of(model, settings.fragments)
        self._pending: list[Pending] = []

    def step(self) -> bool:
        """Counts an inner step; sends and applies fragments that are due.

        Returns whether one was applied. If an averaged outer gradient is not finite, all ranks go
        back to the parameters of that fragment's last exchange.
        """
        self.steps += 1
        for pending in self._pending:
            pending.steps_left -= 1
        applied = self._apply_due()
        interval = self.every // len(self._fragments)  # between two fragments
        if self.steps % interval == 0:
            number = self.steps // interval % len(self._fragments)
            # Fragments of several dtypes are buckets of one step of the hook: all start before the
            # first is waited for (docs/design/steps.md).
            _check_averages(self.hook.scheme)  # again: ``hook.switch`` takes any scheme
            for fragment in self._fragments[number]:
                fragment.compute_outer_gradient()
                self._pending.append(Pending(fragment, self.hook.start(fragment), self.delay))
            if not self.delay:
                applied = self._apply_due()
        return applied

    def _apply_due(self) -> bool:
        """Applies the averages that have waited for ``delay`` steps; returns whether any has."""
        due = [pending for pending in self._pending if pending.steps_left <= 0]
        self._pending = [pending for pending in self._pending if pending.steps_left > 0]
        for pending in due:
            self._apply(pending)
        return bool(due)

    def _apply(self, pending: Pending) -> None:
        mean = pending.future.wait()
        # An average has the same bits on all ranks, so all of them go back without a message.
        if not _is_finite(mean):
            warnings.warn(
                f"DiLoCo: an averaged outer gradient is not finite in inner step {self.steps}; all "
                f"ranks go back to the parameters of the last exchange",
                RuntimeWarning,
                stacklevel=3,
            )
            pending.fragment.restore()
            return
        settings = self._settings
        pending.fragment.apply(
            mean, settings.lr, settings.momentum, settings.nesterov, late=self.delay > 0
        )
        self.outer_steps += pending.fragment.is_last()  # not once for each dtype

    # ---- other ranks

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Returns the ranks to average over."""
        return self.hook.process_group

    def change_group(self, group: dist.ProcessGroup) -> GroupChange:
        """Changes the process group as ``HookState.change_group``; all ranks of ``group`` call it.

        A rank that joins takes the outer parameters, and trains from them. An exchange that was
        sent and not applied yet is dropped: the next outer gradient contains its change, too.
        """
        self._pending, change = [], change_hook_group(self.hook, group)
        counts = broadcast_outer(
            self._all_fragments(), (self.steps, self.outer_steps), change, group
        )
        self.steps, self.outer_steps = counts
        return change

    # ---- checkpoint

    def state_dict(self, *, gather: bool = False, dst: int | None = None) -> dict[str, Any]:
        """Returns this rank's state; every rank also saves its model and inner optimizer.

        Args:
            gather, dst: return one state of all ranks, see :meth:`HookState.state_dict`. Models and
                inner optimizers differ between ranks and are not part of it.
        """
        arriving = [_arriving(pending) for pending in self._pending]  # first: it waits
        hook = self.hook.state_dict(gather=gather, dst=dst)
        if not hook:  # gathered on another rank
            return {}
        state = {
            "hook": hook,
            "steps": self.steps,
            "outer_steps": self.outer_steps,
            "outer": _copies(self._all_fragments(), "outer"),
            "momentum": _copies(self._all_fragments(), "momentum"),
            "arriving": arriving,
        }
        return add_checksum(state, self.hook.parameters.placement)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state, bit for bit as if training had not stopped.

        Raises:
            CheckpointError: the state is incomplete, damaged, or of another model; nothing was
                changed.
        """
        fragments = {fragment.number: fragment for fragment in self._all_fragments()}
        state = check_state(state, fragments, self.every, self.hook.parameters)
        # The hook refuses to load while an exchange is under way. Its result, or error, is dropped.
        for pending in self._pending:
            with suppress(RuntimeError):
                pending.future.wait()
        call = "DiLoCo.load_state_dict"
        # The hook's part is checked_settings, too, before anything changes.
        loaded = _checkpoint_hook.prepare(self.hook, state["hook"], True, call)
        _checkpoint_hook.apply(self.hook, loaded)
        self.steps, self.outer_steps = state["steps"], state["outer_steps"]
        for fragment in fragments.values():
            for field in ("outer", "momentum"):
                for name, value in zip(fragment.names, getattr(fragment, field), strict=True):
                    # detach: a saved nn.Parameter would put the copy into an autograd graph.
                    value.copy_(state[field][name].detach())
        self._pending = []
        for saved in state["arriving"]:
            fragment = fragments[saved["fragment"]]
            mean = saved["mean"].detach().to(fragment.outer[0], copy=True)
            self._pending.append(Pending(fragment, completed(mean), saved["left"]))

    def _all_fragments(self) -> list[Fragment]:
        return [fragment for group in self._fragments for fragment in group]

    def close(self) -> None:
        """Stops the hook's driver; see :meth:`HookState.close`."""
        self.hook.close()


def _arriving(pending: Pending) -> dict[str, Any]:
    # Averages that were sent and not yet applied are saved as tensors: they cannot be exchanged
    # again, since the parameters they were measured from are gone.
    mean = pending.future.wait().clone()
    return {"fragment": pending.fragment.number, "mean": mean, "left": pending.steps_left}


def _copies(fragments: list[Fragment], field: str) -> dict[str, Tensor]:
    """Returns copies of the outer parameters ("outer") or of their momenta, by parameter name."""
    return {
        name: value.clone()
        for fragment in fragments
        for name, value in zip(fragment.names, getattr(fragment, field), strict=True)
    }


def _is_finite(mean: Tensor) -> bool:
    """Returns whether all entries are finite, in one pass over them and without a temporary."""
    if not mean.numel():
        return True
    # Complex numbers have no order; ``aminmax`` returns NaN if there is one.
    low, high = (torch.view_as_real(mean) if mean.is_complex() else mean).aminmax()
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _check_averages(scheme: Scheme) -> None:
    """Raises unless a scheme gives every rank the same average: outer parameters stay equal."""
    if scheme.traits.returns == "mean" and scheme.traits.agrees:
        return
    gives = "something else" if scheme.traits.agrees else "every rank another result"
    raise ValueError(
        f"DiLoCo(scheme=...) averages outer gradients, and {scheme} gives {gives}; use 'none', or "
        f"what compresses an average, such as 'int4'"
    )


def _check_local(model: object) -> None:
    """Raises if ``model`` averages gradients; a hook of another library cannot be checked."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"DiLoCo(model, ...) takes the model, whose inner optimizer steps before outer.step(); "
            f"got {type(model).__name__}"
        )
    if not isinstance(model, DistributedDataParallel):
        return
    state = comm_hooks(model)[0][1] if comm_hooks(model) else None
    if not comm_hooks(model) or (isinstance(state, HookState) and state.scheme.traits.averages):
        raise ValueError(
            "DiLoCo(model, ...): this DistributedDataParallel averages gradients in every step, so "
            'the ranks never diverge; register(model, "noop") or hook.switch("noop") first, or '
            "train the module without DistributedDataParallel"
        )


def local_sgd(
    model: nn.Module, scheme: str | Scheme = "none", *, every: int = 16, **options: Any
) -> DiLoCo:
    """Returns local SGD: averages the parameters every ``every`` steps, without an outer momentum.

    After some steps of ordinary data-parallel training this is post-local SGD: train with a hook,
    call ``hook.switch("noop")``, then this function.

    Args:
        model, scheme, every, options: see :class:`DiLoCo`.

    Example:
        >>> hook.switch("noop")
        >>> averager = commhooks.local.local_sgd(ddp_model, every=16)

    References: Stich, Local SGD Converges Fast and Communicates Little, 2019; Lin et al., Don't Use
    Large Mini-Batches, Use Local SGD, 2020.
    """
    # With these, an outer step sets the parameters to their average over ranks.
    settings = {"lr": 1.0, "momentum": 0.0, "nesterov": False, **options}
    return DiLoCo(model, scheme, every=every, **settings)
