"""Bucket layouts that schemes profit from; only ddp_core's DistributedDataParallel offers them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from commhooks._errors import OptionError

if TYPE_CHECKING:
    from commhooks._state import HookState

__all__ = ["BucketGroup", "BucketLayout", "group_function"]

BucketGroup = Callable[[str, nn.Parameter], Hashable]
BucketLayout = Literal["scheme", "shape"] | BucketGroup


def group_function(layout: BucketLayout, state: HookState) -> BucketGroup:
    """Parameters for which it gives different answers never share a bucket.

    Args:
        layout: "scheme": what the scheme treats alike; "shape": matrices of one shape, all
            vectors together; or a function of name and parameter.

    Raises:
        OptionError: none of these.
    """
    if layout == "scheme":
        return lambda name, parameter: state.scheme.bucket_group(
            name, parameter.shape, parameter.dtype
        )
    if layout == "shape":
        return _shape
    if not callable(layout):
        raise OptionError(
            f"register(layout=...) is 'scheme', 'shape' or a function of name and parameter, "
            f"got {layout!r}"
        )
    return layout


def _shape(name: str, parameter: nn.Parameter) -> torch.Size | None:
    return parameter.shape if parameter.dim() > 1 else None
