"""Ops whose CUDA kernel is given as text."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from commhooks.kernels import op, use_kernels
from commhooks.kernels.runtime import cuda, nvrtc
from commhooks.kernels.runtime import op as _op
from tests.emulator.runner import emulated

SOURCE = """
template <class T>
__global__ void clipped(const T* x, T* out, float limit, i64 twice, i64 n) {
    for (i64 i = warp() * 32 + lane(); i < n; i += warps() * 32) {
        const float value = to_float(x[i]) * (twice ? 2.0f : 1.0f);
        store(out + i, value > limit ? limit : value < -limit ? -limit : value);
    }
}
"""


@pytest.fixture(scope="module")
def clipped():
    @op("clipped(Tensor x, Tensor(a!) out, float limit, bool twice) -> ()", cuda_source=SOURCE)
    def clipped(x: Tensor, out: Tensor, limit: float, twice: bool) -> None:
        out.copy_((x * (2 if twice else 1)).clamp(-limit, limit))

    yield clipped
    del _op._OPS["clipped"]


@pytest.mark.parametrize(("dtype", "cpp"), cuda.DTYPES.items())
def test_it_is_compiled_and_gets_its_arguments(clipped, dtype, cpp):
    names = {"clipped (inline)": [f"clipped<{cpp}>"]}
    x = torch.randn(5001).to(dtype)
    expected, actual = torch.empty(2, 5001, dtype=dtype)
    clipped.definition(x, expected, 0.5, True)
    with emulated(names):
        clipped.kernels["cuda"](x, actual, 0.5, True)
    assert torch.equal(expected, actual)
    assert nvrtc.compile_cubin("clipped (inline)", *names.values(), "90").code


def test_its_definition_runs_where_it_has_no_kernel(clipped):
    x, out = torch.ones(3), torch.empty(3)
    clipped(x, out, 0.5, False)
    assert out.tolist() == [0.5] * 3
    with use_kernels("native"), pytest.raises(RuntimeError, match="no kernel for 'cpu'"):
        clipped(x, out, 0.5, False)


def test_an_error_in_the_text_names_the_line():
    name = nvrtc.add_source("wrong", "\n\nnonsense;")
    with pytest.raises(nvrtc.CudaCompileError, match=r"wrong\(3\): error"):
        nvrtc.compile_cubin(name, [], "90")
