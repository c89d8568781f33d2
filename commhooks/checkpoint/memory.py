"""What the memory in a saved state has to be for a scheme and a model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from commhooks.checkpoint.form import MemoryDict, tensor_error
from commhooks.core.scheme import Scheme, slot_error, walk
from commhooks.errors import CheckpointError
from commhooks.wrappers.base import Choice

__all__ = ["check_complete", "check_memory"]


def check_memory(
    memory: MemoryDict,
    scheme: Scheme,
    shapes: Mapping[str, torch.Size],
    declared: MemoryDict | None = None,
    *,
    same_settings: bool = False,
) -> None:
    """Raises CheckpointError unless every value fits the scheme and a parameter of the model.

    Args:
        shapes: of the model's parameters, by name.
        declared: what the scheme starts with, by key and name.
        same_settings: the memory was saved by a scheme of the same settings, so that its shapes
            are those declared.
    """
    for key, values in memory.items():
        unknown = sorted(set(values) - set(shapes))
        if unknown:
            raise CheckpointError(
                f"load_state_dict: the checkpoint's {key!r} is of parameters that are not averaged "
                f"here: {unknown[:5]}; is it another model's, or are they ignored or delayed now?"
            )
        for name, value in values.items():
            first = (declared or {}).get(key, {}).get(name)
            error = tensor_error(value) or slot_error(scheme, key, value, shapes[name])
            if error == "unknown":
                raise CheckpointError(
                    f"load_state_dict: the checkpoint holds {key!r}, which {scheme} does not keep; "
                    f"register the scheme it was saved from"
                )
            if error is None and first is not None:
                error = _unlike(value, first, shapes[name], same_settings)
            if error is not None:
                raise CheckpointError(
                    f"load_state_dict: {key!r} of parameter {name!r} {error}; is the checkpoint "
                    f"another model's?"
                )
            if value.is_floating_point() and not bool(torch.isfinite(value.float()).all()):
                raise CheckpointError(
                    f"load_state_dict: {key!r} of parameter {name!r} is not finite in float32; "
                    f"the file is damaged"
                )


def _unlike(value: Tensor, first: Tensor, parameter: torch.Size, same_settings: bool) -> str | None:
    """How a value differs from what it should be alike: the one that a scheme starts with."""
    alike = value.is_floating_point() and first.is_floating_point()
    if value.dtype != first.dtype and not alike:
        return f"is of {value.dtype}, not {first.dtype}"
    most = max(first.numel(), parameter.numel())
    other = value.shape != first.shape
    if other and (same_settings or not 0 < value.numel() <= most):
        return f"has shape {tuple(value.shape)}, not {tuple(first.shape)}"
    return None


def check_complete(
    memory: MemoryDict,
    scheme: Scheme,
    per_rank: Mapping[str, str],
    declared: MemoryDict,
    *,
    same_settings: bool,
) -> None:
    """Raises CheckpointError where a state lacks memory that its scheme had.

    With other settings (another rank of PowerSGD, say) a scheme may have kept less; but what moves
    between ranks, as residuals do, every parameter has.
    """
    several = any(isinstance(one, Choice) for one in walk(scheme))
    for key, values in declared.items():
        if not same_settings and (several or per_rank.get(key) != "sum"):
            continue
        missing = sorted(set(values) - set(memory.get(key, {})))
        if missing:
            raise CheckpointError(
                f"load_state_dict: the state is incomplete, it lacks {key!r} of {missing[:5]}: the "
                f"file is damaged, or the model trained fewer parameters; pass strict=False to "
                f"begin with nothing where it is missing"
            )
