"""Checks that the memory in a saved state fits a scheme and a model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from commhooks.checkpoint._format import MemoryDict, tensor_error
from commhooks.core._names import is_padding
from commhooks.core._scheme import Scheme, slot_error, walk
from commhooks.errors import CheckpointError
from commhooks.wrappers._base import Choice
from commhooks.wrappers._make import short_repr
from ddp_core.exchange._errors import listed

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
        shapes: shapes of the model's parameters, by name.
        declared: initial values of the scheme, by key and name.
        same_settings: whether the memory was saved by a scheme of the same settings, so that its
            shapes are those of the initial values.
    """
    for key, values in memory.items():
        unknown = sorted(set(values) - set(shapes))
        if unknown and not shapes:
            raise CheckpointError(
                "load_state_dict: this hook has no model yet, whose parameters the state belongs "
                "to: register first, or give HookState(scheme, model) the model"
            )
        if unknown:
            raise CheckpointError(
                f"load_state_dict: the checkpoint's {key!r} is of parameters that are not averaged "
                f"here: {listed(unknown)}; is it another model's, or are they ignored or delayed?"
            )
        for name, value in values.items():
            first = (declared or {}).get(key, {}).get(name)
            error = tensor_error(value) or slot_error(scheme, key, value, shapes[name])
            if error == "unknown":
                raise CheckpointError(
                    f"load_state_dict: the checkpoint holds {key!r}, which {short_repr(scheme)} "
                    f"does not keep; register the scheme it was saved from"
                )
            if error is None and first is not None:
                error = _unlike(value, first, shapes[name], same_settings)
            if error is not None:
                raise CheckpointError(
                    f"load_state_dict: {key!r} of parameter {name!r} {error}; is the checkpoint "
                    f"another model's?"
                )


def _unlike(value: Tensor, first: Tensor, parameter: torch.Size, same_settings: bool) -> str | None:
    """Returns how a value differs from ``first``, the scheme's initial one; None if it fits."""
    # Another floating-point dtype is converted when it is read: a run may change its precision.
    both_float = value.is_floating_point() and first.is_floating_point()
    if value.dtype != first.dtype and not both_float:
        return f"is of {value.dtype}, not {first.dtype}"
    # With other settings a value may have another shape (PowerSGD of another rank). The bounds
    # refuse the values of damaged files, such as a factor of no rows or of 500.
    most = max(first.numel(), parameter.numel())
    reshaped = value.shape != first.shape
    if reshaped and (same_settings or not 0 < value.numel() <= most):
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
    """Raises CheckpointError if a state lacks memory that its scheme had.

    With other settings (another rank of PowerSGD, say) a scheme may have kept less. But residuals,
    which move between ranks, exist for every parameter.
    """
    # Except where a scheme chooses by parameter: other rules may give some of them no feedback.
    several = any(isinstance(inside, Choice) for inside in walk(scheme))
    for key, values in declared.items():
        if not same_settings and (several or per_rank.get(key) != "sum"):
            continue
        # What fills up pieces differs with the number of ranks, and begins with nothing.
        missing = sorted(
            name for name in set(values) - set(memory.get(key, {})) if not is_padding(name)
        )
        if missing:
            raise CheckpointError(
                f"load_state_dict: the state is incomplete, it lacks {key!r} of {missing[:5]}: the "
                f"file is damaged, or the model trained fewer parameters; pass strict=False to "
                f"begin with nothing where it is missing"
            )
