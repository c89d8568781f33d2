"""Lists the shares of a copy that were expected before anything was measured.

They come from instructions in machine code for sm_90, registers and bytes, for an H200.
"""

from __future__ import annotations

__all__ = ["predicted"]

# Beginnings of names: (256 MiB, 25 MiB in a graph); None where nothing was predicted.
_EXPECTED: dict[str, tuple[float, float | None]] = {
    "int8 encode, stochastic": (0.75, None),
    "int8 encode": (0.85, 0.75),
    "int4 encode": (0.85, 0.75),
    "e4m3 encode": (0.85, 0.75),
    "int8 decode + sum of 8": (0.75, None),
    "int4 decode + sum of 8": (0.75, None),
    "e4m3 decode + sum of 8": (0.75, None),
    "sign decode + sum of 8": (0.75, None),
    "PowerSGD 4, (g + e) Q": (0.7, 0.6),
    "PowerSGD 4, g^T P": (0.65, 0.45),
    "top-k 1 %, feedback": (0.6, 0.28),
    "Hadamard 1024": (0.75, None),
    "DCT 64": (0.25, None),
    "all finite": (0.8, 0.5),
}


def predicted(name: str, size: str) -> float | None:
    """Returns the share that was expected of an op, if any was.

    Args:
        name: the case's name.
        size: "256 MiB" or "25 MiB".
    """
    # The longest beginning: "int8 encode, stochastic" is not "int8 encode".
    known = [begin for begin in _EXPECTED if name.startswith(begin)]
    if not known:
        return None
    large, small = _EXPECTED[max(known, key=len)]
    return large if size.startswith("256") else small
