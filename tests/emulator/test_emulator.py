"""The emulator and the sanitizers catch bugs: a set of planted ones, every one of them."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest
import torch

from tests.emulator import runner
from tests.kernels.fuzz import FAMILIES, family_name
from tests.kernels.machines import ORDERS

SOURCE = runner.HERE / "planted.cu"
SANITIZED = (1, 8, 12)  # caught by a sanitizer
KERNEL = dict.fromkeys(range(1, 9), "block_sums") | dict.fromkeys((9, 10, 11), "neighbours")
KERNEL[12] = "copies"
N = {"block_sums": 2000, "neighbours": 2016, "copies": 1024}


def expected(kernel: str, x: torch.Tensor) -> torch.Tensor:
    if kernel == "block_sums":
        return torch.cat([part.sum().expand(len(part)) for part in x.split(256)])
    if kernel == "neighbours":
        return x.view(-1, 32).roll(1, dims=1).flatten()
    return x


def right(kernel: str, bug: int, order: int, flags: tuple[str, ...] = ()) -> bool:
    """Returns whether the kernel ran to its end with the expected result."""
    names = [f"{kernel}<{block}>" for block in (0, *(b for b, k in KERNEL.items() if k == kernel))]
    library = runner.build(SOURCE, names, flags)
    library.emulator_order(order)
    n = N[kernel]
    x = torch.arange(n, dtype=torch.float32) % 64  # sums are exact in any order
    out = torch.full((n,), -1.0)
    arguments = (
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_int64(n),
        ctypes.c_void_p(out.data_ptr()),
    )
    blocks, threads = {"block_sums": (3, 256), "neighbours": (1, 32), "copies": (1, 256)}[kernel]
    grid = (blocks, 1)
    try:
        runner.launch_on(library, f"{kernel}<{bug}>", grid, threads, arguments)
    except runner.EmulatedError:
        return False
    return torch.equal(out, expected(kernel, x))


@pytest.mark.parametrize("kernel", N)
@pytest.mark.parametrize("order", ORDERS)
def test_a_right_kernel_runs_in_every_order(kernel, order):
    assert right(kernel, 0, order)


@pytest.mark.parametrize("bug", [bug for bug in KERNEL if bug not in SANITIZED])
def test_a_bug_is_caught_in_some_order(bug):
    assert not all(right(KERNEL[bug], bug, order) for order in ORDERS)


def run_sanitized(*program: str) -> subprocess.CompletedProcess[str]:
    """A Python program whose C++ code was compiled with sanitizers."""
    libraries = [
        subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    environment = os.environ | {
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "print_stacktrace=0",
    }
    return subprocess.run(
        [sys.executable, *program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,  # of compiling, above all
        check=False,
        cwd=runner.HERE.parents[1],
    )


@pytest.mark.parametrize("bug", SANITIZED)
@pytest.mark.slow
def test_a_sanitizer_catches_the_rest(bug):
    program = f"""
from tests.emulator.test_emulator import KERNEL, right
from tests.emulator.runner import SANITIZE
assert right(KERNEL[{bug}], 0, 0, SANITIZE)
print("the right one ran", flush=True)
right(KERNEL[{bug}], {bug}, 0, SANITIZE)
print("not caught")
"""
    done = run_sanitized("-c", program)
    assert "the right one ran" in done.stdout, done.stderr
    assert "not caught" not in done.stdout
    assert "AddressSanitizer" in done.stderr or "runtime error" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1000)  # compiles all kernels with sanitizers
def test_cpu_kernels_are_clean_under_sanitizers():
    done = run_sanitized("-m", "tests.kernels.fuzz", "cpu")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip() == "done"


@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name == "shared" else pytest.mark.slow)
        for name in map(family_name, FAMILIES)
    ],
)
@pytest.mark.slow
def test_cuda_kernels_are_clean_under_sanitizers(family):
    done = run_sanitized("-m", "tests.kernels.fuzz", "emulator", family)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip() == "done"
