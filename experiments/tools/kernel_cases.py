"""Lists the calls of ops that ``cpu_kernels`` and ``gpu_kernels`` time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from commhooks.kernels import (
    blockwise,
    cast,
    levels,
    low_rank,
    philox,
    random_k,
    rotated,
    scatter,
    shared,
    sparse,
)
from commhooks.kernels._blockwise import FORMATS, one_segment, payload_bytes
from commhooks.kernels.dct import Tiles, decode_cosines_op, encode_cosines_op
from commhooks.kernels.fingerprint import ROWS, fingerprint_op, hash_parts_op, pieces_of_sizes
from commhooks.kernels.finite import finite_op
from commhooks.kernels.hadamard import hadamard_op
from commhooks.kernels.parts import parts_of_sizes
from commhooks.kernels.runtime import op as _op

__all__ = ["COPIED", "Case", "cases"]

# Bytes per entry of a case: 4 for each float32 tensor that is read or written, the size of the
# codes, and 4 per block for scales (0.016 for a block of 256). A copy reads and writes 4.
COPIED = 8.0
Rivals = dict[str, Callable[[], object]]
PAYLOADS = {"cpu": 4, "cuda": 8}  # number of payloads that "decode + sum" sums


@dataclass(frozen=True)
class Case:
    """Describes one op with one set of arguments.

    Attributes:
        name: name in the table.
        bytes: bytes per entry that the op has to move.
        goal: share of the bandwidth of a copy that a GPU should reach.
        op: the op.
        args: its arguments.
        rivals: by name, calls of installed packages that do the same, or less.
    """

    name: str
    bytes: float
    goal: float
    op: _op.Op
    args: tuple[Any, ...]
    rivals: Rivals = field(default_factory=dict)

    def run(self) -> None:
        """Calls the op, which chooses its implementation."""
        self.op(*self.args)

    def define(self) -> None:
        """Calls the definition of the op."""
        self.op.definition(*self.args)


def cases(x: Tensor, block: int = 1024) -> list[Case]:
    """Returns all ops on a bucket ``x`` of float32; allocates their other arguments."""
    out = torch.empty_like(x)
    residual = torch.randn_like(x) * 0.1
    noise = (torch.tensor(1, device=x.device), 1, 0, 0)  # a stream of random bits: stochastic
    listed = [
        case
        for format in ("int8", "dithered_int8", "int4", "e4m3", "sign")
        for case in _blockwise(x, out, residual, format, block, noise)
    ]
    for narrow in (torch.bfloat16, torch.float16):
        small = torch.empty_like(x, dtype=narrow)
        name = str(narrow).removeprefix("torch.")
        nearest = (x, small, 1 / 3, *philox.NO_STREAM)
        copy = {"torch's copy, unscaled": lambda small=small: small.copy_(x)}
        listed += [
            Case(f"cast * 1/3, {name}", 6, 0.9, cast.cast_op, nearest, copy),
            Case(f"cast, {name}, stochastic", 6, 0.75, cast.cast_op, (x, small, 1.0, *noise)),
        ]
    whole = x.numel() // 1024 * 1024
    spread = (x[:whole], out[:whole], 1024, False, *noise, None, -1, False)
    listed.append(Case("Hadamard 1024", 8, 0.75, hadamard_op, spread))
    turned = torch.empty(payload_bytes(whole, "int4", 1024), dtype=torch.uint8, device=x.device)
    table = one_segment("int4", 1024, whole, whole=True).table
    turn = (x[:whole], turned, "int4", 1024, table, -1, *noise, None, None, *philox.NO_STREAM)
    listed.append(Case("Hadamard + int4 encode", 4.5, 0.75, rotated.quantize_rotated_op, turn))
    tiles = Tiles([(whole // 1024, 1024)])
    sent = torch.empty(2, tiles.count, 32, dtype=torch.int16, device=x.device)
    cosines = (x[:whole], residual[:whole], 0.999, tiles.table, 32, out[:whole], sent)
    _prepare(encode_cosines_op, *cosines)
    means = (sent[None], tiles.table, True, out[:whole])
    listed += [
        Case("cosines, 32 of 4096", 12.03, 0.5, encode_cosines_op, cosines),
        Case("cosines decode", 4.03, 0.5, decode_cosines_op, means),
    ]
    sums = torch.empty(-(-x.numel() // 256), dtype=torch.int32, device=x.device)
    _prepare(shared.magnitudes_op, x, residual, sums, 256)  # valid scales for what follows
    codes = torch.empty_like(x, dtype=torch.int8)
    fits = (x, residual, sums, codes, residual, 256, 63)
    listed += [
        Case("shared int8 scale", 8.02, 0.85, shared.magnitudes_op, (x, residual, sums, 256)),
        Case("shared int8, feedback", 13.02, 0.75, shared.quantize_shared_op, (*fits, *noise)),
        Case(
            "shared int8 decode",
            5.02,
            0.85,
            shared.dequantize_shared_op,
            (codes, sums, out, 256, 63, 1.0),
        ),
    ]
    several = levels._table(torch.linspace(-2.0, 2.0, 4, device=x.device))
    size = levels.level_bytes(whole, 2, 1024)
    spots = torch.empty(size, dtype=torch.uint8, device=x.device)
    nearest4 = (x[:whole], several, spots, None, 1024, whole)
    back = (spots[None], several, out[:whole], 1024, whole, 1.0)
    listed += [
        Case("nearest of 4 levels", 4.25, 0.6, levels.quantize_levels_op, nearest4),
        Case("4 levels decode", 4.25, 0.6, levels.dequantize_levels_op, back),
    ]
    k = x.numel() // 100
    taken = (torch.empty(k, dtype=torch.int32, device=x.device), torch.empty(k, device=x.device))
    drawn = (taken[1], residual, residual, *noise[:3])
    listed.append(Case("random 1 %, feedback", 12.04, 0.6, random_k.gather_random_op, (x, *drawn)))
    topk = {"torch.topk": lambda: x.abs().topk(k)}
    listed += [
        Case("top-k 1 %", 4.08, 0.6, sparse.top_k_op, (x, k, *taken, None, None, None), topk),
        Case(
            "top-k 1 %, feedback",
            12.08,
            0.6,
            sparse.top_k_op,
            (x, k, *taken, residual, residual, None),
            topk,
        ),
        Case(
            "top-k 1 %, sampled",
            8.04,
            0.6,
            sparse.top_k_sampled_op,
            (x, k, *taken, None, None, None),
        ),
    ]
    finite = torch.ones((), dtype=torch.bool, device=x.device)
    places = torch.arange(k, dtype=torch.int32, device=x.device) * (x.numel() // max(k, 1))
    payloads = (places.expand(8, k).contiguous(), torch.randn(8, k, device=x.device))
    added = (*payloads, out, 0.125, finite)
    listed.append(Case("sum of 8 top-k payloads", 4.64, 0.6, scatter.scatter_sum_op, added))
    aminmax = {"torch.aminmax": lambda: torch.aminmax(x)}
    listed.append(Case("all finite", 4, 0.85, finite_op, (x, finite), aminmax))
    return [*listed, *_fingerprints(x, out, residual), *_power_sgd(x, out, residual)]


def _fingerprints(x: Tensor, out: Tensor, residual: Tensor) -> list[Case]:
    """Returns the ops of verification."""
    pieces = pieces_of_sizes((x.numel(),))
    rows = torch.empty(len(ROWS), 1, dtype=torch.float64, device=x.device)
    listed = []
    for name, nbytes, kept in (
        ("fingerprint", 8, (None, None)),
        ("fingerprint, feedback", 16, (residual, residual)),
    ):
        keeps = kept[0] is not None
        sketches = x.new_empty(2 + keeps, pieces.width)
        args = (x, out, *kept, pieces.table, 0, 1.0, keeps, 1, rows, sketches)
        listed.append(Case(name, nbytes, 0.5, fingerprint_op, args))
    hashes = torch.zeros(1, dtype=torch.int64, device=x.device)
    words = (x.view(torch.int32), parts_of_sizes((x.numel(),)).table, 0, hashes)
    return [*listed, Case("hash", 4, 0.8, hash_parts_op, words)]


def _prepare(op: _op.Op, *args: Any) -> None:
    """Computes arguments by an op's definition: a kernel that fails does so where it is timed."""
    op.definition(*args)


def _power_sgd(x: Tensor, out: Tensor, residual: Tensor, rank: int = 4) -> list[Case]:
    """Returns PowerSGD's ops on matrices that fill the bucket, and the products of torch's hook."""
    # A matrix with an uneven ratio of its sides, as layers have; both are multiples of 32.
    rows, columns = 512, 2304
    count = max(1, x.numel() // (rows * columns))
    each = [(i * rows * columns, rows, columns, rank) for i in range(count)]
    matrices = low_rank.Matrices(each)
    left = torch.randn(matrices.left_numel, device=x.device)
    right = torch.randn(matrices.right_numel, device=x.device)
    views = [flat[: count * rows * columns].view(count, rows, columns) for flat in (x, out)]
    p, q = (torch.randn(count, length, rank, device=x.device) for length in (rows, columns))
    table, factors = matrices.table, (left, right)
    # Without a tail: every entry is in a matrix.
    corrected = (out, residual, out, table, right, left, None, None, None)
    return [
        Case("PowerSGD 4, (g + e) Q", 12, 0.7, low_rank.multiply_right_op, corrected),
        Case(
            *("PowerSGD 4, g Q", 4, 0.7, low_rank.multiply_right_op),
            (x, None, None, table, right, left, None, None, None),
            {"torch's hook": lambda: torch.bmm(views[0], q, out=p)},
        ),
        Case(
            *("PowerSGD 4, g^T P", 4, 0.7, low_rank.multiply_left_op),
            (x, None, None, table, *factors, None, None, None),
            {"torch's hook": lambda: torch.bmm(views[0].mT, p, out=q)},
        ),
        Case(
            *("PowerSGD 4, decode", 4, 0.7, low_rank.expand_op),
            (*factors, table, out, None, None, None),
            {"torch's hook": lambda: torch.bmm(p, q.mT, out=views[1])},
        ),
        Case(
            *("PowerSGD 4, residual", 8, 0.7, low_rank.subtract_op),
            (out, table, *factors, residual, None, None),
        ),
    ]


def _rivals(format: str, x: Tensor, block: int) -> tuple[Rivals, Rivals]:
    """Returns calls of bitsandbytes and torchao that encode, and that decode, a format."""
    encode: Rivals = {}
    decode: Rivals = {}
    rows = x[: x.numel() // block * block].view(-1, block)
    if format == "int8":
        with suppress(ImportError):
            import bitsandbytes.functional as bits

            codes, state = bits.quantize_blockwise(rows, blocksize=block)
            encode["bitsandbytes"] = lambda: bits.quantize_blockwise(rows, blocksize=block)
            decode["bitsandbytes"] = lambda: bits.dequantize_blockwise(codes, state)
        with suppress(ImportError):
            from torchao.quantization import quant_primitives as ao

            kind, shape = ao.MappingType.SYMMETRIC, (1, block)

            def affine() -> tuple[Tensor, Tensor, Tensor]:
                scale, zero = ao.choose_qparams_affine(rows, kind, shape, torch.int8, eps=1e-30)
                return ao.quantize_affine(rows, shape, scale, zero, torch.int8), scale, zero

            levels, scale, zero = affine()
            encode["torchao"] = affine
            decode["torchao"] = lambda: ao.dequantize_affine(levels, shape, scale, zero, torch.int8)
    if format == "int4":
        with suppress(ImportError):
            import bitsandbytes.functional as bits

            packed, about = bits.quantize_4bit(rows, blocksize=block, quant_type="fp4")
            encode["bitsandbytes, fp4"] = lambda: bits.quantize_4bit(
                rows, blocksize=block, quant_type="fp4"
            )
            decode["bitsandbytes, fp4"] = lambda: bits.dequantize_4bit(packed, about)
    if format == "e4m3":
        with suppress(ImportError):
            from torchao.prototype.mx_formats.mx_tensor import to_mx

            encode["torchao, MX"] = lambda: to_mx(rows, torch.float8_e4m3fn, 32)
    return encode, decode


def _blockwise(
    x: Tensor, out: Tensor, residual: Tensor, format: str, block: int, noise: tuple[Any, ...]
) -> list[Case]:
    size = payload_bytes(x.numel(), format, block)
    code = size / x.numel()
    payload = torch.empty(size, dtype=torch.uint8, device=x.device)
    quantize = blockwise.quantize_op
    # What "decode" decodes.
    table = one_segment(format, block, x.numel()).table
    dithered = FORMATS[format].dithered
    key = noise if dithered else philox.NO_STREAM
    _prepare(quantize, x, payload, format, block, table, -1, None, None, *key, 0, 1)
    count = PAYLOADS[x.device.type]
    several = payload.repeat(count, 1)
    encode = (x, payload, format, block, table, -1)
    decode = (format, block, table, -1, 1.0, False, *key)
    feedback = (*encode, residual, residual, *key, 0, 1)
    others = _rivals(format, x, block)
    plain = (*encode, None, None, *key, 0, 1)
    listed = [
        Case(f"{format} encode", 4 + code, 0.85, quantize, plain, others[0]),
        Case(f"{format} encode, feedback", 12 + code, 0.85, quantize, feedback),
        Case(
            f"{format} decode",
            4 + code,
            0.85,
            blockwise.dequantize_op,
            (payload[None], out, *decode),
            others[1],
        ),
        Case(
            f"{format} decode + sum of {count}",
            4 + count * code,
            0.85,
            blockwise.dequantize_op,
            (several, out, *decode),
        ),
    ]
    if format != "sign" and not dithered:
        args = (*encode, None, None, *noise, 0, 1)
        listed.append(Case(f"{format} encode, stochastic", 4 + code, 0.75, quantize, args))
    return listed
