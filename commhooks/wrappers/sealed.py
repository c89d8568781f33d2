"""Defines ``Sealed``, which adds checksums to payloads."""

from __future__ import annotations

import struct
from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from commhooks.core.bucket import Bucket, Result, SchemeExchange
from commhooks.core.bytes import as_bytes, crc32
from commhooks.core.scheme import Scheme
from commhooks.errors import PayloadError
from commhooks.wrappers.base import Wrapper
from ddp_core import AllGather, AllToAll, Collective

__all__ = ["Sealed"]

_VERSION = 1
_SEAL = struct.Struct("<IHHQ")  # CRC-32, version, 0, length of the payload


@dataclass(frozen=True)
class Sealed(Wrapper):
    """Adds a checksum to payloads of all-gather and all-to-all, and checks those that arrive.

    For machines whose memory or network is in doubt: a payload that was changed on the way raises
    :class:`PayloadError`, which names the rank that sent it, and training stops. All-reduces are
    not checked. On a GPU, payloads are copied to the host for their checksums.

    Args:
        scheme: the scheme whose payloads are checked.

    Example:
        >>> hook = register(ddp_model, Sealed(make("int8")))
    """

    scheme: Scheme

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        inner = self.scheme.exchange(bucket)
        try:
            request = next(inner)
            while True:
                try:
                    arrived = yield from self._sent(request, bucket.world_size)
                except PayloadError:
                    raise
                except Exception as error:  # a collective failed: the scheme may handle it
                    request = inner.throw(error)
                    continue
                request = inner.send(arrived)
        except StopIteration as stop:
            result: Result = stop.value
            return result

    def _sent(self, request: Collective, world_size: int) -> Generator[Collective, Tensor, Tensor]:
        if not isinstance(request, (AllGather, AllToAll)) or not request.tensor.numel():
            return (yield request)  # a sum of checksums is not the checksum of a sum
        tensor = request.tensor
        by_rank = isinstance(request, AllToAll)
        rows = as_bytes(tensor).view(len(tensor) if by_rank else 1, -1)
        # One seal per receiver: each rank gets another row of an all-to-all.
        sealed = torch.stack([_seal(row) for row in rows])
        arrived = yield request.like(sealed if by_rank else sealed[0])
        ranks = request.ranks or range(world_size)
        opened = [_opened(row, rank) for row, rank in zip(arrived, ranks, strict=True)]
        shape = tensor.shape if by_rank else (len(opened), *tensor.shape)
        return torch.stack(opened).view(tensor.dtype).view(shape)


def _seal(row: Tensor) -> Tensor:
    crc = crc32(row.cpu())
    seal = torch.frombuffer(bytearray(_SEAL.pack(crc, _VERSION, 0, row.numel())), dtype=torch.uint8)
    return torch.cat([seal.to(row.device), row])


def _opened(row: Tensor, rank: int) -> Tensor:
    body = row[_SEAL.size :]
    crc, version, _, length = _SEAL.unpack(bytes(row[: _SEAL.size].tolist()))
    if version != _VERSION or length != body.numel() or crc != crc32(body.cpu()):
        raise PayloadError(
            f"Sealed: the payload that came from rank {rank} was changed on the way; look at "
            f"that machine's memory and network"
        )
    return body.clone()
