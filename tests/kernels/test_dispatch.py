"""Which implementation of an op runs, and that PyTorch's compiler accepts ops."""

from __future__ import annotations

import subprocess
import sys
from unittest import mock

import pytest
import torch

from commhooks.kernels import Matrices, _cpu, _op, blockwise, implementations, use_kernels
from commhooks.kernels.blockwise import dequantize, payload_bytes, quantize


def quantized(x: torch.Tensor) -> torch.Tensor:
    payload = torch.empty(payload_bytes(x.numel(), "int8", 256), dtype=torch.uint8)
    quantize(x, payload, "int8", 256)
    return payload


def test_the_mode_decides():
    with mock.patch.dict(blockwise.quantize_op.kernels, cpu=mock.Mock()) as kernels:
        with use_kernels("definition"):
            quantized(torch.randn(8))
        kernels["cpu"].assert_not_called()
        for mode in ("native", "auto"):
            with use_kernels(mode):
                quantized(torch.randn(8))
        assert kernels["cpu"].call_count == 2


def test_without_the_library_definitions_run_and_say_why():
    x = torch.randn(600)
    expected = quantized(x)
    with mock.patch.object(_cpu, "_library", return_value=None):
        assert torch.equal(quantized(x), expected)
        assert "install g++" in implementations("cpu")["quantize"]
        with use_kernels("native"), pytest.raises(RuntimeError, match=r"'native', but .*g\+\+"):
            quantized(x)
    assert implementations("cpu")["quantize"] == "kernel"


def test_a_kernel_that_fails_is_not_replaced():
    failing = mock.Mock(side_effect=RuntimeError("out of order"))
    with (
        mock.patch.dict(blockwise.quantize_op.kernels, cpu=failing),
        pytest.raises(RuntimeError, match="out of order"),
    ):
        quantized(torch.randn(8))


def test_a_device_without_a_kernel_is_an_error_if_kernels_are_asked_for():
    with use_kernels("native"), pytest.raises(RuntimeError, match="no kernel for 'meta'"):
        blockwise.quantize_op.implementation("meta")


def test_a_whole_number_may_be_given_for_a_float():
    payload, outs = quantized(torch.randn(600)), torch.empty(2, 600)
    dequantize(payload[None], outs[0], "int8", 256, factor=2.0)
    dequantize(payload[None], outs[1], "int8", 256, factor=2)
    assert torch.equal(*outs)


def test_missing_cuda_kernels_are_told_once():
    _op._say_once.cache_clear()
    with mock.patch.dict(_op._MISSING, cuda=lambda: "there is no CuPy"):
        with pytest.warns(RuntimeWarning, match="there is no CuPy"):
            assert blockwise.quantize_op.implementation("cuda") == blockwise.quantize_op.definition
        blockwise.quantize_op.implementation("cuda")  # a second warning would be an error


def test_the_environment_sets_the_mode():
    program = "import commhooks.kernels as k; print(k.implementations('cpu')['quantize'])"
    for mode, words in (("definition", "asked for"), ("auto", "kernel")):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={"COMMHOOKS_KERNELS": mode},
            capture_output=True,
            text=True,
            check=True,
        )
        assert words in done.stdout
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"COMMHOOKS_KERNELS": "fast"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "one of auto, definition, native, got 'fast'" in done.stderr


def test_a_lesser_instruction_set_may_be_asked_for(monkeypatch):
    monkeypatch.setenv("COMMHOOKS_CPU", "v9")
    with pytest.raises(ValueError, match=r"COMMHOOKS_CPU is one of .* got 'v9'"):
        _cpu.instruction_set.__wrapped__()


STEP = torch.tensor(3)
MATRICES = Matrices([(0, 20, 30, 2), (600, 7, 9, 2)])
BUCKET = MATRICES.table[-1, 0]


def low_rank_factors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(MATRICES.left_numel), torch.randn(MATRICES.right_numel)


ARGUMENTS = {
    "multiply_right": lambda: (
        *(torch.randn(BUCKET), torch.randn(BUCKET), torch.zeros(BUCKET), MATRICES.table),
        *low_rank_factors()[::-1],
    ),
    "multiply_left": lambda: (torch.randn(BUCKET), MATRICES.table, *low_rank_factors()),
    "expand": lambda: (
        *(*low_rank_factors(), *low_rank_factors(), torch.randn(BUCKET), MATRICES.table),
        *(torch.zeros(BUCKET), torch.zeros(BUCKET)),
    ),
    "orthonormalize": lambda: (low_rank_factors()[0], MATRICES.table),
    "unit_rows": lambda: (low_rank_factors()[1], low_rank_factors()[1], MATRICES.table),
    "quantize": lambda: (
        *(torch.randn(600), torch.zeros(payload_bytes(600, "int8", 256), dtype=torch.uint8)),
        *("int8", 256, torch.randn(600), torch.zeros(600), STEP, 1, 0, 0),
    ),
    "dequantize": lambda: (
        *(quantized(torch.randn(600))[None], torch.zeros(600), "int8", 256, 0.5, True),
    ),
    "quantize_rotated": lambda: (
        *(torch.randn(512), torch.zeros(payload_bytes(512, "int8", 256), dtype=torch.uint8)),
        *("int8", 256, STEP, 1, 0, 0, torch.randn(512), torch.zeros(512), STEP, 1, 1, 0),
    ),
    "dequantize_rotated": lambda: (
        *(quantized(torch.randn(512))[None], torch.zeros(512), "int8", 256, 0.5, True),
        *(STEP, 1, 0, 0),
    ),
    "top_k": lambda: (
        *(torch.randn(600), 6, torch.zeros(6, dtype=torch.int32), torch.zeros(6)),
        *(torch.randn(600), torch.zeros(600)),
    ),
    "quantize_affine": lambda: (
        *(torch.randn(600), torch.zeros(600, dtype=torch.uint8), torch.zeros(3)),
        *(torch.zeros(3, dtype=torch.uint8), 256),
    ),
    "dequantize_affine": lambda: (
        *(torch.zeros(600, dtype=torch.uint8), torch.ones(3), torch.ones(3, dtype=torch.uint8)),
        *(256, 0.5, True, torch.zeros(600)),
    ),
    "largest_magnitudes": lambda: (
        *(torch.randn(600), torch.randn(600), torch.zeros(3, dtype=torch.int32), 256),
    ),
    "quantize_shared": lambda: (
        *(torch.randn(600), torch.randn(600), torch.full((3,), 1 << 30, dtype=torch.int32)),
        *(torch.zeros(600, dtype=torch.int8), torch.zeros(600), 256, 42, STEP, 1, 0, 0),
    ),
    "dequantize_shared": lambda: (
        *(torch.zeros(600, dtype=torch.int8), torch.full((3,), 1 << 30, dtype=torch.int32)),
        *(torch.zeros(600), 256, 42, 0.5),
    ),
    "quantize_levels": lambda: (
        *(torch.randn(256), torch.tensor([-1.0, 1.0, 0.0]), torch.zeros(2)),
        *(torch.zeros(32, dtype=torch.uint8), torch.zeros(256), 128),
    ),
    "dequantize_levels": lambda: (
        *(torch.ones(2), torch.zeros(32, dtype=torch.uint8), torch.tensor([-1.0, 1.0, 0.0])),
        *(torch.zeros(256), 128, True),
    ),
    "top_k_sampled": lambda: (
        *(torch.randn(600), 6, torch.zeros(6, dtype=torch.int32), torch.zeros(6)),
        *(torch.randn(600), torch.zeros(600)),
    ),
    "gather": lambda: (
        *(torch.randn(600), torch.arange(6, dtype=torch.int32), torch.zeros(6)),
        *(torch.randn(600), torch.zeros(600)),
    ),
    "finite": lambda: (torch.randn(600), torch.ones((), dtype=torch.bool)),
    "norms": lambda: (torch.randn(600), torch.zeros(3, dtype=torch.float64)),
    "pack_bits": lambda: (torch.randn(60) > 0, torch.zeros(8, dtype=torch.uint8)),
    "unpack_bits": lambda: (torch.zeros(8, dtype=torch.uint8), torch.ones(60, dtype=torch.bool)),
    "scatter_add": lambda: (
        *(torch.arange(6, dtype=torch.int32)[None], torch.randn(1, 6), torch.zeros(600), 0.5),
    ),
    "hadamard": lambda: (torch.randn(256), torch.zeros(256), 64, False, STEP, 1, 0, 0),
    "gather_random": lambda: (
        *(torch.randn(600), torch.zeros(6), torch.randn(600), torch.zeros(600), STEP, 1, 0),
    ),
    "scatter_random": lambda: (torch.randn(6), torch.zeros(600), 0.5, STEP, 1, 0),
    "dct": lambda: (torch.randn(128), torch.randn(64, 64), torch.zeros(128)),
    "cast": lambda: (torch.randn(600), torch.zeros(600).half(), 0.5, STEP, 1, 0, 0),
    "requantize": lambda: (
        *(quantized(torch.randn(600))[None], quantized(torch.randn(600)), 600, "int8", 256),
        *(0.5, None, None, None, 0, 0, 0),
    ),
}


def test_arguments_are_there_for_every_op():
    assert sorted(ARGUMENTS) == sorted(_op._OPS)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_opcheck(name):
    torch.library.opcheck(getattr(torch.ops.commhooks, name).default, ARGUMENTS[name]())


def test_compiled_code_calls_the_op():
    def round_trip(x: torch.Tensor) -> torch.Tensor:
        payload = torch.empty(payload_bytes(x.numel(), "int8", 256), dtype=torch.uint8)
        quantize(x * 2, payload, "int8", 256)
        out = torch.empty_like(x)
        dequantize(payload[None], out, "int8", 256)
        return out + 1

    x = torch.randn(600)
    compiled = torch.compile(round_trip, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), round_trip(x))
