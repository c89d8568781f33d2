"""Launches one kernel, for ``commhooks doctor`` and the study of a GPU."""

from __future__ import annotations

import time

import torch

from commhooks.kernels import all_finite, use_kernels

__all__ = ["one_launch"]


def one_launch(device: str = "cuda") -> str:
    """Runs a kernel on a device and compares its result; says what came of it, and never raises."""
    try:
        begin = time.perf_counter()
        with use_kernels("native"):
            x = torch.zeros(1000, device=device)
            good = all_finite(x)
            x[7] = torch.nan
            bad = all_finite(x)
        results = bool(good), bool(bad)  # waits for the device
        took = time.perf_counter() - begin
    except Exception as error:  # whatever it is: the command tells what is wrong here
        text = str(error).strip().splitlines() or [""]
        return f"failed: {type(error).__name__}: {text[0]}"
    if results != (True, False):
        return f"wrong: all_finite of 1000 zeros, and with a NaN, is {results}"
    return f"right ({1e3 * took:.0f} ms with loading, or compiling, the kernel)"
