"""Machines that run an op's kernels here: this CPU's instruction sets, the CUDA emulator, a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import cycle
from typing import Any
from unittest import mock

import torch

from commhooks.kernels.runtime import cpu, cuda
from commhooks.kernels.runtime.op import Op
from tests.emulator.runner import emulated
from tests.kernels.inputs import same
from tests.kernels.memory import PAGE, between_guards

# Lanes in natural order, reversed, and mixed: a missing barrier shows in some order.
ORDERS = (0, 31, 5)
# The order of the next call of `machines`; tests/kernels/conftest.py begins anew in every test.
TURNS = {"orders": cycle(ORDERS)}


def instruction_sets() -> list[str]:
    best = cpu.INSTRUCTION_SETS.index(cpu.instruction_set())
    return list(cpu.INSTRUCTION_SETS[1 : best + 1]) or ["base"]


def machines(*, orders: Sequence[int] | None = None) -> list[str]:
    """The machines to compare; the cases of a test take turns with the emulator's orders."""
    if orders is None:
        orders = (next(TURNS["orders"]),)
    # On a machine with a GPU there may be neither the library for CPUs nor time for the emulator.
    # "guarded" is a rehearsal: the way of a GPU with the CPU's kernels.
    if (only := os.environ.get("COMMHOOKS_TEST_MACHINES")) in ("gpu", "guarded"):
        return [only]
    gpu = ["gpu"] if torch.cuda.is_available() and cuda.missing() is None else []
    return [*instruction_sets(), *(f"emulator, order {order}" for order in orders), *gpu]


class Runner:
    """Runs an op's kernel on tensors of the CPU, which the emulator takes as well."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type

    def __call__(self, op: Op, *args: Any) -> None:
        op.kernels[self.device_type](*args)


class GpuRunner(Runner):
    """Runs an op's kernel on copies on the GPU, and copies back what it wrote.

    Every copy lies between guard bytes, which have to stay as they are, as have arguments that the
    op does not write to.

    Args:
        device_type: of the kernel.
        device: where the copies are; "cpu" to test this class.
        paged: the copies, on the CPU, end where memory begins that nobody may touch. This shows
            reads as well.
    """

    def __init__(self, device_type: str, device: str = "cuda", *, paged: bool = False) -> None:
        super().__init__(device_type)
        self._device, self._guarded = device, _Paged if paged else _Guarded

    def __call__(self, op: Op, *args: Any) -> None:
        arguments = getattr(torch.ops.commhooks, op.name).default._schema.arguments
        named = list(zip(arguments, args, strict=True))
        # One tensor that is given twice stays one. Tables of places are read by the host; that of
        # levels, which are numbers, by the kernel.
        copies = {
            id(value): self._guarded(value, self._device)
            for argument, value in named
            if isinstance(value, torch.Tensor)
            and (argument.name not in ("table", "tails") or value.is_floating_point())
        }
        super().__call__(op, *(copies[id(a)].copy if id(a) in copies else a for a in args))
        written = {id(value) for argument, value in named if _is_written(argument)}
        for argument, value in named:
            if id(value) in copies:
                copies[id(value)].check(f"{op.name}({argument.name})")
                if id(value) in written:
                    value.copy_(copies[id(value)].copy)
                else:
                    there = copies[id(value)].copy.cpu()
                    assert _bytes_equal(there, value), f"{op.name} writes to {argument.name}"


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _bytes_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(*(x.contiguous().view(-1).view(torch.uint8) for x in (left, right)))


class _Guarded:
    """Copies a tensor to an address with the same offset from a multiple of 64 bytes.

    A tool that looks for accesses out of bounds sees allocations of the driver only, which torch
    divides; guard bytes around each tensor show writes, at full speed.
    """

    BYTES, VALUE = 256, 0xA5  # before and behind

    def __init__(self, tensor: torch.Tensor, device: str) -> None:
        size = tensor.nbytes
        room, begin = self.room(tensor, size, device)
        self.copy = room[begin : begin + size].view(tensor.dtype).view(tensor.shape)
        self.copy.copy_(tensor)
        self._guards = room[:begin], room[begin + size :]

    def room(self, tensor: torch.Tensor, size: int, device: str) -> tuple[torch.Tensor, int]:
        """Memory for the copy and its guards, and where the copy begins."""
        begin = self.BYTES + tensor.data_ptr() % 64
        room = torch.full(
            (begin + size + self.BYTES,), self.VALUE, dtype=torch.uint8, device=device
        )
        return room, begin

    def check(self, name: str) -> None:
        for guard, place in zip(self._guards, ("before", "behind"), strict=True):
            assert bool((guard == self.VALUE).all()), f"a kernel writes {place} {name}"


class _Paged(_Guarded):
    """Copies a tensor to the end of a page, behind which lies one that nobody may touch."""

    def room(self, tensor: torch.Tensor, size: int, device: str) -> tuple[torch.Tensor, int]:
        end = -(-(size + self.BYTES) // PAGE) * PAGE
        return between_guards(end, PAGE).fill_(self.VALUE), end - size


@contextmanager
def on(machine: str, cuda_kernels: dict[str, Sequence[str]]) -> Iterator[Runner]:
    """Within it, kernels run on that machine.

    Args:
        cuda_kernels: kernels to compile for the emulator, by file.
    """
    with ExitStack() as stack:
        if machine == "gpu":
            yield GpuRunner("cuda")
        elif machine == "guarded":
            yield GpuRunner("cpu", "cpu")
        elif machine.startswith("emulator"):
            stack.enter_context(emulated(cuda_kernels, int(machine.rpartition(" ")[2])))
            yield GpuRunner("cuda", "cpu", paged=True)
        else:
            stack.enter_context(mock.patch.object(cpu, "_function", functions_of(machine)))
            yield Runner("cpu")


def functions_of(instruction_set: str) -> Any:
    """A finder of the functions of one instruction set, in place of the best one's."""

    def find(name: str) -> Any:
        return cpu.function_of(cpu._library(), name, instruction_set)

    return find


def define(op: Op, *args: Any) -> None:
    """Runs an op's definition."""
    op.definition(*args)


def assert_agree(
    kernels: dict[str, Sequence[str]],
    outputs: Callable[..., Any],
    *args: Any,
    on_machines: Sequence[str] | None = None,
    **case: Any,
) -> None:
    """Asserts that the kernels of all machines give what the definitions give, bit for bit.

    Args:
        kernels: those to compile for the emulator, by file.
        outputs: called with what runs an op, and with the arguments; returns tensors in a list, or
            by name.
        on_machines: by default those of ``machines()``.
    """
    expected = outputs(define, *args, **case)
    for machine in machines() if on_machines is None else on_machines:
        with on(machine, kernels) as run:
            results = outputs(run, *args, **case)
        assert len(results) == len(expected)
        for place in expected if isinstance(expected, dict) else range(len(expected)):
            sizes = [tuple(a.shape) if isinstance(a, torch.Tensor) else a for a in args]
            assert same(expected[place], results[place]), (machine, place, sizes, case)
