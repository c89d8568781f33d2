"""Counts the operations of a model's layers, without computing them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from commhooks._torch import tree_map
from commhooks.predict.models import Model
from commhooks.predict.planned import PredictionError
from commhooks.predict.workload import Layer

__all__ = ["counted"]


def counted(module: nn.Module, *inputs: Any, name: str = "") -> Model:
    """Returns a model with the shapes of a module's parameters and the operations that use them.

    The forward pass runs on tensors without data (PyTorch's "meta" device), so that a model of any
    size takes no memory beside its parameters. Operations without a parameter count with the
    parameter that was used before them. Parameters come in the order of their use; those that are
    never used by a module of their own come first, since nobody knows when they are ready.

    Args:
        module: the model. Only parameters that require gradients count.
        inputs: of its forward pass; samples are counted along the first dimension of the first
            tensor.
        name: shown in tables; the class of the model by default.

    Raises:
        PredictionError: the model reads values of its activations, so that it does not run without
            data; record steps of it instead.

    Example:
        >>> counted(nn.Linear(1000, 10), torch.empty(64, 1000)).flops
        20000.0
    """
    batch = next((len(one) for one in inputs if isinstance(one, Tensor) and one.ndim), 1)
    shown = name or type(module).__name__
    with torch.device("meta"):
        empty = _on_meta(module)
    order = _Order(empty)
    try:
        with torch.no_grad(), order:
            empty(*(tree_map(_moved, one) for one in inputs))
    except (NotImplementedError, RuntimeError) as error:
        raise PredictionError(
            f"counted({shown}): its forward pass does not run on tensors without data; record "
            f"steps with commhooks.predict.record instead: {error}"
        ) from error
    finally:
        order.close()
    shapes = {key: tuple(one.shape) for key, one in empty.named_parameters() if one.requires_grad}
    used = [key for key in order.flops if key in shapes]
    unused = [key for key in shapes if key not in order.flops]
    layers = [Layer(key, shapes[key], order.flops.get(key, 0) / batch) for key in (*unused, *used)]
    return Model(shown, tuple(layers), sample="a row of the example", batch=batch)


def _on_meta(module: nn.Module) -> nn.Module:
    """Returns a copy of a module without data, and without a copy of the data on the way."""
    memo: dict[int, Any] = {}
    for one in (*module.parameters(), *module.buffers()):
        empty: Tensor = torch.empty_like(one, device="meta")
        if isinstance(one, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=one.requires_grad)
        memo[id(one)] = empty
    return copy.deepcopy(module, memo)


def _moved(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value


class _Order:
    """Credits operations to the parameter of the module that began last."""

    def __init__(self, module: nn.Module) -> None:
        self.flops: dict[str, float] = {}
        self._counter = FlopCounterMode(display=False)
        self._names = {id(one): key for key, one in module.named_parameters()}
        self._latest, self._before = "", 0.0
        self._handles = [
            one.register_forward_pre_hook(self._begins)
            for one in module.modules()
            if any(True for _ in one.parameters(recurse=False))
        ]

    def __enter__(self) -> None:
        self._counter.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._settle()
        self._counter.__exit__(*error)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _begins(self, module: nn.Module, inputs: Any) -> None:
        self._settle()
        names = [self._names[id(one)] for one in module.parameters(recurse=False)]
        # A weight that is tied to an earlier layer waits for that one, too: what uses it again
        # counts with the parameter before.
        new = [name for name in names if name not in self.flops]
        self.flops.update(dict.fromkeys(new, 0.0))
        if new:
            self._latest = new[0]

    def _settle(self) -> None:
        total = float(self._counter.get_total_flops())
        if self._latest:
            self.flops[self._latest] += total - self._before
        self._before = total
