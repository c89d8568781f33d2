"""Arguments of ops: what kernels must not get is refused, whoever calls."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys

import numpy
import pytest
import torch

from commhooks import kernels as ops
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
from commhooks.kernels.finite import finite_op
from commhooks.kernels.low_rank import multiply_left_op, multiply_right_op
from commhooks.kernels.parts import Parts, squared_norms_op
from commhooks.kernels.philox import as_seed
from commhooks.kernels.runtime import cpu
from commhooks.kernels.runtime.arguments import as_ctypes
from commhooks.kernels.runtime.cpu import SIGNATURES
from tests.emulator.runner import HERE, KERNELS
from tests.kernels.calls import CALLS, MATRICES, TAIL, quantized

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
        (2, lambda format: "int9", r"\(format\): one of int8, int4"),
        (3, lambda block: 255, r"\(block\): int8 takes one of 32, 64"),
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


# ---- each rule of each op, and the words that name it

ONES, BITS, GOOD = torch.ones, RandomBits(1, STEP), torch.tensor(True)
LEFT, RIGHT = ONES(MATRICES.left_numel), ONES(MATRICES.right_numel)
NO_MATRICES, NOTHING = Matrices([]), torch.empty(0)
SHORT = ops.segments_for("int8", 32, [[99]])


def octets(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.uint8)


def with_defaults(op, **right):
    """A call of an op with right arguments but for those that it is given."""
    return lambda **wrong: op(**(right | wrong))


packed = octets(payload_bytes(100, "int8", 32))
quantized_100 = with_defaults(quantize, x=ONES(100), payload=packed, format="int8", block=32)
decoded_100 = with_defaults(
    ops.dequantize, payloads=packed[None], out=ONES(100), format="int8", block=32
)
turned = with_defaults(ops.hadamard, x=ONES(128), out=ONES(128), block=64, random=BITS)
rotated = with_defaults(
    ops.quantize_rotated, x=ONES(512), payload=octets(544), format="int8", block=256, rotation=BITS
)
multiplied = with_defaults(
    ops.multiply_right, matrices=MATRICES, x=ONES(MATRICES.end), right=RIGHT, left=LEFT
)
subtracted = with_defaults(
    ops.subtract_low_rank,
    matrices=MATRICES,
    total=ONES(MATRICES.end),
    left=LEFT,
    right=RIGHT,
    unsent=ONES(MATRICES.end),
)
tailed = with_defaults(
    ops.multiply_right, matrices=NO_MATRICES, x=ONES(200), right=NOTHING, left=NOTHING
)
gathered = with_defaults(ops.gather_random, x=ONES(3), values=ONES(1), random=BITS)
leveled = with_defaults(
    ops.quantize_levels, x=ONES(256), levels=ONES(2), payload=octets(48), block=128, unsent=None
)
taken = with_defaults(
    top_k, x=ONES(10), k=2, indices=torch.empty(2, dtype=torch.int32), values=ONES(2)
)
normed = with_defaults(
    ops.quantize_norms, x=ONES(9), payload=octets(288), block=32, levels=127, random=BITS
)
PARTS = Parts((9,)).table.clone()
PARTS[1, 2] = 5

WRONG_TYPES = [
    (lambda: taken(indices=ONES(2)), "top_k(indices): dtype"),
    (lambda: taken(x=ONES(10).int()), "top_k(x): dtype"),
    (lambda: quantized_100(segments=[100]), "Segments or None"),
    (lambda: quantized_100(payload=packed.int()), "quantize(payload)"),
    (lambda: RandomBits(1, STEP.int()), "int64 tensor of one number"),
    (lambda: finite_op(ONES(3), ONES(())), "all_finite(answer): dtype"),
    (lambda: multiplied(x=ONES(MATRICES.end).int()), "(x): dtype is one of"),
    (lambda: subtracted(total=ONES(MATRICES.end).bfloat16()), "low_rank(total): dtype is one of"),
    (lambda: ops.restore([(ONES(3), ONES(3).double())], GOOD), "restore(old): dtype"),
    (lambda: ops.restore([(ONES(3), ONES(3))], ONES(())), "restore(good): dtype"),
    (lambda: scaled_cast(ONES(3).int(), 1.0, ONES(3)), "(x): dtype"),
    (
        lambda: scaled_cast(ONES(3), 1.0, ONES(3), random=BITS),
        "(out): dtype is one of torch.float16",
    ),
]
WRONG_VALUES = [
    (lambda: quantized_100(format="int2"), "int2 takes one of 128, 256"),
    (lambda: quantized_100(payload=packed[:-1]), "(1, 208), 208 bytes a row, got (207,)"),
    (
        lambda: quantized_100(payload=octets(2, 208)),
        "payload): shape (1, 208), 208 bytes a row, got (2, 208)",
    ),
    (lambda: quantized_100(segments=SHORT), "(segments): of 99 entries, got 100"),
    (
        lambda: quantized_100(block=512, segments=ops.segments_for("int8", 32, [[100]])),
        "(segments): made for blocks that divide 256, got 512",
    ),
    (lambda: quantized_100(residual=ONES(99)), "residual): 100 ent"),
    (
        lambda: quantized_100(format="dithered_int8"),
        "quantize(random): dithered_int8 needs the bits",
    ),
    (
        lambda: quantized_100(format="dithered_int8", random=BITS, rank=3, ranks=3),
        "quantize(rank): 0 to 2, got 3",
    ),
    (
        lambda: quantized_100(random=RandomBits(1, STEP.to("meta"))),
        "device of the data, cpu, got meta",
    ),
    (lambda: decoded_100(payloads=packed), "shape (1 or more, 1, 208)"),
    (
        lambda: decoded_100(format="dithered_int8"),
        "dequantize(random): dithered_int8 needs the bits",
    ),
    (lambda: decoded_100(random=BITS), "dequantize(random): has to be None, as int8 is"),
    (lambda: RandomBits(1, STEP, first=3), "multiple of 256"),
    (
        lambda: ops.quantize_affine(ONES(9), octets(9), ONES(3), octets(9), 4),
        "affine(zero): 3 entries, got 9",
    ),
    (
        lambda: ops.dequantize_affine(octets(9), ONES(3), octets(9), 0, ONES(9)),
        "dequantize_affine(block): 1 or more, got 0",
    ),
    (lambda: finite_op(ONES(3), ONES(2).bool()), "all_finite(answer): 1 entries, got 2"),
    (lambda: turned(block=48), "(block): one of 32"),
    (lambda: turned(accumulate=True), "(accumulate): the inverse"),
    (lambda: turned(x=ONES(100)), "(x): a multiple of 64"),
    (lambda: turned(out=ONES(64)), "(out): 128 entries"),
    (lambda: turned(segments=ops.segments_for("int8", 64, [[128]])), "(segments): of segments_for"),
    (lambda: turned(random=RandomBits(1, STEP, first=256)), "multiple of 4096"),
    (lambda: leveled(block=64), "quantize_levels(block): one of"),
    (lambda: leveled(levels=ONES(3)), "quantize_levels(levels): 2, 4, 8 or 16, got 3"),
    (lambda: leveled(shard=200), "quantize_levels(shard): a multiple of the block, 128"),
    (
        lambda: ops.dequantize_levels(octets(1, 48), ONES(4), ONES(256), 128),
        "dequantize_levels(payloads): 80 bytes for 256 entries",
    ),
    (lambda: multiplied(x=ONES(100)), "(x): 663 entries or more, got 100"),
    (lambda: multiplied(right=ONES(4)), "(right): 78 entries, got 4"),
    (lambda: multiplied(residual=ONES(MATRICES.end)), "(total): needed with a residual"),
    (lambda: multiplied(local_copy=ONES(3)), "(local_copy): 54 entries, got 3"),
    (lambda: subtracted(unsent=ONES(3)), "low_rank(unsent): 663 entries, got 3"),
    (lambda: subtracted(unsent=ONES(2 * MATRICES.end)[::2]), "low_rank(unsent)"),
    (lambda: subtracted(tail=(None, ONES(3))), "low_rank(tail): a table is needed"),
    (lambda: ops.tail_table([(3, 5), (4, 6)]), "increasing, without overlap"),
    (lambda: tailed(x=ONES(50), tail=(TAIL, ONES(40))), "113 entries or"),
    (lambda: tailed(tail=(TAIL, ONES(39))), "tail): 40 ent"),
    (lambda: tailed(tail=(TAIL.flip(0), ONES(40))), "as tail_table makes it"),
    (
        lambda: multiply_right_op(*CALLS["multiply_right"]()[:7], TAIL, None),
        "a table and a tensor, or neither",
    ),
    (lambda: gathered(values=ONES(4)), "(values): at most 3"),
    (lambda: gathered(residual=ONES(3)), "(unsent): needed"),
    (lambda: gathered(random=RandomBits(1, STEP, first=256)), "(random): first is 0"),
    (lambda: ops.scatter_random(ONES(5), ONES(4), BITS), "(values): at most 4"),
    (lambda: ops.restore([(ONES(3), ONES(2))], GOOD), "restore(old): 3 entries, got 2"),
    (
        lambda: ops.restore([(ONES(3), ONES(3)), (ONES(3), ONES(2))], GOOD),
        "restore(old): 3 entries, got 2",
    ),
    (lambda: ops.restore([(LEFT, LEFT)], GOOD), "restore(values, old): have to share no memory"),
    (lambda: rotated(format="e4m3"), "(format): one of int8, int4, int2, sign, got 'e4m3'"),
    (lambda: rotated(block=2048), "(block): 1024 at most"),
    (
        lambda: rotated(segments=ops.segments_for("int8", 256, [[512]])),
        "of segments_for(..., whole=True)",
    ),
    (lambda: rotated(rotation=RandomBits(1, STEP, first=256)), "multiple of 4096"),
    (lambda: rotated(payload=octets(3)), "see payload_bytes"),
    (lambda: scaled_cast(ONES(3), 1.0, ONES(2)), "(out): 3 entries"),
    (
        lambda: ops.largest_magnitudes(ONES(9), ONES(1).int(), 4),
        "largest_magnitudes(block): a multiple of 256, got 4",
    ),
    (
        lambda: ops.quantize_shared(ONES(9), ONES(1).int(), octets(9).char(), 256, 128),
        "quantize_shared(levels): 1 to 127, got 128",
    ),
    (
        lambda: ops.dequantize_shared(octets(9).char(), ONES(2).int(), ONES(9), 256, 127),
        "dequantize_shared(magnitudes): 1 entries, got 2",
    ),
    (
        lambda: ops.pack_votes(ONES(40), octets(2, 16), shard=21),
        "pack_votes(shard): a multiple of 8, 40 entries in 2",
    ),
    (
        lambda: ops.pack_votes(ONES(40), octets(2, 16), shard=128),
        "pack_votes(payload): 32 bytes for 128 entries",
    ),
    (lambda: ops.count_votes(octets(16), ONES(40), 1.0), "count_votes(payloads): shape"),
    (lambda: taken(k=11), "top_k(k): 0 to 10, got 11"),
    (
        lambda: taken(values=ONES(1)),
        "top_k(values): 2 entries, and fewer than 256 of padding, got 1",
    ),
    (lambda: taken(residual=ONES(10)), "top_k(unsent): needed"),
    (lambda: taken(x=(x := ONES(10)), cleared=x), "(cleared): needs unsent"),
    (lambda: normed(block=33), "quantize_norms(block): int8 takes one of"),
    (lambda: normed(levels=0), "quantize_norms(levels): 1 to 127, got 0"),
    (lambda: normed(payload=octets(47)), "quantize_norms(payload): 288 entries, got 47"),
    (
        lambda: ops.quantize_parts(ONES(9), octets(48), (8,)),
        "quantize_parts(x): 8 entries, got 9",
    ),
    (
        lambda: ops.dequantize_parts(octets(47), ONES(9), (9,)),
        "dequantize_parts(payloads): 48 entries, got 47",
    ),
    (
        lambda: squared_norms_op(ONES(9), ONES(1).double(), PARTS),
        "squared_norms(table): a table as Parts makes it",
    ),
]


@pytest.mark.parametrize(("call", "words"), WRONG_TYPES, ids=[words for _, words in WRONG_TYPES])
def test_a_wrong_type_is_named(call, words):
    with pytest.raises(TypeError, match=re.escape(words)):
        call()


@pytest.mark.parametrize(("call", "words"), WRONG_VALUES, ids=[words for _, words in WRONG_VALUES])
def test_a_wrong_value_is_named(call, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        call()


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
