"""Where an op's kernels can run here: this CPU's instruction sets, the CUDA emulator, a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from commhooks.kernels.runtime import cpu, cuda
from commhooks.kernels.runtime.op import Op
from tests.emulator.runner import emulated

# Lanes in natural order, reversed, and mixed: a missing barrier shows in some order.
ORDERS = (0, 31, 5)


def instruction_sets() -> list[str]:
    best = cpu.INSTRUCTION_SETS.index(cpu.instruction_set())
    return list(cpu.INSTRUCTION_SETS[1 : best + 1]) or ["base"]


def machines(*, orders: Sequence[int] = ORDERS) -> list[str]:
    # On a lent GPU neither the library for CPUs nor minutes for the emulator may be at hand.
    if os.environ.get("COMMHOOKS_TEST_MACHINES") == "gpu":
        return ["gpu"]
    gpu = ["gpu"] if torch.cuda.is_available() and cuda.missing() is None else []
    return [*instruction_sets(), *(f"emulator, order {order}" for order in orders), *gpu]


class Runner:
    """Runs an op's kernel on tensors of the CPU, which the emulator takes as well."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type

    def __call__(self, op: Op, *args: Any) -> None:
        op.kernels[self.device_type](*args)


class GpuRunner(Runner):
    """Runs an op's kernel on copies on the GPU, and copies back what it wrote."""

    def __call__(self, op: Op, *args: Any) -> None:
        # One tensor that is given twice stays one.
        copies = {id(one): _on_gpu(one) for one in args if isinstance(one, torch.Tensor)}
        super().__call__(op, *(copies.get(id(one), one) for one in args))
        for one in args:
            if isinstance(one, torch.Tensor):
                one.copy_(copies[id(one)])


def _on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """Copies a tensor to an address with the same offset from a multiple of 64 bytes."""
    offset = tensor.data_ptr() % 64 // tensor.element_size()
    room = torch.empty(offset + tensor.numel(), dtype=tensor.dtype, device="cuda")
    return room[offset:].view(tensor.shape).copy_(tensor)


@contextmanager
def on(machine: str, cuda_kernels: dict[str, Sequence[str]]) -> Iterator[Runner]:
    """Within it, kernels run on that machine.

    Args:
        cuda_kernels: kernels to compile for the emulator, by file.
    """
    with ExitStack() as stack:
        if machine == "gpu":
            yield GpuRunner("cuda")
        elif machine.startswith("emulator"):
            stack.enter_context(emulated(cuda_kernels, int(machine.rpartition(" ")[2])))
            yield Runner("cuda")
        else:
            stack.enter_context(mock.patch.object(cpu, "_function", functions_of(machine)))
            yield Runner("cpu")


def functions_of(instruction_set: str) -> Any:
    """What finds the functions of one instruction set, in place of the best one's."""

    def find(name: str) -> Any:
        return cpu.function_of(cpu._library(), name, instruction_set)

    return find
