"""Looks up every private name of torch that the kernels use, so that a rename is mended here.

``tests/torch_names.txt`` lists them with the versions of torch that have them.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

__all__ = ["constant_result", "current_device", "current_stream", "schema_of", "version_of"]

# Torch's public functions build an object or look at its initialisation first, which costs more
# than a launch; the two below are what its compiler calls. A torch without CUDA has neither.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
current_stream: Callable[[int], int] = getattr(
    torch._C,
    "_cuda_getCurrentRawStream",
    lambda index: torch.cuda.current_stream(index).cuda_stream,
)
# The declared arguments of an operator of ``torch.ops``.
schema_of: Callable[[Any], Any] = attrgetter("_schema")
# How often a tensor was written to in place; raises RuntimeError for an inference tensor.
version_of: Callable[[Tensor], int] = attrgetter("_version")


def constant_result(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Marks a function whose results a compiler may take for constants.

    As ``torch.compiler.assume_constant_result`` does, which imports the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
