"""Defines ``ZeroOptimizer``, whose state is sharded over the ranks of a data-parallel model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from commhooks._torch import comm_hooks
from commhooks.core._scheme import Scheme
from commhooks.errors import RegistrationError
from commhooks.hook._attachment import AttachmentGuard
from commhooks.hook._engine import replicated_parameters
from commhooks.hook._handshake import HANDSHAKE_LIMIT
from commhooks.hook._hook_function import comm_hook
from commhooks.hook._parameters import Parameters, find_ddp
from commhooks.hook._sharded import check_returns_shards
from commhooks.zero import _saving as saving
from commhooks.zero._hook import ZeroHook
from commhooks.zero._shard import ShardedGrad
from commhooks.zero._shards import Gather, Shards
from ddp_core import DistributedDataParallel as CoreDDP
from ddp_core.exchange._errors import listed

__all__ = [
    "Group",
    "ZeroOptimizer",
    "check_elementwise",
    "check_equal_values",
    "check_known_use",
    "check_model",
    "check_none_accumulated",
    "groups_of",
]


Group = tuple[dict[str, Any], list[nn.Parameter]]  # settings, and whose they are


def check_model(model: nn.Module) -> CoreDDP:
    """Returns the DistributedDataParallel that a ``ZeroOptimizer`` may serve.

    Raises:
        RegistrationError: the model is torch's, has a hook, or has parameters that cannot be
            sharded.
    """
    try:
        ddp = find_ddp(model)
    except RegistrationError as error:
        raise RegistrationError(
            f"ZeroOptimizer: it takes ddp_core.DistributedDataParallel(module), got "
            f"{type(model).__name__}"
        ) from error
    if not isinstance(ddp, CoreDDP):
        raise RegistrationError(
            "ZeroOptimizer: torch's DistributedDataParallel writes the mean of all gradients on "
            "every rank; wrap the module in ddp_core.DistributedDataParallel (same arguments), or "
            "use FSDP2 with commhooks.register"
        )
    if comm_hooks(ddp):
        raise RegistrationError(
            "ZeroOptimizer: this model has a hook already; give the optimizer the scheme: "
            "ZeroOptimizer(model, optimizer, scheme=...)"
        )
    if ddp._ddp_state.delayed is not None or ddp.reducer.exchange.optimizer is not None:
        raise RegistrationError(
            "ZeroOptimizer: not with delay_all_reduce_named_params, nor with an optimizer in "
            "backward (_apply_optimizer_in_backward)"
        )
    for parameter in ddp.reducer.parameters:
        if parameter.sparse or not parameter.parameter.is_floating_point():
            raise RegistrationError(
                f"ZeroOptimizer: {parameter.name} has "
                f"{'sparse gradients' if parameter.sparse else parameter.parameter.dtype}, and a "
                f"shard is a part of a flat tensor of real numbers; use another optimizer for this "
                f"model"
            )
    return ddp


def check_equal_values(codec: Scheme | None, parameters: Parameters) -> None:
    """Raises unless tensor-parallel ranks gather equal values of replicated parameters.

    Args:
        codec: packs the values; None: they travel as they are.

    Raises:
        RegistrationError: the codec would round them together with pieces of cut parameters, which
            differ between these ranks.
    """
    shared = frozenset() if codec is None else replicated_parameters(codec, parameters)
    if shared:
        raise RegistrationError(
            f"ZeroOptimizer(gather=...): {codec} rounds {listed(sorted(shared))} together "
            f"with shards of other parameters, and so differently on each rank of tensor "
            f"parallelism, which does not cut these {len(shared)} parameters: they would drift "
            f"apart; use gather='none' or 'bf16'"
        )


def check_known_use(ddp: CoreDDP) -> None:
    """Raises unless gradients and parameters are final during backward.

    Raises:
        RegistrationError: parameters may be unused, or are low-precision copies then.
    """
    if ddp.find_unused_parameters or ddp.static_graph or ddp._ddp_state.precision is not None:
        raise RegistrationError(
            "ZeroOptimizer(in_backward=True): not with find_unused_parameters or static_graph, "
            "where ranks know which parameters were used when backward is over, nor with "
            "mixed_precision, which holds low-precision copies until then; make it with "
            "in_backward=False"
        )


def check_none_accumulated(ddp: CoreDDP) -> None:
    """Raises if gradients were accumulated on this rank and not averaged.

    Raises:
        RegistrationError: there are such gradients.
        RuntimeError: the backward pass did not come to all parameters.
    """
    if ddp.reducer.backward.has_raised:  # what came of it is known to be incomplete
        return
    ddp.reducer.check_finished()  # names parameters that got no gradient, frozen ones, say
    for parameter in ddp.reducer.parameters:
        if (
            parameter.parameter.grad is not None
            and type(parameter.parameter.grad) is not ShardedGrad
        ):
            raise RegistrationError(
                f"ZeroOptimizer.step: the gradient of {parameter.name} was not averaged: the last "
                f"backward pass was within no_sync() or hold(), or its forward pass did not go "
                f"through the DistributedDataParallel. Let the last pass average, or call "
                f"zero_grad()"
            )


def groups_of(ddp: CoreDDP, params: Iterable[Any] | None) -> list[Group]:
    """Returns settings and parameters of each group.

    Args:
        params: parameters, or groups of them, as for any optimizer; None: all that are trained.

    Raises:
        ValueError: a parameter is not averaged by this model, or is in two groups.
    """
    trained = {id(parameter.parameter) for parameter in ddp.reducer.parameters}
    if params is None:
        return [({}, [parameter.parameter for parameter in ddp.reducer.parameters])]
    given = list(params)
    if not all(isinstance(group, Mapping) for group in given):
        given = [{"params": given}]
    groups: list[Group] = []
    for group in given:
        members: list[Any]
        members = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
        members = [member[1] if isinstance(member, tuple) else member for member in members]
        for parameter in members:
            if id(parameter) not in trained:
                raise ValueError(
                    f"ZeroOptimizer(params=...): a parameter of shape {tuple(parameter.shape)} is "
                    f"in two groups, or is none that this DistributedDataParallel averages"
                )
            trained.remove(id(parameter))
        groups.append(({key: group[key] for key in group if key != "params"}, members))
    return groups


def check_elementwise(kind: Any, settings: Mapping[str, Any], device: torch.device) -> None:
    """Raises unless an optimizer steps two parts of a matrix as it steps the matrix.

    Args:
        device: device of the shards; some settings and optimizers are for a GPU only.

    Raises:
        RegistrationError: the optimizer does not, such as Adafactor, LBFGS, Muon or Shampoo.
        TypeError: an optimizer was given instead of its class.
    """
    if isinstance(kind, torch.optim.Optimizer):
        name = type(kind).__name__
        raise TypeError(
            f"ZeroOptimizer(model, optimizer): takes a class, and its settings as keyword "
            f"arguments, as in ZeroOptimizer(model, torch.optim.AdamW, lr=1e-3); got an object of "
            f"{name}"
        )
    values = torch.linspace(-1, 1, 64, dtype=torch.float32, device=device)
    gradients = (0.4 * values + 0.1).sin()
    name = getattr(kind, "__name__", str(kind))
    whole = nn.Parameter(values.clone().view(8, 8))
    together = kind([whole], **settings)  # raises for wrong settings
    try:
        parts = [nn.Parameter(part.clone()) for part in values.split(40)]
        apart = kind(parts, **settings)
        for _ in range(2):
            _step(together, [whole], [gradients.view(8, 8)])
            # One after the other, as buckets: what counts steps of all parameters shows.
            for part, gradient in zip(parts, gradients.split(40), strict=True):
                _step(
                    apart, parts, [gradient if parameter is part else None for parameter in parts]
                )
        same = torch.allclose(torch.cat([*parts]), whole.view(-1), rtol=1e-4, atol=1e-6)
    except Exception as error:
        raise RegistrationError(
            f"ZeroOptimizer(model, {name}): it does not step a part of a parameter by itself: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not same:
        raise RegistrationError(
            f"ZeroOptimizer(model, {name}): a part of a matrix is stepped differently from the "
            f"matrix (by its rows, norm or rank, or by a count of the calls of step()), so shards "
            f"would train another way; there are SGD, Adam, AdamW, RMSprop, Adagrad and others "
            f"that step each entry by itself"
        )


def _step(
    optimizer: torch.optim.Optimizer,
    values: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
) -> None:
    for value, gradient in zip(values, gradients, strict=True):
        value.grad = None if gradient is None else gradient.clone()
    optimizer.step()


# ---- the optimizer


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
        gather: sends new values: "none" as they are; a codec ("int8", "int4", ...): packed
            differences, whose rounding errors the owner sends later.
        params: groups of parameters, as for any optimizer; None: all trained ones.
        in_backward: steps and sends each bucket during backward, as soon as its gradients have
            arrived; ``step`` then applies the new values, or drops them. Without clipping, gradient
            scalers, ``find_unused_parameters`` and the model's ``mixed_precision``.
        seed: base of random draws, the same on every rank.
        history: rows kept by ``hook.report``.
        settings: settings of the optimizer, such as ``lr``.

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
        # Refuse models, optimizers and schemes that cannot be sharded.
        ddp: Any = check_model(model)  # also of torch's class, for those who ask
        self._groups = groups_of(ddp, params)
        check_elementwise(optimizer, {**settings, **self._groups[0][0]}, ddp.reducer.device)
        sends = Gather(gather)
        self.hook = ZeroHook(scheme, ddp, seed=seed, history=history)
        check_returns_shards(self.hook.scheme, "ZeroOptimizer", "ZeroOptimizer(scheme=...)")
        check_equal_values(sends.codec, self.hook.parameters)
        self._model = ddp

        # Compare settings with the other ranks, and attach the hook.
        names = self.hook.target.names
        facts: dict[str, Any] = {
            "optimizer": f"{optimizer.__module__}.{optimizer.__qualname__}",
            "gather": repr(sends.codec),
            "groups": repr([({**settings, **group}, names(p)) for group, p in self._groups]),
            "in_backward": in_backward,
        }
        if in_backward:
            check_known_use(ddp)
            self.hook._extra_rounds = 1  # the gather
        self.hook.agree("commhooks.ZeroOptimizer", facts, HANDSHAKE_LIMIT)
        ddp.register_comm_hook(self.hook, comm_hook)
        ddp.register_forward_pre_hook(AttachmentGuard(self.hook, ddp))
        ddp._ddp_state.uneven.needs_all = True  # a rank without inputs would not step
        ddp.reducer.keep_registered_buckets()
        self.skipped_steps = 0

        # Make the optimizer inside, which steps this rank's shards.
        self._shards = Shards(self.hook, ddp, sends, in_backward)
        groups = [{**group, "params": self._shards.values(p)} for group, p in self._groups]
        groups[0]["params"] += [self._shards.overflow_probe]
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
        """Drops all gradients: means in shards, and gradients accumulated within ``no_sync``."""
        self._shards.zero_grad()
        for parameter in self._model.parameters():
            parameter.grad = None

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clips the norm of all gradients, as ``torch.nn.utils.clip_grad_norm_``; a collective.

        Args:
            max_norm: the largest norm that is left as it is.
            norm_type: 2, another power, or infinity.

        Returns:
            The norm before, the same on all ranks; not finite if a gradient of any rank is not.
        """
        self._model._ddp_state.before_collectives()
        return self._shards.clip(max_norm, norm_type)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps this rank's shards, and gathers all parameters.

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
        check_none_accumulated(self._model)
        if not self._shards.any_arrived:  # nothing trains, or something else does
            self._model._ddp_state.known.check()
        self._shards.step()
        self.skipped_steps += not self._shards.finite
        return loss

    # ---- checkpoint

    def state_dict(self, *, gather: bool = False, dst: int | None = None) -> dict[str, Any]:
        """Returns a copy of the state that a later run continues from, besides the model's own.

        Args:
            gather: returns one state of all ranks, by parameter, on the CPU, which loads on any
                number of ranks; all ranks call it. False: this rank's pieces.
            dst: with ``gather``, the only rank that gets it; the others get an empty dict.
        """
        if self._shards.waiting:
            raise RegistrationError(
                "ZeroOptimizer.state_dict: buckets were stepped in backward, and parameters were "
                "not: call step() or zero_grad() first"
            )
        pieces: saving.Saved | None = saving.saved_pieces(self._shards.pieces(), self.state)
        hook = self.hook.state_dict(gather=gather, dst=dst)
        if gather:
            pieces = saving.gathered(
                pieces or {}, self.hook.parameters, self._model.process_group, dst
            )
        if pieces is None:
            return {}
        groups = saving.groups(self.param_groups, self._groups, self.hook.target.names)
        state = {"hook": hook, "groups": groups, "pieces": pieces, "unit": self._shards.unit}
        return saving.add_version(state, self.hook.parameters.placement)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues from a saved state; all ranks call it, after the model has loaded its own.

        Args:
            state_dict: a gathered state, on any number of ranks, or this rank's own.

        Raises:
            CheckpointError: the state is foreign, or of another model, other groups or ranks.
        """
        known = self.hook.parameters
        present = saving.groups(self.param_groups, self._groups, self.hook.target.names)
        saving.check(state_dict, present, known)
        self.hook.load_state_dict(state_dict["hook"])
        self._model.reducer.rebuild()  # the saved run's buckets
        self._shards.cut(state_dict.get("unit"))  # states of earlier releases have none
        self.state.clear()
        self.zero_grad()
        rows = zip(self.param_groups, self._groups, state_dict["groups"], strict=True)
        for group, (_, parameters), saved in rows:
            group.update({key: value for key, value in saved.items() if key != "names"})
            group["params"] = self._shards.values(parameters)
        self.param_groups[0]["params"] += [self._shards.overflow_probe]
        group_of = {value: group for group in self.param_groups for value in group["params"]}
        for piece in self._shards.pieces():
            settings = group_of.get(piece.value, {})
            state = saving.load_piece(piece, state_dict["pieces"], known, settings)
            if state:
                self.state[piece.value] = state
        self._shards.on_loaded()
