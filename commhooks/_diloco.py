"""DiLoCo: many local steps, then one exchange of how far the parameters went."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from commhooks._errors import CheckpointError
from commhooks._scheme import Scheme
from commhooks._state import HookState

__all__ = ["DiLoCo", "local_sgd"]


class _Fragment:
    """Parameters that are exchanged together; to a hook it is a bucket."""

    def __init__(self, number: int, names: list[str], parameters: list[Tensor]) -> None:
        self.number, self.names, self._parameters = number, names, parameters
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
        return 0

    def buffer(self) -> Tensor:
        return self._delta

    def is_last(self) -> bool:
        return True

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
        ValueError: settings that do not fit together.
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
        for name, value, least in (("every", every, 1), ("fragments", fragments, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"DiLoCo({name}=...) is {least} or more, got {value!r}")
        if every % fragments:
            raise ValueError(
                f"DiLoCo(every=..., fragments=...): every is a multiple of fragments, "
                f"got {every} and {fragments}"
            )
        if isinstance(delay, bool) or not 0 <= delay < every // fragments:
            raise ValueError(
                f"DiLoCo(delay=...): 0 <= delay < every / fragments = {every // fragments}, "
                f"got {delay!r}"
            )
        if not 0 <= mix <= 1 or (mix and not delay):
            raise ValueError(f"DiLoCo(mix=...): 0 <= mix <= 1, and 0 without a delay, got {mix!r}")
        if not 0 <= momentum < 1:
            raise ValueError(f"DiLoCo(momentum=...): 0 <= momentum < 1, got {momentum!r}")
        self.every, self.delay, self.steps, self.outer_steps = every, delay, 0, 0
        self._settings = (lr, momentum, nesterov, mix)
        self.hook = HookState(scheme, model, process_group=process_group, seed=seed, **options)
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
        applied = False
        for pending in list(self._pending):
            pending.steps_left -= 1
            if pending.steps_left <= 0:
                self._pending.remove(pending)
                self._apply(pending)
                applied = True
        apart = self.every // len(self._fragments)
        if self.steps % apart == 0:
            number = self.steps // apart % len(self._fragments)
            for fragment in self._fragments[number]:
                fragment.measure()
                pending = _Pending(fragment, self.hook.launch(fragment), self.delay)
                if self.delay:
                    self._pending.append(pending)
                else:
                    self._apply(pending)
                    applied = True
        return applied

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
        self.outer_steps += 1

    # ---- checkpoint

    def state_dict(self) -> dict[str, Any]:
        """This rank's state; model and inner optimizer are saved beside it, by every rank."""
        arriving = [
            {
                "fragment": one.fragment.number,
                "mean": one.future.wait().clone(),
                "left": one.steps_left,
            }
            for one in self._pending
        ]
        return {
            "hook": self.hook.state_dict(),
            "steps": self.steps,
            "outer_steps": self.outer_steps,
            "outer": self._tensors("outer"),
            "momentum": self._tensors("momentum"),
            "arriving": arriving,
        }

    def _tensors(self, what: str) -> dict[str, Tensor]:
        return {
            name: value.clone()
            for fragment in self._all()
            for name, value in zip(fragment.names, getattr(fragment, what), strict=True)
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state, as if there had been no stop.

        Raises:
            CheckpointError: incomplete, or of another model; nothing was changed.
        """
        wanted = {name for fragment in self._all() for name in fragment.names}
        for what in ("outer", "momentum"):
            if not isinstance(state, Mapping) or set(state.get(what, ())) != wanted:
                raise CheckpointError(
                    f"DiLoCo.load_state_dict: {what!r} is not of the {len(wanted)} parameters of "
                    f"this model; is the checkpoint another model's?"
                )
        by_number = {fragment.number: fragment for fragment in self._all()}
        if any(one["fragment"] not in by_number for one in state["arriving"]):
            raise CheckpointError(
                "DiLoCo.load_state_dict: saved with more fragments; make it with as many"
            )
        self.hook.load_state_dict(state["hook"])
        self.steps, self.outer_steps = state["steps"], state["outer_steps"]
        for fragment in self._all():
            for what in ("outer", "momentum"):
                for name, value in zip(fragment.names, getattr(fragment, what), strict=True):
                    value.copy_(state[what][name])
        self._pending = []
        for one in state["arriving"]:
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(one["mean"].clone())
            self._pending.append(_Pending(by_number[one["fragment"]], future, one["left"]))

    def _all(self) -> list[_Fragment]:
        return [one for group in self._fragments for one in group]

    def close(self) -> None:
        """Stops the hook's driver; see :meth:`HookState.close`."""
        self.hook.close()


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
        for members in kinds.values():
            names, parameters = zip(*members, strict=True)
            group.append(_Fragment(number, list(names), list(parameters)))
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
        >>> averager = commhooks.local_sgd(ddp_model, every=16)

    References: Stich, Local SGD Converges Fast and Communicates Little, 2019; Lin et al., Don't Use
    Large Mini-Batches, Use Local SGD, 2020.
    """
    settings = {"lr": 1.0, "momentum": 0.0, "nesterov": False, **options}
    return DiLoCo(model, scheme, every=every, **settings)
