"""Encodes gradients as messages with a header, and decodes any bytes safely.

Payloads between the ranks of a job have no header: all ranks know scheme, sizes and step. A payload
that is stored or sent elsewhere has a header of 64 bytes, little endian::

    0   4  "CHPK"
    4   2  version of the format, 4
    6   1  1 if there is a checksum
    7   1  0
    8   8  codec: BLAKE2b of its settings
    16  8  entries
    24  8  bytes of the payload
    32  8  step, which keys the codec's random draws
    40  8  seed of the draws
    48  4  CRC-32 of the header (with 0 here) and the payload, or 0
    52 12  0

``docs/design/wire.md`` describes the payloads. All sizes are known before anything is encoded.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from dataclasses import fields

import torch
from torch import Tensor

from commhooks.core.bucket import Bucket
from commhooks.core.bytes import crc32
from commhooks.core.layout import Layout
from commhooks.core.packed import PackedCodec, Piece, Randomness
from commhooks.core.scheme import Codec
from commhooks.core.settings import fitting
from commhooks.errors import PayloadError
from commhooks.wrappers.two_phase import TwoPhase

__all__ = ["HEADER_BYTES", "VERSION", "decode", "encode", "message_bytes"]

VERSION = 4
HEADER_BYTES = 64
_MAGIC = b"CHPK"
_MOST_PER_BYTE = 1 << 16  # entries per byte of payload; a header that claims more is refused
_NOTHING = torch.empty(0, dtype=torch.uint8)
_HEADER = struct.Struct("<4sHBx8sQQQQI12x")


def message_bytes(codec: PackedCodec | Codec, n: int) -> int:
    """Returns the bytes of a message of ``n`` entries.

    Example:
        >>> message_bytes(Blockwise("int8", 256), 1_000_000)
        1015760
    """
    return HEADER_BYTES + _packed(codec).payload_bytes(n)


def encode(
    codec: PackedCodec | Codec, x: Tensor, *, step: int = 0, seed: int = 0, checksum: bool = True
) -> Tensor:
    """Encodes ``x`` as a message: a uint8 tensor on the CPU of ``message_bytes(codec, x.numel())``.

    Args:
        codec: a packed codec, or one given by ``encode`` and ``decode``.
        x: flat, float32, float16 or bfloat16.
        step, seed: key the random draws. Messages that are averaged need different seeds: their
            errors are alike otherwise.
        checksum: lets ``decode`` detect changed bytes.

    Raises:
        TypeError: ``codec`` is not a codec, or ``step`` or ``seed`` is not a whole number.
        ValueError: ``step`` or ``seed`` is negative, or has more than 63 bits.

    Example:
        >>> message = encode(Blockwise("int4", 256), grad)
        >>> decode(Blockwise("int4", 256), message)
    """
    packed, n = _packed(codec), x.numel()
    step, seed = (
        fitting("encode", name, value, int) for name, value in (("step", step), ("seed", seed))
    )
    if not (0 <= step < 2**63 and 0 <= seed < 2**63):
        raise ValueError(f"encode(step=..., seed=...): 0 to 2**63 - 1, got {step} and {seed}")
    payload = torch.zeros(packed.payload_bytes(n), dtype=torch.uint8, device=x.device)
    if n:
        packed.pack(Piece(x.contiguous().view(-1)), payload, _draw(n, step, seed, x.device))
    body = payload.cpu()
    # The draws are keyed by step and seed, so a reader needs both to decode.
    values = (_MAGIC, VERSION, int(checksum), _name(packed), n, body.numel(), step, seed)
    crc = crc32(body, zlib.crc32(_HEADER.pack(*values, 0))) if checksum else 0
    header = torch.frombuffer(bytearray(_HEADER.pack(*values, crc)), dtype=torch.uint8)
    return torch.cat([header, body])


def decode(
    codec: PackedCodec | Codec, message: Tensor | bytes, *, device: torch.device | str = "cpu"
) -> Tensor:
    """Decodes a message into a flat float32 tensor.

    Args:
        codec: a codec with the settings of the one that encoded.
        message: any bytes.
        device: where to decode.

    Raises:
        PayloadError: the bytes are no message, too few or too many, of a newer version, of another
            codec, or changed.
    """
    # Fields are checked before they are used, in the order of their dependence: no memory is taken
    # for a number of entries before the payload's length makes it plausible.
    packed, data = _packed(codec), _as_tensor(message)
    if data.numel() < HEADER_BYTES:
        raise PayloadError(f"decode: a header is {HEADER_BYTES} bytes, got {data.numel()} in all")
    header = bytes(data[:HEADER_BYTES].tolist())
    magic, version, flags, name, n, length, step, seed, crc = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise PayloadError(f"decode: not a payload: begins with {header[:4]!r}, not {_MAGIC!r}")
    if version != VERSION:
        raise PayloadError(
            f"decode: version {version} of the format, this release reads version {VERSION}"
        )
    if flags not in (0, 1) or header[7] or any(header[52:]) or (crc and not flags):
        raise PayloadError("decode: reserved bits of the header are set; the message is damaged")
    if name != _name(packed):
        raise PayloadError(f"decode: the payload is of other settings than {packed}")
    body = data[HEADER_BYTES:]
    if length != body.numel() or not _takes(packed, n, length):
        raise PayloadError(
            f"decode: {body.numel()} bytes follow the header, which says {length} for {n} entries"
        )
    if flags and crc32(body, zlib.crc32(header[:48] + bytes(16))) != crc:
        raise PayloadError("decode: the checksum is wrong; the message was changed on the way")
    if step >= 2**63 or seed >= 2**63:  # without a checksum, any 64 bits come this far
        raise PayloadError("decode: step or seed is out of range; the message is damaged")
    try:
        out = torch.zeros(n, dtype=torch.float32, device=device)
    except (RuntimeError, MemoryError) as error:
        raise PayloadError(f"decode: there is no memory for {n} entries: {error}") from error
    if n:
        try:
            packed.unpack(body.to(device)[None], out, _draw(n, step, seed, out.device), 1.0)
        # A codec that is given by encode and decode may raise any of these on damaged bytes.
        except (ValueError, IndexError, RuntimeError) as error:
            raise PayloadError(f"decode: the payload does not decode: {error}") from error
    return out


def _as_tensor(message: object) -> Tensor:
    """Returns the bytes of a message, flat, on the CPU."""
    if isinstance(message, (bytes, bytearray, memoryview)):
        copied = bytearray(message)  # torch warns of memory that is read-only, as that of bytes
        return torch.frombuffer(copied, dtype=torch.uint8) if copied else _NOTHING
    if not isinstance(message, Tensor) or message.dtype != torch.uint8:
        kind = message.dtype if isinstance(message, Tensor) else type(message).__name__
        raise PayloadError(f"decode: a message is bytes (uint8), got {kind}")
    if message.layout != torch.strided or message.is_meta:
        raise PayloadError("decode: a message is a dense tensor, with values")
    return message.detach().cpu().reshape(-1)


def _takes(codec: PackedCodec, n: int, length: int) -> bool:
    """Whether the payload of ``n`` entries has ``length`` bytes; ``n`` may be any number."""
    if n > _MOST_PER_BYTE * max(16, length):
        return False
    # A TwoPhase finds the size by encoding n zeros, for which there may be no memory. No payload
    # shrinks as entries are added, so one of fewer entries that is too long already decides.
    fewer = 1024
    while isinstance(codec, TwoPhase) and fewer < n:
        if codec.payload_bytes(fewer) > length:
            return False
        fewer *= 2
    return codec.payload_bytes(n) == length


def _packed(codec: PackedCodec | Codec) -> PackedCodec:
    """Returns the codec as a packed one, which knows its number of bytes."""
    if isinstance(codec, Codec):
        return TwoPhase(codec)
    if not isinstance(codec, PackedCodec):
        raise TypeError(
            f"a codec is a PackedCodec or a Codec, got {type(codec).__name__}: other schemes send "
            f"several messages that make no sense apart"
        )
    return codec


def _draw(n: int, step: int, seed: int, device: torch.device) -> Randomness:
    """Returns the random streams of a message; they depend on step and seed alone."""
    empty = torch.empty(0, device=device)  # gives the device; a codec reads its piece
    bucket = Bucket(empty, Layout(["payload"], [(n,)]), step=step, seed=seed)
    return Randomness(bucket, "worker")


def _name(codec: PackedCodec) -> bytes:
    """Returns eight bytes that stand for the class and the settings of a codec."""
    names = [field.name for field in fields(codec)]  # type: ignore[arg-type]
    settings = {name: getattr(codec, name) for name in names}
    settings.pop("pattern", None)  # how payloads travel between ranks does not change them
    text = f"{type(codec).__name__}{sorted(settings.items())}"
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
