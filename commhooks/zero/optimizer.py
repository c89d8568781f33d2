"""Defines ``ZeroOptimizer``, whose state is sharded over the ranks of a data-parallel model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from commhooks.core.scheme import Scheme
from commhooks.errors import RegistrationError
from commhooks.hook.attachment import AttachmentGuard
from commhooks.hook.handshake import MEETING
from commhooks.hook.hook_function import comm_hook
from commhooks.hook.sharded import need_shards
from commhooks.zero import saving
from commhooks.zero.checks import (
    groups_of,
    need_elementwise,
    need_equal_values,
    need_known_use,
    need_model,
    need_none_accumulated,
)
from commhooks.zero.gather import Gather
from commhooks.zero.hook import ZeroHook
from commhooks.zero.shards import Shards

__all__ = ["ZeroOptimizer"]


class ZeroOptimizer(torch.optim.Optimizer):
    """Steps one shard of each bucket on each rank with any elementwise optimizer (ZeRO-1).

    Buckets of gradients are reduced to shards during backward: each rank gets the float32 mean of
    its shard, rounded once. ``step`` updates this rank's shards and gathers the results, so that
    the optimizer's state takes 1/n of the memory on n ranks.

    All ranks make it and call its methods alike. ``.grad`` of parameters has no mean: use
    :meth:`clip_grad_norm_`. A step in which a gradient of any rank is not finite changes nothing.

    Args:
        model: ``ddp_core.DistributedDataParallel`` without a hook.
        optimizer: a class of ``torch.optim``, or another one that steps each entry by itself.
        scheme: reduces gradients: a name or a scheme that exchanges blocks of entries.
        gather: how new values travel: "none" as they are; a codec ("int8", "int4", ...): packed
            differences, whose rounding errors the owner sends later.
        params: groups of parameters, as for any optimizer; None: all trained ones.
        in_backward: steps and sends each bucket during backward, as soon as its gradients have
            arrived; ``step`` then applies what came, or takes it back. Without clipping, gradient
            scalers, ``find_unused_parameters`` and the model's ``mixed_precision``.
        seed: base of random draws, the same on every rank.
        history: rows kept by ``hook.report``.
        settings: of the optimizer, such as ``lr``.

    Attributes:
        hook: reduces gradients; its ledger has all bytes.
        skipped_steps: number of steps with gradients that were not finite.

    Raises:
        RegistrationError: the model, the optimizer or a scheme cannot be sharded.
        MismatchError: the ranks differ in settings.

    Example:
        >>> zero = commhooks.ZeroOptimizer(
        ...     ddp_model, torch.optim.AdamW, scheme="int8", gather="int8", lr=1e-3
        ... )
        >>> loss(ddp_model, batch).backward()
        >>> zero.step()
        >>> zero.zero_grad()

    References: Rajbhandari et al., ZeRO, 2020; Jia et al., SDP4Bit, 2024 (differences).
    """

    _made = False  # the base class adds the groups

    def __init__(
        self,
        model: nn.Module,
        optimizer: type[torch.optim.Optimizer],
        *,
        scheme: str | Scheme = "none",
        gather: str | Scheme = "none",
        params: Iterable[Any] | None = None,
        in_backward: bool = False,
        seed: int = 0,
        history: int = 100_000,
        **settings: Any,
    ) -> None:
        ddp: Any = need_model(model)  # also of torch's class, for those who ask
        self._groups = groups_of(ddp, params)
        need_elementwise(optimizer, {**settings, **self._groups[0][0]}, ddp.reducer.device)
        sends = Gather(gather)
        self.hook = ZeroHook(scheme, ddp, seed=seed, history=history)
        need_shards(self.hook.scheme, "ZeroOptimizer", "ZeroOptimizer(scheme=...)")
        need_equal_values(sends.codec, self.hook._parameters)
        self._model = ddp
        names = self.hook._binding.names
        facts: dict[str, Any] = {
            "optimizer": f"{optimizer.__module__}.{optimizer.__qualname__}",
            "gather": repr(sends.codec),
            "groups": repr([({**settings, **own}, names(p)) for own, p in self._groups]),
            "in_backward": in_backward,
        }
        if in_backward:
            need_known_use(ddp)
            self.hook._further_rounds = 1  # the gather
        self.hook.agree("commhooks.ZeroOptimizer", facts, MEETING)
        ddp.register_comm_hook(self.hook, comm_hook)
        ddp.register_forward_pre_hook(AttachmentGuard(self.hook, ddp))
        ddp._parts.uneven.needs_all = True  # a rank without inputs would not step
        ddp.reducer.keep_registered_buckets()
        self.skipped_steps = 0
        self._shards = Shards(self.hook, ddp, sends, in_backward)
        groups = [{**own, "params": self._shards.values(p)} for own, p in self._groups]
        groups[0]["params"] += [self._shards.told]
        self._inner = self._shards.optimizer = optimizer(groups, **settings)
        super().__init__(self._inner.param_groups, self._inner.defaults)
        # The same objects: schedulers and scalers write here, and the optimizer inside reads.
        self.param_groups, self.state = self._inner.param_groups, self._inner.state
        self._made = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._made:
            raise RegistrationError(
                "ZeroOptimizer.add_param_group: groups are settled when it is made: give all "
                "parameters as params=..."
            )
        super().add_param_group(param_group)

    # ---- one step

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients: the shards' means, and what ``no_sync`` has accumulated."""
        self._shards.zero_grad()
        for parameter in self._model.parameters():
            parameter.grad = None

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales gradients down to a norm over all parameters, as torch's function; a collective.

        Args:
            max_norm: the largest norm that is left as it is.
            norm_type: 2, another power, or infinity.

        Returns:
            The norm before, the same on all ranks; not finite if a gradient of any rank is not.
        """
        self._model._parts.before_collectives()
        return self._shards.clip(max_norm, norm_type)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates this rank's shards, and all parameters by what their owners send.

        Buckets without a gradient since ``zero_grad`` stay as they are, and so does everything if a
        gradient of any rank was not finite.

        Args:
            closure: computes the loss again, as for other optimizers.

        Raises:
            RegistrationError: gradients were accumulated, and were not averaged.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        need_none_accumulated(self._model)
        if not self._shards.any_arrived:  # nothing trains, or something else does
            self._model._parts.known.check()
        self._shards.step()
        self.skipped_steps += not self._shards.finite
        return loss

    # ---- checkpoint

    def state_dict(self, *, gather: bool = False, to: int | None = None) -> dict[str, Any]:
        """Returns a copy of all that a later run continues from, besides the model's own state.

        Args:
            gather: returns one state of all ranks, by parameter, on the CPU, which loads on any
                number of ranks; all ranks call it. False: this rank's pieces.
            to: with ``gather``, the only rank that gets it; the others get an empty dict.
        """
        if self._shards.waiting:
            raise RegistrationError(
                "ZeroOptimizer.state_dict: buckets were stepped in backward, and parameters were "
                "not: call step() or zero_grad() first"
            )
        pieces: saving.Saved | None = saving.saved_pieces(self._shards.pieces(), self.state)
        hook = self.hook.state_dict(gather=gather, to=to)
        if gather:
            pieces = saving.gathered(
                pieces or {}, self.hook._parameters, self._model.process_group, to
            )
        if pieces is None:
            return {}
        groups = saving.groups(self.param_groups, self._groups, self.hook._binding.names)
        state = {"hook": hook, "groups": groups, "pieces": pieces}
        return saving.sealed(state, self.hook._parameters.placement)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues from a saved state; all ranks call it, after the model has loaded its own.

        Args:
            state_dict: a gathered state, on any number of ranks, or this rank's own.

        Raises:
            CheckpointError: it is foreign, or of another model, other groups or other ranks.
        """
        known = self.hook._parameters
        own = saving.groups(self.param_groups, self._groups, self.hook._binding.names)
        saving.check(state_dict, own, known)
        self.hook.load_state_dict(state_dict["hook"])
        self._model.reducer.rebuild()  # the saved run's buckets
        self._shards.cut()
        self.state.clear()
        self.zero_grad()
        rows = zip(self.param_groups, self._groups, state_dict["groups"], strict=True)
        for group, (_, parameters), saved in rows:
            group.update({key: value for key, value in saved.items() if key != "names"})
            group["params"] = self._shards.values(parameters)
        self.param_groups[0]["params"] += [self._shards.told]
        group_of = {value: group for group in self.param_groups for value in group["params"]}
        for piece in self._shards.pieces():
            settings = group_of.get(piece.value, {})
            state = saving.load_piece(piece, state_dict["pieces"], known, settings)
            if state:
                self.state[piece.value] = state
        self._shards.loaded()
