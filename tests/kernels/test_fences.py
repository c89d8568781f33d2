"""Blocks that wait for one another order their accesses to memory, as the compiler's output shows.

The emulator has no caches and no compiler that moves loads: there a fence too few changes nothing.
"""

from __future__ import annotations

import re
from itertools import groupby

import pytest

from commhooks.kernels.runtime import nvrtc

# What a kernel does by the functions of tickets.h, and its accesses to global memory, fences and
# barriers. "fence" is of all blocks; "volatile" is an access that is neither moved nor left out.
ORDERS = {
    "data[threadIdx.x] = 1; announce(number, 7);": (
        *("store", "fence", "barrier", "volatile store"),
    ),
    "wait_until(number, 7); data[1] = data[0];": (
        *("volatile load", "fence", "barrier", "load", "store"),
    ),
    "data[threadIdx.x] = 1; if (is_last(number, 7)) data[0] = data[9];": (
        *("store", "fence", "barrier", "atomic", "barrier", "fence", "load", "store"),
    ),
    "data[threadIdx.x] = next_ticket(number);": ("barrier", "atomic", "barrier", "store"),
    "while (seen(number) < 7) {}": ("volatile load",),
    "while (seen(sums) < 7) {}": ("volatile load",),
    "sums[threadIdx.x] = sum_before(sums, 7, 5);": (
        *("volatile store", "volatile load", "volatile store", "store"),
    ),
}
NAMES = {
    r"(membar\.gl|fence\.(sc|acq_rel)\.gpu)": "fence",
    r"(bar|barrier)\.sync": "barrier",
    r"(atom|red)\..*": "atomic",
    r"ld\.volatile\.global\..*": "volatile load",
    r"st\.volatile\.global\..*": "volatile store",
    r"ld\.global\..*": "load",
    r"st\.global\..*": "store",
}


def accesses(ptx: str) -> list[str]:
    """Returns names of instructions in NAMES, in the order of the text; repeated ones once."""
    names = []
    for operation in re.findall(r"^\t(?:@\S+ )?([\w.]+)[\s;]", ptx, re.MULTILINE):
        names += [name for form, name in NAMES.items() if re.fullmatch(form, operation)]
    return [name for name, _ in groupby(names)]


@pytest.mark.parametrize("body", ORDERS)
def test_accesses_are_in_order(body: str) -> None:
    head = '#include "include/tickets.h"\nextern "C" __global__ void kernel'
    text = f"{head}(u32* data, u32* number, u64* sums) {{ {body} }}"
    ptx = nvrtc.compile_text(text, "fences.cu", [], "compute_90").code.decode()
    assert accesses(ptx) == list(ORDERS[body]), ptx
