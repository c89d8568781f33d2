"""Describes what lies in the flat gradient of an FSDP1 unit: parameters, and padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from commhooks._torch import (
    dtensor_specs_in,
    flat_masks,
    flat_names,
    flat_originals,
    flat_parameter,
    flat_shapes,
)
from commhooks.checkpoint.placement import Cut, cut_of
from commhooks.core.layout import Layout
from commhooks.core.names import is_padding, padding_name, plain_name
from commhooks.hook.parameters import Parameter, memory_order

__all__ = ["cuts_in", "originals", "pieces"]


def pieces(name: str, unit: Any, ranks: int) -> list[tuple[Parameter, bool]]:
    """Returns what is in a unit's flat gradient, with padding, and whether each is trained."""
    flat, prefix = flat_parameter(unit), _prefix(name)
    names = _names(name, flat)
    values = flat_originals(flat) or [flat] * len(names)
    # A parameter lies there as in its own memory: channels-last weights have their channels last.
    orders = [
        memory_order(torch.empty_strided(shape, stride, device="meta"))
        for shape, stride in flat_shapes(flat)
    ]
    shapes = [shape for shape, _ in flat_shapes(flat)]
    named = zip(names, shapes, values, orders, strict=True)
    found = [
        (padding_name(f"{prefix}{place}"), torch.Size([numel]), flat, (0,))
        if padded
        else next(named)
        for place, (numel, padded) in enumerate(flat_masks(flat))
    ]
    total = sum(shape.numel() for _, shape, *_ in found)
    found.append((padding_name(f"{prefix}end"), torch.Size([-total % ranks]), flat, (0,)))
    return [
        (Parameter(own, _sizes(shape, order), flat.dtype, order), value.requires_grad)
        for own, shape, value, order in found
    ]


def cuts_in(name: str, unit: Any) -> dict[str, Cut]:
    """Returns how tensor parallelism cuts the parameters in a unit's flat gradient."""
    flat = flat_parameter(unit)
    # FSDP1 keeps what a DTensor was; another extension than torch's own may keep anything.
    found = zip(_names(name, flat), dtensor_specs_in(flat), strict=True)
    return {one: cut_of(spec) for one, spec in found if hasattr(spec, "placements")}


def _prefix(name: str) -> str:
    return f"{name}." if name else ""


def _names(name: str, flat: Any) -> list[str]:
    return [plain_name(f"{_prefix(name)}{one}") for one in flat_names(flat)]


def _sizes(shape: torch.Size, order: tuple[int, ...]) -> torch.Size:
    return torch.Size(shape[dimension] for dimension in order)


def originals(unit: Any, layout: Layout) -> dict[str, Tensor]:
    """Returns the parameters in a flat gradient, by name; none if only the whole is known."""
    names = [name for name in layout.names if not is_padding(name)]
    return dict(zip(names, flat_originals(flat_parameter(unit)), strict=False))
