"""Where an op's kernels can run here: this CPU's instruction sets, the CUDA emulator, a GPU."""

from __future__ import annotations

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
        copies = {id(one): one.cuda() for one in args if isinstance(one, torch.Tensor)}
        super().__call__(op, *(copies.get(id(one), one) for one in args))
        for one in args:
            if isinstance(one, torch.Tensor):
                one.copy_(copies[id(one)])


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
