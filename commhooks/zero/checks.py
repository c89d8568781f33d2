"""Refuses models, optimizers and parameter groups that cannot be sharded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from commhooks._torch import comm_hooks
from commhooks.core.scheme import Scheme
from commhooks.errors import RegistrationError
from commhooks.hook.engine import shared_and_rounded
from commhooks.hook.parameters import Parameters, find_ddp
from commhooks.zero.stand_ins import InShards
from ddp_core import DistributedDataParallel as CoreDDP

__all__ = [
    "Group",
    "groups_of",
    "need_elementwise",
    "need_equal_values",
    "need_known_use",
    "need_model",
    "need_none_accumulated",
]

Group = tuple[dict[str, Any], list[nn.Parameter]]  # settings, and whose they are


def need_model(model: nn.Module) -> CoreDDP:
    """Returns the DistributedDataParallel that a ``ZeroOptimizer`` may serve.

    Raises:
        RegistrationError: it is torch's, has a hook, or has parameters that cannot be sharded.
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
    if ddp._parts.delayed is not None or ddp.reducer.in_flight.optimizer is not None:
        raise RegistrationError(
            "ZeroOptimizer: not with delay_all_reduce_named_params, nor with an optimizer in "
            "backward (_apply_optimizer_in_backward)"
        )
    for one in ddp.reducer.parameters:
        if one.sparse or not one.parameter.is_floating_point():
            raise RegistrationError(
                f"ZeroOptimizer: {one.name} has "
                f"{'sparse gradients' if one.sparse else one.parameter.dtype}, and a shard is a "
                f"part of a flat tensor of real numbers; use another optimizer for this model"
            )
    return ddp


def need_equal_values(codec: Scheme | None, parameters: Parameters) -> None:
    """Raises unless ranks of tensor parallelism gather equal values of uncut parameters.

    Args:
        codec: packs the values; None: they travel as they are.

    Raises:
        RegistrationError: the codec would round them together with pieces of cut parameters, which
            differ between these ranks.
    """
    shared = frozenset() if codec is None else shared_and_rounded(codec, parameters)
    if shared:
        raise RegistrationError(
            f"ZeroOptimizer(gather=...): {codec} rounds {', '.join(sorted(shared)[:3])} together "
            f"with pieces of other parameters, and so differently on each rank of tensor "
            f"parallelism, which does not cut these {len(shared)} parameters: they would drift "
            f"apart; use gather='none' or 'bf16'"
        )


def need_known_use(ddp: CoreDDP) -> None:
    """Raises unless all that a step in backward needs is known there.

    Raises:
        RegistrationError: parameters may be unused, or are low-precision copies then.
    """
    if ddp.find_unused_parameters or ddp.static_graph or ddp._parts.precision is not None:
        raise RegistrationError(
            "ZeroOptimizer(in_backward=True): not with find_unused_parameters or static_graph, "
            "where ranks know which parameters were used when backward is over, nor with "
            "mixed_precision, which holds low-precision copies until then; make it with "
            "in_backward=False"
        )


def need_none_accumulated(ddp: CoreDDP) -> None:
    """Raises if there are gradients of this rank alone, by which nothing may be stepped.

    Raises:
        RegistrationError: there are.
        RuntimeError: the backward pass did not come to all parameters.
    """
    if ddp.reducer.backward.has_raised:  # what came of it is known to be incomplete
        return
    ddp.reducer.check_finished()  # names parameters that got no gradient, frozen ones, say
    for one in ddp.reducer.parameters:
        if one.parameter.grad is not None and type(one.parameter.grad) is not InShards:
            raise RegistrationError(
                f"ZeroOptimizer.step: the gradient of {one.name} was not averaged: the last "
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
    trained = {id(one.parameter) for one in ddp.reducer.parameters}
    if params is None:
        return [({}, [one.parameter for one in ddp.reducer.parameters])]
    given = list(params)
    if not all(isinstance(group, Mapping) for group in given):
        given = [{"params": given}]
    groups: list[Group] = []
    for group in given:
        members: list[Any]
        members = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
        members = [one[1] if isinstance(one, tuple) else one for one in members]
        for one in members:
            if id(one) not in trained:
                raise ValueError(
                    f"ZeroOptimizer(params=...): a parameter of shape {tuple(one.shape)} is in two "
                    f"groups, or is none that this DistributedDataParallel averages"
                )
            trained.remove(id(one))
        groups.append(({key: group[key] for key in group if key != "params"}, members))
    return groups


def need_elementwise(kind: Any, settings: Mapping[str, Any], device: torch.device) -> None:
    """Raises unless an optimizer steps two parts of a matrix as it steps the matrix.

    Args:
        device: on which it will step; some settings and optimizers are for a GPU only.

    Raises:
        RegistrationError: it does not, as Adafactor, LBFGS, Muon or Shampoo.
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
                _step(apart, parts, [gradient if one is part else None for one in parts])
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
