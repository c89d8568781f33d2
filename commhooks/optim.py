"""Defines optimizers that belong to a scheme."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from commhooks.core._scheme import Scheme
from commhooks.core._settings import shown
from commhooks.hook._state import HookState
from commhooks.schemes.onebit_adam import OneBitMomentum
from commhooks.wrappers._base import Coalesced
from commhooks.wrappers._cast import Cast
from commhooks.wrappers._traced import Traced

__all__ = ["OneBitAdam"]


class OneBitAdam(torch.optim.Optimizer):
    """Runs Adam, and freezes its second moment when its hook begins to exchange momenta.

    Until the hook's ``freeze_step`` this is ``torch.optim.AdamW``. From then on ``p.grad`` is the
    averaged momentum, and entries whose second moment is zero, which never had a gradient, change
    by weight decay only.

    Args:
        params: parameters, or groups of them.
        hook: the result of ``commhooks.register(model, "onebit_adam", ...)``.
        lr: learning rate.
        beta2: decay of the second moment; that of the first moment is the scheme's ``beta1``.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay, as in AdamW.

    Raises:
        TypeError: the hook does not run ``onebit_adam``.

    Example:
        >>> hook = commhooks.register(ddp_model, "onebit_adam", freeze_step=1000)
        >>> optimizer = OneBitAdam(ddp_model.parameters(), hook, lr=1e-3)

    Reference: Tang et al., 1-bit Adam, 2021.
    """

    def __init__(
        self,
        params: Iterable[Any],
        hook: HookState,
        lr: float = 1e-3,
        *,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        # These wrappers change how payloads travel, but not what the optimizer is given. Any other
        # wrapper may, so the scheme inside is not looked for.
        scheme: Scheme | None = hook.scheme if isinstance(hook, HookState) else None
        while isinstance(scheme, (Cast, Coalesced, Traced)):
            scheme = scheme.scheme
        if not isinstance(scheme, OneBitMomentum):
            raise TypeError(
                f"OneBitAdam(hook): a hook that runs 'onebit_adam', which sends it momenta; this "
                f"one {f'runs {scheme}' if scheme is not None else 'is ' + shown(hook)}"
            )
        self._hook, self._scheme = hook, scheme
        super().__init__(
            params, {"lr": lr, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
        )

    @property
    def frozen(self) -> bool:
        """Whether the gradients of the latest backward pass are momenta."""
        # ``hook.step`` has counted that pass: the first pass of momenta has index freeze_step.
        return self._hook.step > self._scheme.freeze_step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all parameters that have a gradient.

        Args:
            closure: computes the loss again, as for other optimizers.

        Returns:
            The result of ``closure``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            # ``second_steps`` stops at the freeze, since only it says how far the second moment is
            # from its start at zero. Both moments are float32: (1 - beta2) g^2 is lost in 16 bits.
            state["step"], state["second_steps"] = 0, 0
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
        beta1, beta2 = self._scheme.beta1, group["beta2"]
        first, second = state["exp_avg"], state["exp_avg_sq"]
        state["step"] += 1
        if self.frozen:
            first.copy_(grad)  # the scheme keeps the momentum, and has averaged it over ranks
        else:
            first.lerp_(grad.float(), 1 - beta1)
            second.mul_(beta2).addcmul_(grad.float(), grad.float(), value=1 - beta2)
            state["second_steps"] += 1
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        correction = 1 - beta1 ** state["step"]
        root = second.div(1 - beta2 ** max(1, state["second_steps"])).sqrt_().add_(group["eps"])
        # One bit per entry gives all entries of a block one magnitude: without the mask, an entry
        # that never had a gradient would move by that magnitude over eps.
        update = first.div(root).masked_fill_(second == 0, 0.0)
        parameter.add_(update.to(parameter.dtype), alpha=-group["lr"] / correction)
