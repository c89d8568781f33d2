"""Lists the shares of a copy that were expected of ops before anything was measured.

For buckets of 256 MiB on an H100, from machine code of NVRTC 13.0 for sm_90. An op's share is 0.92,
or less where few warps are resident, or where its warps issue more instructions than fit into the
time of a copy: min(0.92, 0.8 * instructions that fit / instructions issued). A bucket of 25 MiB
lies in the cache, where nothing was predicted.
"""

from __future__ import annotations

__all__ = ["predicted"]

# By the beginnings of names.
_EXPECTED = {
    "int8 encode": 0.92,
    "int8 encode, stochastic": 0.90,
    "int4 encode": 0.92,
    "int4 encode, stochastic": 0.85,
    "e4m3 encode": 0.92,
    "e4m3 encode, stochastic": 0.67,
    "sign encode": 0.92,
    "int8 decode": 0.92,
    "int4 decode": 0.92,
    "e4m3 decode": 0.92,
    "e4m3 decode + sum": 0.70,
    "sign decode": 0.92,
    "sign decode + sum": 0.46,
    "cast": 0.92,
    "Hadamard 1024": 0.90,
    "Hadamard + int4 encode": 0.74,
    "cosines, 32 of 4096": 0.5,
    "shared int8": 0.92,
    "nearest of 4 levels": 0.33,
    "4 levels decode": 0.90,
    "top-k 1 %": 0.55,
    "PowerSGD 4, (g + e) Q": 0.85,
    "PowerSGD 4, g Q": 0.85,
    "PowerSGD 4, g^T P": 0.88,
    "PowerSGD 4, decode": 0.88,
    "PowerSGD 4, residual": 0.90,
    "all finite": 0.92,
}


def predicted(name: str, size: str) -> float | None:
    """Returns the share that was expected of an op, if any was.

    Args:
        name: the case's name.
        size: "256 MiB" or "25 MiB".
    """
    # The longest beginning: "int8 encode, stochastic" is not "int8 encode".
    known = [begin for begin in _EXPECTED if name.startswith(begin)]
    return _EXPECTED[max(known, key=len)] if known and size.startswith("256") else None
