"""NVRTC compiles every CUDA kernel for the architectures in use, without spilling registers."""

from __future__ import annotations

import random
import re
from typing import Any
from unittest import mock

import pytest

import commhooks
from commhooks.kernels.runtime import cuda, nvrtc
from tests.kernels.fuzz import FAMILIES
from tests.kernels.machines import Runner

# Every file at every run, but of what is instantiated in it, one in four.
ARCHITECTURES = (
    ("90", 4),
    *(pytest.param(number, 1, marks=pytest.mark.slow) for number in ("80", "90", "100")),
)
KERNELS = {name: names for family in FAMILIES for name, names in family.KERNELS.items()}


@pytest.mark.timeout(600)  # all of a large file, with every option
@pytest.mark.parametrize(("architecture", "every"), ARCHITECTURES)
@pytest.mark.parametrize("source", KERNELS)
def test_every_kernel_compiles_and_spills_nothing(source, architecture, every):
    names = KERNELS[source][::every]
    cubin = nvrtc.compile_cubin(source, names, architecture)
    assert cubin.code[:4] == b"\x7fELF"
    assert sorted(cubin.names) == sorted(names)
    assert all(lowered.encode() in cubin.code for lowered in cubin.names.values())
    spills = re.findall(r"(\d+) bytes spill stores", cubin.log)
    assert len(spills) >= len(names)
    assert set(spills) == {"0"}, cubin.log
    stacks = re.findall(r"(\d+) bytes stack frame", cubin.log)
    assert set(stacks) == {"0"}, cubin.log


@pytest.mark.parametrize("architecture", ["80", "90", "100"])
def test_large_blocks_find_registers(architecture):
    most: dict[str, int] = {}

    def launch(source: str, *others: Any, threads: int = cuda._THREADS) -> None:
        most[source] = max(threads, most.get(source, 0))

    rng = random.Random(0)
    with mock.patch.object(cuda, "launch", launch):
        for family in FAMILIES:
            for _ in range(5):
                family.fuzz(Runner("cuda"), rng)
    assert most.keys() == KERNELS.keys()
    for source, threads in most.items():
        if threads <= 256:  # no thread has more than 255 registers, and a block may have 2^16
            continue
        assert threads <= 1024
        log = nvrtc.compile_cubin(source, KERNELS[source], architecture).log
        registers = [int(number) for number in re.findall(r"Used (\d+) registers", log)]
        assert len(registers) == len(KERNELS[source])
        assert -(-max(registers) // 8) * 8 * threads <= 2**16, log  # they are given out in eights


def test_there_is_no_kernel_file_that_is_not_compiled():
    assert sorted(KERNELS) == sorted(path.name for path in nvrtc._folder().glob("*.cu"))


def test_an_error_has_the_log():
    with pytest.raises(nvrtc.CudaCompileError, match=r"(?s)mine.cu .* sm_90.*nonsense"):
        nvrtc.compile_text("nonsense", "mine.cu", [], "90")
    with pytest.raises(commhooks.Error, match=r"mine\.cu"):
        nvrtc.compile_text("__global__ void f() {}", "mine.cu", ["g<1>"], "90")


def test_a_cubin_is_kept_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("COMMHOOKS_CACHE", str(tmp_path))
    name = "dequantize<Int8, float>"
    first = nvrtc.cached_cubin("blockwise.cu", name, "90")
    (kept,) = tmp_path.iterdir()
    monkeypatch.setattr(nvrtc, "compile_cubin", None)  # not called again
    second = nvrtc.cached_cubin("blockwise.cu", name, "90")
    assert (second.code, second.names) == (first.code, first.names)
    assert kept.suffix == ".cubin"


@pytest.mark.parametrize("left", ["nothing", "zeros", "half"])
def test_a_damaged_cubin_is_compiled_again(tmp_path, monkeypatch, left):
    monkeypatch.setenv("COMMHOOKS_CACHE", str(tmp_path))
    which = "finite.cu", "finite<float>", "90"
    first = nvrtc.cached_cubin(*which)
    (kept,) = tmp_path.iterdir()
    whole = kept.read_bytes()
    half = whole[: len(whole) // 2]
    kept.write_bytes({"nothing": b"", "zeros": bytes(len(whole)), "half": half}[left])
    assert nvrtc.cached_cubin(*which).code == first.code
    assert kept.read_bytes() == whole


def test_a_full_disk_leaves_no_files(tmp_path, monkeypatch):
    def full(*which):
        raise OSError("No space left on device")

    monkeypatch.setenv("COMMHOOKS_CACHE", str(tmp_path))
    monkeypatch.setattr(nvrtc.os, "replace", full)
    assert nvrtc.cached_cubin("finite.cu", "finite<float>", "90").code
    assert not list(tmp_path.iterdir())
