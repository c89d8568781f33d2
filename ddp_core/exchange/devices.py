"""What a device with streams needs beyond its tensors; nothing of it is needed on the CPU."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

__all__ = ["on_device_of"]


def on_device_of(tensors: Iterable[Tensor]) -> AbstractContextManager[object]:
    """Makes the device of the first tensor the current one, if it is not the CPU.

    Collectives of Python objects on NCCL use the current device, which is the first GPU of all
    ranks in a script that never calls ``torch.cuda.set_device``.
    """
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    if device.type in ("cpu", "meta"):
        return nullcontext()
    current: AbstractContextManager[object] = torch.get_device_module(device.type).device(device)
    return current
