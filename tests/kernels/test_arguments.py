"""Arguments of ops: what kernels must not get is refused, whoever calls."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys

import numpy
import pytest
import torch

from commhooks.kernels import (
    Matrices,
    RandomBits,
    multiply_left,
    payload_bytes,
    quantize,
    scaled_cast,
    top_k,
)
from commhooks.kernels.blockwise import quantize_op
from commhooks.kernels.low_rank import multiply_left_op
from commhooks.kernels.philox import as_seed
from commhooks.kernels.runtime import cpu
from commhooks.kernels.runtime.arguments import as_ctypes
from commhooks.kernels.runtime.cpu import SIGNATURES
from tests.emulator.runner import HERE, KERNELS
from tests.kernels.calls import CALLS, MATRICES, quantized

STEP = torch.tensor(3)


def test_signatures_are_those_of_the_sources():
    signatures = {}
    kinds = {"i64": "i", "float": "f"}
    for path in KERNELS.glob("*.cpp"):
        for name, declared in re.findall(r"EXPORT\((\w+)\)\(([^)]*)\)", path.read_text()):
            arguments = [declaration.split() for declaration in declared.split(",")]
            signatures[name] = "".join(
                "p" if "*" in "".join(words) else kinds[words[0]] for words in arguments
            )
    assert signatures == {name: kinds.replace("?", "p") for name, kinds in SIGNATURES.items()}


def test_functions_of_the_library_take_no_other_kinds():
    x, out = torch.ones(3), torch.ones((), dtype=torch.bool)
    wrong = (
        (x, 3, out),
        (0, 1, 3, out),
        (0, x, 3.0, out),
        (0, x, 3, None),
        (0, x),
        (0, None, 3, out),
    )
    for arguments in wrong:
        with pytest.raises((TypeError, ctypes.ArgumentError)):
            cpu.call("finite", *arguments)
    for value in ("1", 1j, [1], numpy.float32(1)):
        with pytest.raises(TypeError, match="kernels take tensors, None, int, bool and float, got"):
            as_ctypes(value)


@pytest.mark.timeout(110)
@pytest.mark.slow
def test_no_wrong_argument_ends_the_process():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-X", "faulthandler", "-m", "tests.kernels.hostile"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=HERE.parents[1],
    )
    assert done.stdout == "done\n", done.stdout + done.stderr[-3000:]


def test_whole_numbers_of_numpy_do_and_others_do_not():
    x = torch.randn(600)
    payload = torch.empty(
        payload_bytes(numpy.int32(600), "int8", numpy.int64(256)), dtype=torch.uint8
    )
    quantize(x, payload, "int8", numpy.int64(256))
    assert torch.equal(payload, quantized(x))
    for wrong in (256.0, True, "256", None, torch.tensor(256.0)):
        with pytest.raises(TypeError, match=r"quantize\(block\): a whole number, got"):
            quantize(x, payload, "int8", wrong)
        with pytest.raises(TypeError, match=r"payload_bytes\(block\): a whole number, got"):
            payload_bytes(600, "int8", wrong)
    with pytest.raises(TypeError, match=r"scaled_cast\(scale\): a number, got True of type bool"):
        scaled_cast(x, True, torch.empty(600))


def test_a_seed_is_a_whole_number_of_64_bits():
    for seed, expected in ((3, 3), (numpy.int64(3), 3), (numpy.uint64(2**64 - 1), -1), (-1, -1)):
        assert as_seed(seed) == RandomBits(seed, STEP).seed == expected
        assert type(RandomBits(seed, STEP).seed) is int
    for seed in (1.5, None, True, "3", numpy.float64(3), torch.tensor(3.0), torch.tensor(True)):
        with pytest.raises(TypeError, match=r"register\(seed\): a whole number, got"):
            as_seed(seed, "register")
    for seed in (2**64, -(2**63) - 1):
        with pytest.raises(ValueError, match=r"RandomBits\(seed\): -2\^63 to 2\^64 - 1, got"):
            RandomBits(seed, STEP)
    for wrong in ({"number": -1}, {"number": 2**32}, {"first": -256}):
        with pytest.raises(ValueError, match=r"RandomBits\((number|first)\): 0 to"):
            RandomBits(1, STEP, **wrong)


def test_what_is_written_shares_no_memory_but_where_it_may():
    x, indices, values = torch.randn(100), torch.empty(5, dtype=torch.int32), torch.empty(5)
    top_k(x, 5, indices, values, residual=(r := torch.randn(100)), unsent=r)
    long = torch.randn(101)
    with pytest.raises(ValueError, match=r"top_k\(residual, unsent\): have to be the same"):
        top_k(x, 5, indices, values, residual=long[:100], unsent=long[1:])
    with pytest.raises(ValueError, match=r"top_k\(x, unsent\): have to share no memory"):
        top_k(x, 5, indices, values, unsent=x)
    with pytest.raises(ValueError, match=r"scaled_cast\(x, out\): have to be the same"):
        scaled_cast(x[:50], 1.0, x.view(torch.bfloat16)[:50])


def test_a_tensor_needs_memory():
    x = torch.randn(600)
    x.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"quantize\(x\): the tensor has no memory"):
        quantized(x)


def _freed(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


@pytest.mark.parametrize(
    ("place", "change", "words"),
    [
        (0, lambda x: x.double(), r"\(x\): dtype"),
        (0, lambda x: x[:-1].clone(), r"\(residual\): 599 entries, got 600"),
        (0, lambda x: torch.stack([x, x], 1)[:, 0], r"\(x\): contiguous"),
        (0, _freed, r"\(x\): the tensor has no memory"),
        (1, lambda payload: payload.view(2, -1), r"\(payload\): shape \(1, "),
        (2, lambda format: "int9", r"\(format\): one of"),
        (3, lambda block: 255, r"\(block\): int8 takes one of"),
        (4, lambda table: table + 1, r"\(segments\): a table as Segments makes it"),
        (5, lambda row: 1, r"\(row\): -1 to 0, got 1"),
        (7, lambda unsent: torch.cat([unsent, unsent]), r"\(unsent\): 600 entries, got 1200"),
        (8, lambda step: step.int(), r"\(step\) is an int64 tensor"),
        (8, lambda step: torch.stack([step, step]), r"\(step\) is an int64 tensor"),
        (11, lambda first: 3, r"\(first\) is a multiple of 256"),
        (12, lambda rank: 1, r"\(rank\): 0 to 0, got 1"),
    ],
)
def test_a_right_call_lets_no_wrong_one_pass(place, change, words):
    args = list(CALLS["quantize"]())
    quantize_op(*args)
    quantize_op(*args)
    args[place] = change(args[place])
    with pytest.raises((TypeError, ValueError), match=words):
        quantize_op(*args)


def test_what_is_the_same_tensor_is_checked_for_each_argument():
    x, table = torch.randn(MATRICES.end).half(), MATRICES.table
    left, right = torch.randn(MATRICES.left_numel), torch.randn(MATRICES.right_numel)
    residual, rest = torch.zeros(MATRICES.end), (table, left, right, None, None, None)
    multiply_left_op(x, residual, residual, *rest)
    with pytest.raises(TypeError, match=r"multiply_left\(total\): dtype is one of torch.float32"):
        multiply_left_op(x, residual, x, *rest)


def test_a_table_that_was_written_to_is_none():
    matrices = Matrices([(0, 20, 30, 2)])
    left, right = torch.randn(matrices.left_numel), torch.randn(matrices.right_numel)
    multiply_left(matrices, torch.randn(600), left, right)
    matrices.table[0, 0] = 1 << 40
    with pytest.raises(ValueError, match=r"multiply_left\(table\): a table as Matrices makes it"):
        multiply_left(matrices, torch.randn(600), left, right)
    for places, words in (
        ([(0, 2, 3, 1), (5, 2, 2, 1)], "they overlap at 5"),
        ([(-1, 2, 3, 1)], "numbers from 0"),
        ([(0, 2**40, 2**40, 1)], "numbers from 0"),
        ([(0, 2, 3)], "offset, rows, columns, rank"),
    ):
        with pytest.raises(ValueError, match=words):
            Matrices(places)
    with pytest.raises(TypeError, match=r"Matrices\(places\): a whole number"):
        Matrices([(0, 2.0, 3, 1)])


def test_the_dispatcher_refuses_a_mixture_with_meta():
    args = list(CALLS["quantize"]())
    args[6] = args[6].to("meta")
    with pytest.raises(ValueError, match="quantize: all tensors on one device, some are on 'meta'"):
        torch.ops.commhooks.quantize(*args)
