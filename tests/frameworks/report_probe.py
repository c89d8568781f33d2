"""Command line of the scripts that jobs run; each writes its results to a JSON file."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["attempt", "batch", "digest", "main", "network"]


def main(**named: Callable[[Path], dict[str, Any]]) -> None:
    """Runs the case that the command line names, and writes what it returns to the folder."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    report = named[name](folder)
    (folder / f"{name}{os.environ.get('RANK', '0')}.json").write_text(json.dumps(report))


def attempt(call: Callable[[], Any]) -> str:
    """Returns the error of a call, as its type and text."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def network() -> nn.Module:
    """The same network at every call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 3))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of three classes that differ per step and rank."""
    points = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + rank))
    return points, points[:, :3].argmax(dim=1)


def digest(model: nn.Module) -> str:
    """Returns a short name of the bits of all parameters."""
    bits = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(bits).hexdigest()[:16]
