"""Defines ``FrameworkHook``, a hook on a model that a framework has wrapped."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn

from commhooks.core._scheme import Scheme
from commhooks.errors import CheckpointError, RegistrationError
from commhooks.hook._parameters import find_ddp
from commhooks.hook._registration import register
from commhooks.hook._state import HookState

__all__ = ["FrameworkHook"]

_NO_STATE = "one process"  # the key of a state in which nothing is


class FrameworkHook:
    """Holds the hook of a framework's model, and saves the states of all its ranks as one.

    Frameworks save what rank 0's objects return, and load it on every rank. In one process there is
    nothing to exchange: a warning says so once, and the hook does nothing.

    Args:
        scheme: a name or a scheme.
        options: options of the scheme and of :func:`commhooks.register`.

    Raises:
        TypeError: ``scheme`` is neither.
    """

    # The right calls, for messages.
    _calls = 'CommHook("int8")'
    # Advice if the framework's model is not in DistributedDataParallel.
    _advice = "wrap the model in DistributedDataParallel"
    # The rank that saves; None if every node saves a copy.
    _to: int | None = 0
    _file = "commhooks_state.pt"  # in the folder of a checkpoint

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "attach" in vars(cls):
            cls.attach = _checked(cls.attach)  # type: ignore[method-assign]

    def __init__(self, scheme: str | Scheme = "none", **options: Any) -> None:
        if not isinstance(scheme, str | Scheme):
            raise TypeError(
                f"{self._name}(scheme): a name or a scheme, got {type(scheme).__name__}. Call "
                f"{self._calls}"
            )
        self._scheme, self._options = scheme, options
        self._hook: HookState | None = None
        self._idle = False  # in one process
        self._pending_state: Mapping[str, Any] | None = None  # loaded before there was a hook

    @property
    def hook(self) -> HookState:
        """Returns the registered hook.

        Raises:
            RegistrationError: training has not begun, so there is no model to hook yet.
        """
        if self._hook is None:
            raise RegistrationError(
                f"{self._name}.hook: nothing is registered yet; the framework wraps its model when "
                f"training begins"
            )
        return self._hook

    def attach(self, *_: Any, **__: Any) -> Any:
        """Raises TypeError that shows the right call: not every framework needs this one."""
        raise TypeError(f"{self._name} has no attach, its framework calls it. Call {self._calls}")

    def _attach(self, model: nn.Module, world_size: int) -> None:
        """Registers the scheme on a wrapped model, and applies a state that was loaded before.

        Args:
            model: DistributedDataParallel, or a module that holds exactly one.
            world_size: number of the framework's ranks, over all of which the hook has to average.

        Raises:
            RegistrationError: the model is not wrapped, or its gradients are averaged over a part
                of the ranks, whose state rank 0 could not save.
        """
        if world_size == 1:
            self._stay_idle()
            return
        try:
            ddp = find_ddp(model)
        except RegistrationError as error:
            raise RegistrationError(
                f"{self._name}: the hook would never run: {self._advice} ({error})"
            ) from None
        group = self._options.get("process_group") or ddp.process_group
        if group.size() != world_size:
            raise RegistrationError(
                f"{self._name}: the framework has {world_size} ranks and gradients are averaged "
                f"over {group.size()} of them; a checkpoint would hold the state of rank 0's group "
                f"only. Call commhooks.register, and save its state in every group"
            )
        if self._hook is not None:
            self._hook.close()  # of a model that was wrapped for a run before this one
        self._hook, self._idle = register(ddp, self._scheme, **self._options), False
        if self._pending_state is not None:
            self._hook.load_state_dict(self._pending_state)
            self._pending_state = None

    def _stay_idle(self) -> None:
        """Holds a hook that is on no model, so that scripts run in one process as they are."""
        if not self._idle:
            warnings.warn(
                f"{self._name}: there is one process, which exchanges nothing, so the hook does "
                f"nothing",
                RuntimeWarning,
                stacklevel=4,
            )
        of_register = inspect.signature(register).parameters.keys() - {"seed", "history"}
        options = {key: self._options[key] for key in self._options.keys() - of_register}
        # "auto" chooses among schemes on a model.
        self._hook = HookState() if self._scheme == "auto" else HookState(self._scheme, **options)
        self._idle = True
        self._hook.call_monitor.disable()

    def _check(self, right: bool) -> None:
        """Raises TypeError that shows the right call, unless the arguments are right."""
        if not right:
            raise TypeError(f"{self._name}.attach: wrong arguments. Call {self._calls}")

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of all ranks on rank 0, an empty dict on the others; all ranks call it.

        In one process, returns what was loaded, which the next job of several can load.

        Raises:
            MismatchError: the ranks are not at the same step, or (MissingRankError) some of them
                did not come.
        """
        if self._hook is None or self._idle:
            return dict(self._pending_state or ({_NO_STATE: True} if self._idle else {}))
        return self._hook.state_dict(gather=True, dst=self._to)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state of all ranks, on any number of ranks; all ranks call it.

        Raises:
            CheckpointError: the state is empty, damaged, or of another scheme or model.
        """
        if not state:
            raise CheckpointError(
                f"{self._name}.load_state_dict: the state is empty; state_dict() returns the state "
                f"of all ranks on rank 0 only: load what rank 0 has saved"
            )
        if _NO_STATE in state:
            return
        if self._hook is None or self._idle:
            self._pending_state = state
        else:
            self._hook.load_state_dict(state)

    def save(self, folder: str | Path) -> None:
        """Writes the state of all ranks to a file in ``folder``, from rank 0; all ranks call it."""
        state = self.state_dict()
        if state:
            torch.save(state, Path(folder, self._file))

    def load(self, folder: str | Path) -> None:
        """Continues from a file of ``save``, on any number of ranks; all ranks call it.

        Raises:
            CheckpointError: there is no such file, or it is damaged or does not fit.
        """
        path = Path(folder, self._file)
        if not path.exists():
            raise CheckpointError(
                f"{self._name}.load: there is no {path}; the checkpoint was saved without this "
                f"hook, or is in another folder"
            )
        # Mapped: a rank needs its own part, and the file holds a residual per rank.
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        self.load_state_dict(state)

    def metrics(self) -> dict[str, float]:
        """Returns numbers of the latest step as ``comm/...``; see :meth:`HookState.metrics`.

        Returns none in one process.
        """
        return {} if self._idle else self.hook.metrics("comm/")

    @property
    def _name(self) -> str:
        return f"{type(self).__module__}.{type(self).__qualname__}"


def _checked(attach: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``attach`` whose TypeError for missing or further arguments shows the right call."""

    @wraps(attach)
    def checked(self: FrameworkHook, *args: Any, **kwargs: Any) -> Any:
        try:
            inspect.signature(attach).bind(self, *args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self._name}.attach: {error}. Call {self._calls}") from None
        return attach(self, *args, **kwargs)

    return checked
