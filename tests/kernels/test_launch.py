"""The host's side of a CUDA launch and of compilation, without a GPU."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from commhooks.kernels.runtime import cuda, nvrtc

SOURCE, KERNEL = "finite.cu", "finite<float>"


class Machine:
    """Two pretended devices, each with a stream; notes what is launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current, self.launches = 0, []
        monkeypatch.setattr(cuda, "_function", lambda *which: self.function(which))
        monkeypatch.setattr(cuda, "_most_blocks", lambda index: 2 * 132 * 64 // 8)
        monkeypatch.setattr(cuda, "current_device", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "device", self.device)
        monkeypatch.setattr(cuda, "current_stream", lambda index: 1000 + index)
        # Any use of CuPy itself is an error: its stream classes warn or cost more than a launch.
        monkeypatch.setitem(sys.modules, "cupy", None)

    def function(self, which: tuple[Any, ...]) -> Any:
        def call(grid: Any, block: Any, arguments: Any, *, stream: Any) -> None:
            self.launches.append((which, self.current, grid, block, arguments, stream.ptr))

        return call

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        yield
        self.current = before


@pytest.mark.parametrize(("device", "index"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_a_launch_is_on_torchs_stream_of_the_tensors_device(monkeypatch, device, index):
    machine, x = Machine(monkeypatch), torch.zeros(3)
    cuda.launch("file.cu", "kernel", torch.device(device), 9, (x, None, 7, True, -1, 0.5))
    ((which, current, grid, block, arguments, stream),) = machine.launches
    assert which == ("file.cu", "kernel", index, 256)
    assert (current, stream) == (index, 1000 + index)
    assert (grid, block) == ((2, 1), (256,))  # 9 warps are two blocks of 8
    assert arguments == (x.data_ptr(), 0, 7, 1, -1, 0.5)
    # CuPy passes int in 64 bits, as the kernels take them, but a Python float as a double.
    assert [type(value) for value in arguments] == [int] * 5 + [numpy.float32]
    assert machine.current == 0


def test_counters_belong_to_a_stream_or_to_a_captured_graph(monkeypatch):
    machine, capturing = Machine(monkeypatch), [True]
    filled = []

    def zeros(*size: int, **options: Any) -> object:
        filled.append(machine.current)
        return object()

    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    cuda._counters.cache_clear()
    first, second = (torch.device("cuda", index) for index in range(2))
    # A fill that is captured has not run, and each graph may run on a stream of its own.
    captured = [cuda.counters(second), cuda.counters(second)]
    capturing[0] = False
    eager = [cuda.counters(device) for device in (second, second, first)]
    assert filled == [1, 1, 1, 0]
    assert eager[0] is eager[1]
    assert len({*captured, *eager}) == 4
    cuda._counters.cache_clear()


def test_a_kernel_that_has_too_many_registers_is_not_launched(monkeypatch):
    class Module:
        def load(self, code: bytes) -> None:
            pass

        def get_function(self, name: str) -> Any:
            return SimpleNamespace(ptr=7)

    driver = SimpleNamespace(funcGetAttribute=lambda attribute, ptr: {(0, 7): 512}[attribute, ptr])
    parts = {"Device": nullcontext, "function": SimpleNamespace(Module=Module), "driver": driver}
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(**parts)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    cubin = nvrtc.Cubin(b"", {KERNEL: "mangled"}, "")
    monkeypatch.setattr(nvrtc, "cached_cubin", lambda *which: cubin)
    function = cuda._function.__wrapped__
    assert function(SOURCE, KERNEL, 1, 512).ptr == 7
    with pytest.raises(
        nvrtc.CudaCompileError, match=r"finite<float> .* 512 threads on cuda:1.*1024"
    ):
        function(SOURCE, KERNEL, 1, 1024)


def test_a_grid_is_at_most_twice_what_a_device_holds(monkeypatch):
    Machine(monkeypatch)
    most = 2 * 132 * 8
    grids = [cuda.grid_for(work, 0) for work in (0, 8, 9, 2**40)]
    assert grids == [(1, 1), (1, 1), (2, 1), (most, 1)]
    # The rows of a message share the device.
    assert cuda.grid_for(2**40, 0, 64) == (most // 64, 64)
    assert cuda.grid_for(1, 0, 2**15) == (1, 2**15)


def test_a_device_without_the_instructions_runs_pytorch_code(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace())
    monkeypatch.setattr(nvrtc, "load_nvrtc", lambda: None)
    capabilities = [(9, 0), (7, 5)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_name", ["H100", "T4"].__getitem__)
    message = cuda.missing.__wrapped__()
    assert message == "cuda:1 (T4) has compute capability 7.5; the kernels need 8.0"
    capabilities[1] = (8, 0)
    assert cuda.missing.__wrapped__() is None


@pytest.mark.parametrize(
    ("capability", "target"),
    [((8, 0), "80"), ((9, 0), "90"), ((8, 8), "compute_87"), ((12, 0), "compute_100")],
)
def test_a_device_that_nvrtc_does_not_know_gets_the_next_best_code(monkeypatch, capability, target):
    monkeypatch.setattr(nvrtc, "_known_architectures", lambda: [75, 80, 86, 87, 90, 100])
    assert nvrtc.architecture_of(capability) == target


def test_nvrtc_compiles_for_a_device_that_it_knows_and_ptx_for_a_later_one():
    assert nvrtc.architecture_of((9, 0)) == "90"
    newest = nvrtc.architecture_of((99, 0))
    assert newest.startswith("compute_")
    code = nvrtc.compile_cubin(SOURCE, [KERNEL], newest).code
    assert b".version" in code
    assert code.endswith(b"\0")
    assert nvrtc.compile_cubin(SOURCE, [KERNEL], "90").code.startswith(b"\x7fELF")


@pytest.mark.parametrize("home", ["none", "unreadable"])
def test_kernels_compile_without_a_home(monkeypatch, tmp_path: Path, home: str):
    def fails() -> Path:
        raise RuntimeError("Could not determine home directory")

    (tmp_path / "file").touch()
    monkeypatch.delenv("COMMHOOKS_CACHE", raising=False)
    monkeypatch.setattr(Path, "home", fails if home == "none" else lambda: tmp_path / "file")
    assert nvrtc.cached_cubin(SOURCE, KERNEL, "90").code.startswith(b"\x7fELF")


def test_builtins_of_nvrtc_are_loaded_before_it(monkeypatch, tmp_path: Path):
    folder = tmp_path / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    for name in ("libnvrtc.so.13", "libnvrtc-builtins.so.13.0"):
        (folder / name).touch()
    loaded: list[tuple[str, int]] = []

    def load(path: str, mode: int = ctypes.DEFAULT_MODE) -> str:
        if "/" not in path:
            raise OSError("torch has not loaded it")
        loaded.append((Path(path).name, mode))
        return path

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(ctypes, "CDLL", load)
    nvrtc.load_nvrtc.__wrapped__()
    assert loaded == [
        ("libnvrtc-builtins.so.13.0", ctypes.RTLD_GLOBAL),
        ("libnvrtc.so.13", ctypes.DEFAULT_MODE),
    ]
