"""Where an op's kernels can run here: every instruction set of this CPU, the CUDA emulator."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from commhooks.kernels import _cpu
from commhooks.kernels._op import Op
from tests.emulator.runner import emulated

# Lanes in natural order, reversed, and mixed: a missing barrier shows in some order.
ORDERS = (0, 31, 5)


def instruction_sets() -> list[str]:
    best = _cpu.INSTRUCTION_SETS.index(_cpu.instruction_set())
    return list(_cpu.INSTRUCTION_SETS[1 : best + 1]) or ["base"]


def machines() -> list[str]:
    return [*instruction_sets(), *(f"cuda, order {order}" for order in ORDERS)]


class Runner:
    """Runs an op's kernel for one machine."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type

    def __call__(self, op: Op, *args: Any) -> None:
        op.kernels[self.device_type](*args)


@contextmanager
def on(machine: str, cuda_kernels: dict[str, Sequence[str]]) -> Iterator[Runner]:
    """Within it, kernels run on that machine.

    Args:
        cuda_kernels: kernels to compile for the emulator, by file.
    """
    with ExitStack() as stack:
        if machine.startswith("cuda"):
            stack.enter_context(emulated(cuda_kernels, int(machine.rpartition(" ")[2])))
            yield Runner("cuda")
        else:
            stack.enter_context(mock.patch.object(_cpu, "function", _for_set(machine)))
            yield Runner("cpu")


def _for_set(instruction_set: str) -> Any:
    def function(name: str, *argument_types: Any) -> Any:
        library = _cpu._library()
        assert library is not None
        # A function of its own: argument types are kept on it.
        found = ctypes.CFUNCTYPE(None, *argument_types)(
            ctypes.cast(getattr(library, f"{name}_{instruction_set}"), ctypes.c_void_p).value
        )
        return found

    return function
