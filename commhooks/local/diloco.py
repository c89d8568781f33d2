"""DiLoCo: many local steps, then one exchange of how far the parameters went."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from commhooks.core.scheme import Scheme
from commhooks.core.settings import fitting
from commhooks.hook import saving as _checkpoint_hook
from commhooks.hook.state import HookState
from commhooks.local.saving import check_state, sealed

__all__ = ["DiLoCo", "local_sgd"]


class _Fragment:
    """Parameters that are exchanged together; to a hook it is a bucket of a step.

    Args:
        number: among all fragments.
        place, is_last: among those that are exchanged in one step, one for each dtype and device.
    """

    def __init__(
        self,
        number: int,
        names: list[str],
        parameters: list[Tensor],
        *,
        place: int,
        is_last: bool,
    ) -> None:
        self.number, self.names, self._parameters = number, names, parameters
        self._place, self._is_last = place, is_last
        self.outer = [parameter.detach().clone() for parameter in parameters]
        self.momentum = [torch.zeros_like(parameter) for parameter in parameters]
        self._delta = torch.empty(0)

    def measure(self) -> None:
        """Takes down how far the parameters went since the last exchange."""
        pairs = zip(self.outer, self._parameters, strict=True)
        self._delta = torch.cat([(old - new.detach()).flatten() for old, new in pairs])

    def apply(self, mean: Tensor, lr: float, momentum: float, nesterov: bool, mix: float) -> None:
        """One outer step; ``mix`` is the share of the local parameters that stays."""
        pieces = mean.split([parameter.numel() for parameter in self._parameters])
        parts = zip(self._parameters, self.outer, self.momentum, pieces, strict=True)
        for parameter, outer, velocity, piece in parts:
            delta = piece.view_as(outer)
            velocity.mul_(momentum).add_(delta)
            step = delta.add(velocity, alpha=momentum) if nesterov else velocity
            outer.sub_(step, alpha=lr)
            parameter.data.copy_(torch.lerp(outer, parameter.data, mix) if mix else outer)

    def restore(self) -> None:
        """Goes back to the parameters of the last exchange."""
        for parameter, outer in zip(self._parameters, self.outer, strict=True):
            parameter.data.copy_(outer)

    # As a hook sees it.

    def index(self) -> int:
        return self._place

    def buffer(self) -> Tensor:
        return self._delta

    def is_last(self) -> bool:
        return self._is_last

    def parameters(self) -> list[Tensor]:
        return self._parameters


@dataclass
class _Pending:
    """An exchange under way, or arrived and not yet applied."""

    fragment: _Fragment
    future: torch.futures.Future[Tensor]
    steps_left: int


class DiLoCo:
    """Lets each rank train by itself for ``every`` steps, then averages how far all went.

    The averaged distance is the gradient of an outer optimizer (SGD with Nesterov momentum), so
    gradients travel once in ``every`` steps, compressed by any scheme. ``step`` is called after
    each step of the inner optimizer. The model is not in DistributedDataParallel, or in one whose
    hook is "noop". Buffers (batch norm) stay local.

    With ``fragments`` and ``delay`` it is streaming DiLoCo: the parts of the model are exchanged
    one after the other, spread over ``every`` steps, and each is applied ``delay`` steps after it
    was sent, while training goes on.

    Args:
        model: the model that the inner optimizer trains, the same on all ranks at the start.
        scheme: what distances travel by; with error feedback where it is biased.
        every: inner steps between two exchanges of a parameter.
        lr, momentum, nesterov: of the outer optimizer.
        fragments: parts of the model, of about equal size.
        delay: steps between sending and applying, below ``every / fragments``.
        mix: share of the local parameters that stays when a fragment is applied, 0 to 1; only
            with a delay.
        process_group: the ranks; the default group.
        seed, options: see :func:`commhooks.register`.

    Raises:
        ValueError: settings that do not fit together, a scheme that does not average, or a model
            in DistributedDataParallel that does.
        TypeError: settings of another type, or something else than a model.
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
        mix: float = 0.0,
        process_group: dist.ProcessGroup | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        _need_local(model)
        every, fragments, delay = (
            fitting("DiLoCo", name, value, int)
            for name, value in (("every", every), ("fragments", fragments), ("delay", delay))
        )
        lr, momentum, mix = (
            fitting("DiLoCo", name, value, float)
            for name, value in (("lr", lr), ("momentum", momentum), ("mix", mix))
        )
        nesterov = fitting("DiLoCo", "nesterov", nesterov, bool)
        for name, value in (("every", every), ("fragments", fragments)):
            if value < 1:
                raise ValueError(f"DiLoCo({name}=...) is 1 or more, got {value!r}")
        if every % fragments:
            raise ValueError(
                f"DiLoCo(every=..., fragments=...): every is a multiple of fragments, "
                f"got {every} and {fragments}"
            )
        if not 0 <= delay < every // fragments:
            raise ValueError(
                f"DiLoCo(delay=...): 0 <= delay < every / fragments = {every // fragments}, "
                f"got {delay!r}"
            )
        if not 0 <= mix <= 1 or (mix and not delay):
            raise ValueError(f"DiLoCo(mix=...): 0 <= mix <= 1, and 0 without a delay, got {mix!r}")
        if not 0 <= momentum < 1:
            raise ValueError(f"DiLoCo(momentum=...): 0 <= momentum < 1, got {momentum!r}")
        if not lr > 0:
            raise ValueError(f"DiLoCo(lr=...) is above 0, got {lr!r}")
        self.every, self.delay, self.steps, self.outer_steps = every, delay, 0, 0
        self._settings = (lr, momentum, nesterov, mix)
        self.hook = HookState(scheme, model, process_group=process_group, seed=seed, **options)
        if self.hook.scheme.traits.returns != "mean":
            raise ValueError(
                f"DiLoCo(scheme=...) averages distances, and {self.hook.scheme} gives something "
                f"else; use 'none', or what compresses an average, such as 'int4'"
            )
        self.hook._attendance.dismiss()  # no backward pass calls it
        settings = {"every": every, "fragments": fragments, "delay": delay, "mix": mix}
        settings |= {"lr": lr, "momentum": momentum, "nesterov": nesterov}
        self.hook.agree("DiLoCo", {"settings": settings})
        self._fragments = _fragments_of(model, fragments)
        self._pending: list[_Pending] = []

    def step(self) -> bool:
        """Counts one inner step; sends and applies what is due. True if something was applied.

        Where an averaged distance is not finite, all ranks go back to the last exchange.
        """
        self.steps += 1
        for pending in self._pending:
            pending.steps_left -= 1
        applied = self._apply_due()
        apart = self.every // len(self._fragments)
        if self.steps % apart == 0:
            number = self.steps // apart % len(self._fragments)
            for fragment in self._fragments[number]:
                fragment.measure()
                self._pending.append(_Pending(fragment, self.hook.start(fragment), self.delay))
            if not self.delay:
                applied = self._apply_due()
        return applied

    def _apply_due(self) -> bool:
        """Applies what has waited for long enough; True if something has."""
        due = [pending for pending in self._pending if pending.steps_left <= 0]
        self._pending = [pending for pending in self._pending if pending.steps_left > 0]
        for pending in due:
            self._apply(pending)
        return bool(due)

    def _apply(self, pending: _Pending) -> None:
        mean = pending.future.wait()
        if not torch.isfinite(mean).all():
            warnings.warn(
                f"DiLoCo: an averaged distance is not finite in inner step {self.steps}; all ranks "
                f"go back to the parameters of the last exchange",
                RuntimeWarning,
                stacklevel=3,
            )
            pending.fragment.restore()
            return
        lr, momentum, nesterov, mix = self._settings
        pending.fragment.apply(mean, lr, momentum, nesterov, mix)
        self.outer_steps += pending.fragment.is_last()

    # ---- checkpoint

    def state_dict(self, *, gather: bool = False, to: int | None = None) -> dict[str, Any]:
        """This rank's state; model and inner optimizer are saved beside it, by every rank.

        Args:
            gather, to: one state of all ranks, see :meth:`HookState.state_dict`; model and inner
                optimizer still are of each rank.
        """
        arriving = [
            {
                "fragment": one.fragment.number,
                "mean": one.future.wait().clone(),
                "left": one.steps_left,
            }
            for one in self._pending
        ]
        hook = self.hook.state_dict(gather=gather, to=to)
        if not hook:
            return {}
        own = {
            "hook": hook,
            "steps": self.steps,
            "outer_steps": self.outer_steps,
            "outer": self._tensors("outer"),
            "momentum": self._tensors("momentum"),
            "arriving": arriving,
        }
        return sealed(own)

    def _tensors(self, what: str) -> dict[str, Tensor]:
        return {
            name: value.clone()
            for fragment in self._all()
            for name, value in zip(fragment.names, getattr(fragment, what), strict=True)
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state, as if there had been no stop.

        Raises:
            CheckpointError: incomplete, damaged, or of another model; nothing was changed.
        """
        state = check_state(self, state)
        for pending in self._pending:  # exchanges under way belong to what is given up
            with suppress(RuntimeError):
                pending.future.wait()
        call = "DiLoCo.load_state_dict"
        loaded = _checkpoint_hook.prepare(self.hook, state["hook"], True, call)
        _checkpoint_hook.take_up(self.hook, loaded)
        self.steps, self.outer_steps = state["steps"], state["outer_steps"]
        fragments = {fragment.number: fragment for fragment in self._all()}
        for fragment in fragments.values():
            for what in ("outer", "momentum"):
                for name, value in zip(fragment.names, getattr(fragment, what), strict=True):
                    value.copy_(state[what][name].detach())
        self._pending = []
        for one in state["arriving"]:
            fragment = fragments[one["fragment"]]
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(one["mean"].detach().to(fragment.outer[0], copy=True))
            self._pending.append(_Pending(fragment, future, one["left"]))

    def _all(self) -> list[_Fragment]:
        return [one for group in self._fragments for one in group]

    def close(self) -> None:
        """Stops the hook's driver; see :meth:`HookState.close`."""
        self.hook.close()


def _need_local(model: object) -> None:
    """Raises unless the gradients of ``model`` stay on their rank, as far as can be seen."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"DiLoCo(model, ...) takes the model, whose inner optimizer steps before outer.step(); "
            f"got {type(model).__name__}"
        )
    if not isinstance(model, DistributedDataParallel):
        return
    state = model._comm_hooks[0][1] if model._comm_hooks else None
    if not model._comm_hooks or (isinstance(state, HookState) and state.scheme.traits.averages):
        raise ValueError(
            "DiLoCo(model, ...): this DistributedDataParallel averages gradients in every step, so "
            'the ranks never go apart; register(model, "noop") or hook.switch("noop") first, or '
            "train the module without DistributedDataParallel"
        )


def _fragments_of(model: nn.Module, count: int) -> list[list[_Fragment]]:
    """``count`` parts of about equal size, in order; each one fragment per dtype and device."""
    module = model.module if isinstance(model, DistributedDataParallel) else model
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    if len(trained) < count:
        raise ValueError(
            f"DiLoCo(fragments={count}): the model has {len(trained)} trained parameters"
        )
    whole = sum(parameter.numel() for _, parameter in trained)
    parts: list[list[tuple[str, Tensor]]] = [[] for _ in range(count)]
    before = 0
    for index, (name, parameter) in enumerate(trained):
        left = len(trained) - index
        place = min(count - 1, before * count // max(1, whole))
        filled = sum(bool(part) for part in parts)
        place = max(place, count - left) if filled <= place else place  # none stays empty
        place = min(place, filled)
        parts[place].append((name, parameter))
        before += parameter.numel()
    found, number = [], 0
    for part in parts:
        kinds: dict[Any, list[tuple[str, Tensor]]] = {}
        for name, parameter in part:
            kinds.setdefault((parameter.dtype, parameter.device), []).append((name, parameter))
        group = []
        for place, members in enumerate(kinds.values()):
            names, parameters = zip(*members, strict=True)
            is_last = place == len(kinds) - 1
            group.append(
                _Fragment(number, list(names), list(parameters), place=place, is_last=is_last)
            )
            number += 1
        found.append(group)
    return found


def local_sgd(
    model: nn.Module, scheme: str | Scheme = "none", *, every: int = 16, **options: Any
) -> DiLoCo:
    """Local SGD: the parameters are averaged every so many steps, without an outer momentum.

    After some steps of ordinary data parallel training it is post-local SGD: train with a hook,
    ``hook.switch("noop")``, and call this.

    Args:
        model, scheme, every, options: see :class:`DiLoCo`.

    Example:
        >>> hook.switch("noop")
        >>> averager = commhooks.local.local_sgd(ddp_model, every=16)

    References: Stich, Local SGD Converges Fast and Communicates Little, 2019; Lin et al., Don't Use
    Large Mini-Batches, Use Local SGD, 2020.
    """
    settings = {"lr": 1.0, "momentum": 0.0, "nesterov": False, **options}
    return DiLoCo(model, scheme, every=every, **settings)
