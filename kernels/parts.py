"""Works on all parameters of a bucket at once: 8-bit payloads and squared norms of each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import _blockwise_definition as definition
from ._blockwise import FORMATS, Payload
from ._tables import on_device, once_per_table
from .blockwise import aligned
from .levels import summed
from .runtime import cpu, cuda
from .runtime.op import FLOATS, Entries, Rule, op

__all__ = [
    "BLOCK",
    "CHUNK",
    "Parts",
    "dequantize_parts",
    "part_bytes",
    "parts_of",
    "quantize_parts",
    "squared_norms",
]


BLOCK = 256  # entries per scale of a part's payload
CHUNK = 2048  # entries of a part whose squares a warp adds


def part_bytes(n: int) -> int:
    """Returns the number of bytes of the payload of a part of ``n`` entries."""
    return Payload.of(FORMATS["int8"], BLOCK, n).bytes


class Parts:
    """Lists where parts begin and, in ``sizes``, how many entries each has.

    Attributes:
        sizes: number of entries of each part.
        count: number of parts.
        numel, blocks, chunks, nbytes: what all parts have together; bytes are those of payloads.
        table: int64, a row per part and a last one with the ends: first entry, and what kernels
            count before the part: blocks, chunks and bytes of payloads.

    Example:
        >>> Parts([300, 20]).table[:, 0].tolist()
        [0, 300, 320]
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.count = len(self.sizes)
        if min(self.sizes, default=0) < 0 or sum(self.sizes) > 2**56:
            raise ValueError(f"Parts(sizes): 0 to 2^56, got {self.sizes}")
        columns = [
            self.sizes,
            [-(-n // BLOCK) for n in self.sizes],
            [-(-n // CHUNK) for n in self.sizes],
            [part_bytes(n) for n in self.sizes],
        ]
        ends = [list(accumulate(column, initial=0)) for column in columns]
        self.table = torch.tensor(ends, dtype=torch.int64, device="cpu").T.contiguous()
        self.numel, self.blocks, self.chunks, self.nbytes = (column[-1] for column in ends)


@lru_cache(maxsize=4096)  # one per bucket, which schemes ask for in every step
def parts_of_sizes(sizes: tuple[int, ...]) -> Parts:
    """Returns the parts of these sizes, the same object every time."""
    return Parts(sizes)


@once_per_table
def parts_of(table: Tensor, caller: str) -> Parts:
    """Returns the parts of a table; raises ValueError unless ``Parts`` can make that table.

    Kernels trust the table for every address, and an op may be called with any tensor.
    """
    good = table.is_cpu and table.dtype == torch.int64 and table.dim() == 2
    parts = _read(table) if good else None
    if parts is None:
        raise ValueError(
            f"{caller}(table): a table as Parts makes it, on the CPU, "
            f"got {table.dtype} of shape {tuple(table.shape)} on {table.device}"
        )
    return parts


def _read(table: Tensor) -> Parts | None:
    if not len(table) or table.shape[1] != 4 or not table.is_contiguous():
        return None
    try:
        parts = Parts(table[:, 0].diff().tolist())
    except ValueError:
        return None
    return parts if torch.equal(parts.table, table) else None


# ---- ops


_THREADS = 256  # of a block, which adds the squares of a part's chunks


def quantize_parts(x: Tensor, payloads: Tensor, sizes: tuple[int, ...]) -> None:
    """Writes each part of ``x`` as ``quantize(part, payload, "int8", 256)`` does, without noise.

    Args:
        x: float32, contiguous.
        payloads: uint8, one payload after the other.
        sizes: entries of each part.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, size or device; the message names it.
    """
    quantize_parts_op(x, payloads, parts_of_sizes(sizes).table)


def dequantize_parts(payloads: Tensor, out: Tensor, sizes: tuple[int, ...]) -> None:
    """Writes the values that :func:`quantize_parts` encoded to ``out``, float32."""
    dequantize_parts_op(payloads, out, parts_of_sizes(sizes).table)


def squared_norms(x: Tensor, out: Tensor, sizes: tuple[int, ...]) -> None:
    """Writes the sum of squares of each part.

    Kernels equal the definition bit for bit. Squares of 2048 entries are added per place in rows of
    32, then halves to halves; sums of these per place in rows of 256, then halves to halves.

    Args:
        x: float32, float16, bfloat16 or float64, contiguous.
        out: float64, an entry per part.
        sizes: entries of each part.
    """
    squared_norms_op(x, out, parts_of_sizes(sizes).table)


_PARTS: dict[str, Rule] = {"table": parts_of, "payloads": Entries(torch.uint8, n="table.nbytes")}


@op(
    "quantize_parts(Tensor x, Tensor(a!) payloads, Tensor table) -> ()",
    takes={"x": Entries(torch.float32, n="table.numel"), **_PARTS},
)
def quantize_parts_op(x: Tensor, payloads: Tensor, table: Tensor) -> None:
    for part, payload in _pairs(x, payloads, parts_of(table, "quantize_parts")):
        layout = Payload.of(FORMATS["int8"], BLOCK, part.numel())
        definition.encode(part, payload, layout, None)


@op(
    "dequantize_parts(Tensor payloads, Tensor(a!) out, Tensor table) -> ()",
    takes={"out": Entries(torch.float32, n="table.numel"), **_PARTS},
)
def dequantize_parts_op(payloads: Tensor, out: Tensor, table: Tensor) -> None:
    for part, payload in _pairs(out, payloads, parts_of(table, "dequantize_parts")):
        layout = Payload.of(FORMATS["int8"], BLOCK, part.numel())
        part.copy_(definition.sum_payloads(payload[None], layout, part.numel()))


@op(
    "squared_norms(Tensor x, Tensor(a!) out, Tensor table) -> ()",
    takes={
        "table": parts_of,
        "x": Entries((*FLOATS, torch.float64), n="table.numel"),
        "out": Entries(torch.float64, n="table.count"),
    },
)
def squared_norms_op(x: Tensor, out: Tensor, table: Tensor) -> None:
    for index, part in enumerate(x.view(-1).split(parts_of(table, "squared_norms").sizes)):
        rows = pad(part.double(), (0, -part.numel() % CHUNK)).view(-1, CHUNK)
        chunks = summed(rows.square())
        chunks = pad(chunks, (0, -len(chunks) % _THREADS or (0 if len(chunks) else _THREADS)))
        out[index] = summed(chunks[None], _THREADS)[0]


def _pairs(x: Tensor, payloads: Tensor, parts: Parts) -> list[tuple[Tensor, Tensor]]:
    """Returns entries and payload of each part that has entries; views."""
    ends = parts.table[:, 3].tolist()
    views = zip(x.view(-1).split(parts.sizes), ends[:-1], ends[1:], strict=True)
    return [(part, payloads.view(-1)[begin:end]) for part, begin, end in views if part.numel()]


@squared_norms_op.beyond_kernels
def _is_double(x: Tensor, out: Tensor, table: Tensor) -> bool:
    return x.dtype == torch.float64


# Kernels --------------------------------------------------------------------------------------


@quantize_parts_op.kernel("cpu")
def _quantize_cpu(x: Tensor, payloads: Tensor, table: Tensor) -> None:
    cpu.call("quantize_parts", x, table, table.shape[0] - 1, payloads)


@dequantize_parts_op.kernel("cpu")
def _dequantize_cpu(payloads: Tensor, out: Tensor, table: Tensor) -> None:
    cpu.call("dequantize_parts", payloads, table, table.shape[0] - 1, out)


@squared_norms_op.kernel("cpu")
def _norms_cpu(x: Tensor, out: Tensor, table: Tensor) -> None:
    cpu.call("squared_norms", cpu.DTYPES[x.dtype], x, table, table.shape[0] - 1, out)


@quantize_parts_op.kernel("cuda")
def _quantize_cuda(x: Tensor, payloads: Tensor, table: Tensor) -> None:
    arguments = (x, on_device(table, x.device), table.shape[0] - 1, aligned(payloads))
    cuda.launch("parts.cu", "quantize_parts", x.device, parts_of(table, "").blocks, arguments)


@dequantize_parts_op.kernel("cuda")
def _dequantize_cuda(payloads: Tensor, out: Tensor, table: Tensor) -> None:
    arguments = (aligned(payloads), on_device(table, out.device), table.shape[0] - 1, out)
    cuda.launch("parts.cu", "dequantize_parts", out.device, parts_of(table, "").blocks, arguments)


@squared_norms_op.kernel("cuda")
def _norms_cuda(x: Tensor, out: Tensor, table: Tensor) -> None:
    t, count, chunks = cuda.DTYPES[x.dtype], table.shape[0] - 1, parts_of(table, "").chunks
    sums = torch.empty(chunks, dtype=torch.float64, device=x.device)
    places = on_device(table, x.device)
    for name, warps, arguments in (
        (f"squares<{t}>", chunks, (x, places, count, sums)),
        ("squared_norms", 8 * count, (sums, places, count, out)),
    ):
        cuda.launch("parts.cu", name, x.device, warps, arguments)
