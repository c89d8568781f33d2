"""A stand-in for torchcomms, of which there is no release that can be installed.

It calls a backend as torchcomms publishes that it does: a class without arguments, methods by
position, None or a handle with ``wait`` in return.
"""

from __future__ import annotations

import enum
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

__all__ = ["AVG", "MAX", "SUM", "Stand", "TorchCommBackend"]

RedOpType = enum.Enum("RedOpType", "SUM PRODUCT MIN MAX BAND BOR BXOR PREMUL_SUM AVG")
SUM, AVG, MAX = (SimpleNamespace(type=RedOpType[name]) for name in ("SUM", "AVG", "MAX"))


class TorchCommBackend:
    """The base class, as far as Python sees it."""

    device = None

    def _set_device_and_options(self, device: torch.device, options: Any) -> None:
        self.device = device


class Stand:
    """The module, and its factory of communicators."""

    def __init__(self, patch: Any) -> None:
        self.classes: dict[str, type] = {}
        package, inner = ModuleType("torchcomms"), ModuleType("torchcomms._comms")
        inner.TorchCommBackend = TorchCommBackend  # type: ignore[attr-defined]
        inner.register_backend = self.classes.__setitem__  # type: ignore[attr-defined]
        patch.setitem(sys.modules, "torchcomms", package)
        patch.setitem(sys.modules, "torchcomms._comms", inner)

    def new_comm(self, backend: str, name: str = "comm") -> Any:
        made = self.classes[backend]()
        assert isinstance(made, TorchCommBackend)
        made.init(torch.device("cpu"), name, SimpleNamespace(hints={}))  # type: ignore[attr-defined]
        return made
