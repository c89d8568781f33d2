"""One right call of every op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from commhooks.kernels import Matrices, Tiles, tail_table
from commhooks.kernels.blockwise import payload_bytes, quantize, segments_for
from commhooks.kernels.fingerprint import Pieces
from commhooks.kernels.parts import Parts

__all__ = ["CALLS", "quantized"]


def quantized(x: torch.Tensor) -> torch.Tensor:
    payload = torch.empty(payload_bytes(x.numel(), "int8", 256), dtype=torch.uint8)
    quantize(x, payload, "int8", 256)
    return payload


STEP = torch.tensor(3)
ONE = segments_for("int8", 256, [[600]]).table
WHOLE = segments_for("int8", 256, [[512]], whole=True).table
TAIL = tail_table([(3, 30), (100, 113)])
MATRICES = Matrices([(0, 20, 30, 2), (600, 7, 9, 2)])
PARTS = Parts([600, 20])
PIECES = Pieces([600, 20])
TILES = Tiles([(1, 600), (70, 80)])
BUCKET = MATRICES.table[-1, 0]


def low_rank_factors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(MATRICES.left_numel), torch.randn(MATRICES.right_numel)


CALLS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "add_momentum": lambda: (
        *(torch.randn(600), torch.randn(600), 0.9, torch.zeros(600), torch.zeros(600)),
    ),
    "multiply_right": lambda: (
        *(torch.randn(BUCKET), torch.randn(BUCKET), torch.zeros(BUCKET), MATRICES.table),
        *(*low_rank_factors()[::-1], low_rank_factors()[0], TAIL, torch.zeros(40)),
    ),
    "multiply_left": lambda: (
        *(torch.randn(BUCKET), torch.randn(BUCKET), torch.zeros(BUCKET), MATRICES.table),
        *(*low_rank_factors(), low_rank_factors()[1], TAIL, torch.zeros(40)),
    ),
    "expand": lambda: (
        *(*low_rank_factors(), MATRICES.table, torch.zeros(BUCKET), torch.tensor(True)),
        *(TAIL, torch.randn(40)),
    ),
    "subtract_low_rank": lambda: (
        *(torch.randn(BUCKET), MATRICES.table, *low_rank_factors(), torch.zeros(BUCKET)),
        *(TAIL, torch.randn(40)),
    ),
    "orthonormalize": lambda: (low_rank_factors()[0], low_rank_factors()[0], MATRICES.table),
    "unit_rows": lambda: (*(low_rank_factors()[1] for _ in range(3)), MATRICES.table),
    "quantize": lambda: (
        *(torch.randn(600), torch.zeros(payload_bytes(600, "int8", 256), dtype=torch.uint8)),
        *("int8", 256, ONE, -1, torch.randn(600), torch.zeros(600), STEP, 1, 0, 0, 0, 1),
    ),
    "quantize_parts": lambda: (torch.randn(620), torch.zeros(672).byte(), PARTS.table),
    "dequantize_parts": lambda: (torch.zeros(672).byte(), torch.zeros(620), PARTS.table),
    "squared_norms": lambda: (torch.randn(620), torch.zeros(2, dtype=torch.float64), PARTS.table),
    "fingerprint": lambda: (
        *(torch.randn(620), torch.randn(500), torch.randn(620), torch.randn(620), PIECES.table),
        *(70, 2.0, True, 3, torch.zeros(5, 2, dtype=torch.float64), torch.zeros(3, 84)),
    ),
    "hash_parts": lambda: (
        *(torch.zeros(620, dtype=torch.int32), PARTS.table, 0),
        torch.zeros(2, dtype=torch.int64),
    ),
    "pack_votes": lambda: (torch.randn(60), torch.zeros(4, 16).byte(), 16),
    "count_votes": lambda: (torch.zeros(3, 4, 16).byte(), torch.zeros(60), 1.0, 16),
    "quantize_norms": lambda: (
        *(torch.randn(600), torch.zeros(784, dtype=torch.uint8), 256, 127, STEP, 1, 0, 0),
    ),
    "dequantize": lambda: (
        *(quantized(torch.randn(600))[None], torch.zeros(600), "int8", 256, ONE, -1, 0.5, True),
        *(None, 0, 0, 0),
    ),
    "quantize_rotated": lambda: (
        *(torch.randn(512), torch.zeros(payload_bytes(512, "int8", 256), dtype=torch.uint8)),
        *("int8", 256, WHOLE, -1, STEP, 1, 0, 0, torch.randn(512), torch.zeros(512), STEP, 1, 1, 0),
    ),
    "dequantize_rotated": lambda: (
        *(quantized(torch.randn(512))[None], torch.zeros(512), "int8", 256, WHOLE, -1, 0.5, True),
        *(STEP, 1, 0, 0),
    ),
    "top_k": lambda: (
        *(torch.randn(600), 6, torch.zeros(6, dtype=torch.int32), torch.zeros(6)),
        *(torch.randn(600), torch.zeros(600), torch.zeros(600)),
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
        *(torch.randn(256), torch.tensor([-1.0, 1.0, 0.0]), torch.zeros(2, 32).byte()),
        *(torch.zeros(256), 128, 128),
    ),
    "dequantize_levels": lambda: (
        *(torch.zeros(3, 2, 32).byte(), torch.tensor([-1.0, 1.0, 0.0])),
        *(torch.zeros(256), 128, 128, 0.5),
    ),
    "top_k_sampled": lambda: (
        *(torch.randn(600), 6, torch.zeros(6, dtype=torch.int32), torch.zeros(6)),
        *(torch.randn(600), torch.zeros(600), torch.zeros(600)),
    ),
    "finite": lambda: (torch.randn(600), torch.ones((), dtype=torch.bool)),
    "restore": lambda: (
        *(torch.randn(600), torch.randn(600), torch.zeros((), dtype=torch.bool)),
        *(torch.randn(7), torch.randn(7), torch.randn(70), torch.randn(70), None, None),
    ),
    "scatter_sum": lambda: (
        *(torch.arange(6, dtype=torch.int32)[None], torch.randn(1, 6), torch.zeros(600), 0.5),
        torch.tensor(True),
    ),
    "hadamard": lambda: (
        *(torch.randn(256), torch.zeros(256), 64, True, STEP, 1, 0, 0, None, -1, True),
    ),
    "gather_random": lambda: (
        *(torch.randn(600), torch.zeros(6), torch.randn(600), torch.zeros(600), STEP, 1, 0),
    ),
    "scatter_random": lambda: (
        *(torch.randn(6), torch.zeros(600), 0.5, torch.tensor(True), STEP, 1, 0),
    ),
    "encode_cosines": lambda: (
        *(torch.randn(TILES.numel), torch.randn(TILES.numel), 0.9, TILES.table, 8),
        *(torch.zeros(TILES.numel), torch.zeros(2, TILES.count, 8, dtype=torch.int16)),
    ),
    "decode_cosines": lambda: (
        *(torch.zeros(3, 2, TILES.count, 8, dtype=torch.int16), TILES.table, True),
        torch.zeros(TILES.numel),
    ),
    "cast": lambda: (torch.randn(600), torch.zeros(600).half(), 0.5, STEP, 1, 0, 0),
    "requantize": lambda: (
        *(quantized(torch.randn(600))[None], quantized(torch.randn(600)), "int8", 256, ONE, 0),
        *(0.5, torch.zeros(600), 2.0, True, None, 0, 0, 0, None, 0, 0, 0),
    ),
}
