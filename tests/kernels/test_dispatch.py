"""Dispatch of ops to implementations, and PyTorch's compiler on ops."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from commhooks import make
from commhooks.hook._engine import Engine
from commhooks.kernels import blockwise, implementations, use_kernels
from commhooks.kernels.blockwise import dequantize, payload_bytes, quantize
from commhooks.kernels.runtime import cpu
from commhooks.kernels.runtime import op as _op
from tests.kernels.calls import CALLS, quantized


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
    _op._say_once.cache_clear()
    with mock.patch.object(cpu, "_library", return_value=None):
        with pytest.warns(
            RuntimeWarning, match=r"PyTorch code runs where CPU kernels could.*g\+\+"
        ):
            assert torch.equal(quantized(x), expected)
        quantized(x)  # a second warning would be an error
        _op.warn_if_missing()
        assert "install g++" in implementations("cpu")["quantize"]
        with use_kernels("native"), pytest.raises(RuntimeError, match=r"'native', but .*g\+\+"):
            quantized(x)
    _op._say_once.cache_clear()
    assert implementations("cpu")["quantize"] == "kernel"


def test_on_a_processor_without_avx2_definitions_run_and_say_why():
    _op._say_once.cache_clear()
    with mock.patch.object(cpu, "_best", return_value=-1):
        with pytest.warns(RuntimeWarning, match="this processor lacks x86-64-v3"):
            quantized(torch.randn(8))
        with pytest.raises(RuntimeError, match="lacks x86-64-v3"):
            cpu.instruction_set.__wrapped__()
    _op._say_once.cache_clear()


@pytest.mark.parametrize(
    ("local_rank", "rank", "says"), [("0", 8, True), ("1", 9, False), ("", 0, True), ("", 3, False)]
)
def test_one_process_of_a_machine_says_why(local_rank, rank, says, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    _op._say_once.cache_clear()
    warns = pytest.warns(RuntimeWarning, match="PyTorch code runs") if says else nullcontext()
    with mock.patch.object(cpu, "_library", return_value=None), warns:
        quantized(torch.randn(8))  # a warning would be an error
    _op._say_once.cache_clear()


def test_definitions_that_are_asked_for_need_no_warning():
    _op._say_once.cache_clear()
    with mock.patch.object(cpu, "_library", return_value=None), use_kernels("definition"):
        quantized(torch.randn(8))
        _op.warn_if_missing()


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


def test_missing_cuda_kernels_are_reported_once():
    _op._say_once.cache_clear()
    with mock.patch.dict(_op._MISSING, cuda=lambda: "there is no CuPy"):
        with pytest.warns(RuntimeWarning, match="there is no CuPy"):
            assert blockwise.quantize_op.implementation("cuda") == blockwise.quantize_op.definition
        blockwise.quantize_op.implementation("cuda")  # a second warning would be an error


@pytest.mark.slow
def test_the_environment_sets_the_mode():
    program = "import commhooks.kernels as k; print(k.implementations('cpu')['quantize'])"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"COMMHOOKS_KERNELS": "definition"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "asked for" in done.stdout
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"COMMHOOKS_KERNELS": "fast"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "one of auto, definition, native, got 'fast'" in done.stderr


def test_a_mode_that_is_none_is_an_error_before_anything_runs(monkeypatch):
    monkeypatch.setattr(_op, "_mode", "fast")
    for run in (
        lambda: quantized(torch.randn(8)),
        lambda: implementations("cpu"),
        lambda: Engine(make("none"), rank=0, world_size=2),  # a scheme that may run no op
    ):
        with pytest.raises(ValueError, match=r"COMMHOOKS_KERNELS is one of auto, .* got 'fast'"):
            run()


def test_a_lesser_instruction_set_may_be_asked_for(monkeypatch):
    monkeypatch.setenv("COMMHOOKS_CPU", "v9")
    with pytest.raises(ValueError, match=r"COMMHOOKS_CPU is one of .* got 'v9'"):
        cpu.instruction_set.__wrapped__()


def test_arguments_are_there_for_every_op():
    assert sorted(CALLS) == sorted(_op._OPS)


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name):
    torch.library.opcheck(getattr(torch.ops.commhooks, name).default, CALLS[name]())


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
