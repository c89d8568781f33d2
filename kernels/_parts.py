"""Describes the parts of a flat tensor, such as the parameters of a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from ._blockwise_formats import FORMATS, Payload
from ._matrices import _version_of

__all__ = ["BLOCK", "CHUNK", "Parts", "part_bytes", "parts_of"]

BLOCK = 256  # entries per scale of a part's payload
CHUNK = 2048  # entries of a part whose squares a warp adds


def part_bytes(n: int) -> int:
    """Returns the number of bytes of the payload of a part of ``n`` entries."""
    return Payload.of(FORMATS["int8"], BLOCK, n).bytes


class Parts:
    """Lists where parts begin, of which each has as many entries as ``sizes`` says.

    Attributes:
        sizes: number of entries of each part.
        table: int64, a row per part and a last one with the ends: first entry, and what kernels
            count before the part: blocks, chunks and bytes of payloads.

    Example:
        >>> Parts([300, 20]).table[:, 0].tolist()
        [0, 300, 320]
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
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

    @property
    def numel(self) -> int:
        return sum(self.sizes)


@lru_cache(maxsize=4096)  # one per bucket, which schemes ask for in every step
def parts_of_sizes(sizes: tuple[int, ...]) -> Parts:
    """Returns the parts of these sizes, the same object every time."""
    return Parts(sizes)


def parts_of(caller: str, table: Tensor) -> Parts:
    """Returns the parts of a table; raises ValueError unless ``Parts`` can make that table.

    Kernels trust the table for every address, and an op may be called with any tensor.
    """
    good = table.is_cpu and table.dtype == torch.int64 and table.dim() == 2
    parts = _read(table, _version_of(table)) if good else None
    if parts is None:
        raise ValueError(
            f"{caller}(table): a table as Parts makes it, on the CPU, "
            f"got {table.dtype} of shape {tuple(table.shape)} on {table.device}"
        )
    return parts


@lru_cache(maxsize=4096)  # by the tensor and the number of writes to it
def _read(table: Tensor, version: int) -> Parts | None:
    if not len(table) or table.shape[1] != 4 or not table.is_contiguous():
        return None
    try:
        parts = Parts(table[:, 0].diff().tolist())
    except ValueError:
        return None
    return parts if torch.equal(parts.table, table) else None
