"""Compares what an unbroken run and a resumed one have saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

__all__ = ["check_resumed"]


def check_resumed(whole: Mapping[str, Any], parts: Mapping[str, Any], steps: int = 0) -> None:
    """Every tensor and number is equal, bit for bit.

    Args:
        steps: of a hook's state: the number that it has counted; it then holds a residual per rank.
    """
    uninterrupted, resumed = dict(_leaves(whole)), dict(_leaves(parts))
    assert uninterrupted.keys() == resumed.keys()
    assert uninterrupted
    for name, value in uninterrupted.items():
        equal = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b
        assert equal(value, resumed[name]), name
    if steps:
        assert whole["step"] == steps
        for rank in ("rank0", "rank1"):
            residual = whole[rank]["memory"]["residual"]
            assert any(bool(element.any()) for element in residual.values())


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}/{key}")
    else:
        yield name, value
