"""``python smoke.py``: whether the kernels of an installed wheel run on this machine.

``--library`` looks at the library of kernels alone, where there is no torch to import.
"""

from __future__ import annotations

import ctypes
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def library() -> None:
    """The library loads, and knows this processor."""
    package = find_spec("commhooks")  # does not import it
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent / "kernels" / "libcommhooks_kernels.so"
    print(f"{path}: instruction set {ctypes.CDLL(str(path)).instruction_set()}")


def kernels() -> None:
    """A kernel runs for every op, and steps of schemes have the bits of the PyTorch code."""
    import torch

    import commhooks

    missing = {k: v for k, v in commhooks.kernels.implementations("cpu").items() if v != "kernel"}
    assert not missing, missing
    for scheme in ("int8", "int4", "topk", "eden"):
        by_kernels = averaged(scheme)
        with commhooks.kernels.use_kernels("definition"):
            assert torch.equal(by_kernels, averaged(scheme)), scheme
        print(f"{scheme}: bits as in PyTorch")


def averaged(scheme: str) -> Any:
    """Returns the average that two simulated ranks get in their third step."""
    import torch

    import commhooks

    ranks = commhooks.Simulation(scheme, {"weight": (64, 1000)}, world_size=2)
    draw = torch.Generator().manual_seed(0)
    grads = [torch.randn(64 * 1000, generator=draw) for _ in range(2)]
    return [ranks.step(grads)[0] for _ in range(3)][-1]


if __name__ == "__main__":
    library()
    if sys.argv[1:] != ["--library"]:
        kernels()
