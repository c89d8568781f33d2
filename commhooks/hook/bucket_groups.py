"""Groups parameters that may share a bucket; ``ddp_core.DistributedDataParallel`` takes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from typing import Any, Literal

import torch
from torch import nn

from commhooks.errors import OptionError
from commhooks.hook.running import Running

__all__ = ["BucketGroup", "BucketLayout", "group_function", "layout_facts"]

Facts = dict[str, Any]
BucketGroup = Callable[[str, nn.Parameter], Hashable]
BucketLayout = Literal["scheme", "shape"] | BucketGroup


def group_function(layout: BucketLayout, state: Running) -> BucketGroup:
    """Returns a function of name and parameter; different values never share a bucket.

    Args:
        layout: "scheme": parameters that the scheme treats in the same way share a bucket;
            "shape": matrices of one shape, all vectors together; or such a function.

    Raises:
        OptionError: ``layout`` is none of these.
    """
    if layout == "scheme":
        # The state, not its scheme: ``switch`` makes the model ask again. And the names that the
        # scheme sees, without what wrappers add, since rules choose by name.
        names = state._parameters
        return lambda name, parameter: state.scheme.bucket_group(
            names.name(parameter) or name, parameter.shape, parameter.dtype
        )
    if layout == "shape":
        return _shape
    if not callable(layout):
        raise OptionError(
            f"register(layout=...) is 'scheme', 'shape' or a function of name and parameter, "
            f"got {layout!r}"
        )
    # Here, before the hook is registered: DistributedDataParallel calls it in the next step.
    try:
        inspect.signature(layout).bind("name", None)
    except TypeError as error:
        raise OptionError(
            f"register(layout=...): {layout!r} cannot be called with a name and a parameter: "
            f"{error}"
        ) from error
    except ValueError:  # a builtin without a signature: nothing to check
        pass
    return layout


def layout_facts(layout: BucketLayout | None, group: BucketGroup | None, model: nn.Module) -> Facts:
    """Returns the facts about a layout that all ranks must have in common.

    Raises:
        OptionError: the layout's function fails, or its values cannot be compared.
    """
    if group is None:
        return {"layout": "none"}
    kind = layout if isinstance(layout, str) else "a function"
    # Numbers in order of appearance: the values may be any objects, which need not compare equal
    # between processes, and only which parameters go together matters.
    numbers: dict[Hashable, int] = {}
    listed = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            try:
                number = numbers.setdefault(group(name, parameter), len(numbers))
            except TypeError as error:
                raise OptionError(
                    f"register(layout=...): a function of name and parameter that gives something "
                    f"hashable; for {name!r} it raised: {error}"
                ) from error
            listed.append(f"{name} in group {number}")
    return {"layout": kind, "groups of parameters": listed}


def _shape(name: str, parameter: nn.Parameter) -> torch.Size | None:
    return parameter.shape if parameter.dim() > 1 else None
