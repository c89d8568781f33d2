"""DiLoCo: many local steps, then one exchange of how far the parameters went."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from commhooks.core.scheme import Scheme
from commhooks.hook import saving as _checkpoint_hook
from commhooks.hook.state import HookState
from commhooks.local.fragments import Fragment, Pending, fragments_of
from commhooks.local.outer_settings import checked
from commhooks.local.saving import check_state, sealed

__all__ = ["DiLoCo", "local_sgd"]


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
        settings = checked(
            every=every,
            fragments=fragments,
            delay=delay,
            mix=mix,
            lr=lr,
            momentum=momentum,
            nesterov=nesterov,
        )
        self.every, self.delay = settings.every, settings.delay
        self.steps = self.outer_steps = 0
        self._settings = settings
        self.hook = HookState(scheme, model, process_group=process_group, seed=seed, **options)
        if self.hook.scheme.traits.returns != "mean":
            raise ValueError(
                f"DiLoCo(scheme=...) averages distances, and {self.hook.scheme} gives something "
                f"else; use 'none', or what compresses an average, such as 'int4'"
            )
        self.hook._attendance.dismiss()  # no backward pass calls it
        self.hook.agree("DiLoCo", {"settings": settings._asdict()})
        self._fragments = fragments_of(model, settings.fragments)
        self._pending: list[Pending] = []

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
                self._pending.append(Pending(fragment, self.hook.start(fragment), self.delay))
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

    def _apply(self, pending: Pending) -> None:
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
        s = self._settings
        pending.fragment.apply(mean, s.lr, s.momentum, s.nesterov, s.mix)
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
        fragments = {fragment.number: fragment for fragment in self._all()}
        state = check_state(state, fragments, self.every)
        for pending in self._pending:  # exchanges under way belong to what is given up
            with suppress(RuntimeError):
                pending.future.wait()
        call = "DiLoCo.load_state_dict"
        loaded = _checkpoint_hook.prepare(self.hook, state["hook"], True, call)
        _checkpoint_hook.take_up(self.hook, loaded)
        self.steps, self.outer_steps = state["steps"], state["outer_steps"]
        for fragment in fragments.values():
            for what in ("outer", "momentum"):
                for name, value in zip(fragment.names, getattr(fragment, what), strict=True):
                    value.copy_(state[what][name].detach())
        self._pending = []
        for one in state["arriving"]:
            fragment = fragments[one["fragment"]]
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(one["mean"].detach().to(fragment.outer[0], copy=True))
            self._pending.append(Pending(fragment, future, one["left"]))

    def _all(self) -> list[Fragment]:
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
