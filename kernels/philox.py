"""Counter-based random bits (Philox4x32-7; Salmon et al., "Parallel Random Numbers", 2011)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["SIGNS", "Stream", "centred", "half_words", "signs", "words"]

SIGNS = 4096  # entries that share 32 calls if each takes one bit

Device = torch.device | str
_GROUP, _LANES = 256, 32  # entries that share calls, calls
_MASK = 0xFFFFFFFF
_ROUNDS = 7  # as few as pass all of BigCrush, by the paper; 10 is the usual margin


@dataclass(frozen=True)
class Stream:
    """Random bits that depend on nothing but these numbers and an entry's place.

    Args:
        seed: the key; 64 bits.
        step: int64 tensor of one number, on the device of the data: a captured CUDA graph reads it
            anew at every replay.
        number: tells apart streams of one seed and step.
        first: global index of the first entry, a multiple of 256; slices of a bucket then get the
            bits that the whole bucket would get.
    """

    seed: int
    step: Tensor
    number: int = 0
    first: int = 0

    def __post_init__(self) -> None:
        if self.step.dtype != torch.int64 or self.step.numel() != 1:
            raise TypeError(
                f"Stream(step) is an int64 tensor of one number, "
                f"got {self.step.dtype} of shape {tuple(self.step.shape)}"
            )
        if self.first % _GROUP:
            raise ValueError(f"Stream(first) is a multiple of {_GROUP}, got {self.first}")

    def arguments(self, data: Tensor) -> tuple[Tensor, int, int, int]:
        """As ops on ``data`` take them: step, seed, stream, first."""
        if self.step.device != data.device:
            raise ValueError(
                f"Stream(step) lies on the device of the data, {data.device}, "
                f"got {self.step.device}"
            )
        return self.step, self.seed, self.number, self.first


NO_STREAM: tuple[None, int, int, int] = (None, 0, 0, 0)  # rounding to nearest


def half_words(
    n: int, step: int, seed: int, stream: int, first: int = 0, *, device: Device = "cpu"
) -> Tensor:
    """16 random bits for each of ``n`` entries, from global index ``first`` on, as int64.

    Of every 256 entries, entry i takes half-word (i // 32) % 8 of call i % 32, so that lanes of a
    CUDA warp and of a CPU vector find their bits where they compute them.
    """
    groups = range(first // _GROUP, -(-(first + n) // _GROUP))
    calls = _calls(groups, device)
    words = _philox(calls, step, seed, stream)  # (4, groups * 32)
    halves = torch.stack([words & 0xFFFF, words >> 16], 1)  # (4, 2, groups * 32)
    flat = halves.view(8, len(groups), _LANES).permute(1, 0, 2).reshape(-1)
    begin = first - groups.start * _GROUP
    return flat[begin : begin + n]


def words(n: int, step: int, seed: int, stream: int, *, device: Device = "cpu") -> Tensor:
    """32 random bits for each of ``n``, as int64: word (i // 32) % 4 of call i % 32 of 128."""
    calls = _calls(range(-(-n // 128)), device)
    return _philox(calls, step, seed, stream).view(4, -1, _LANES).permute(1, 0, 2).reshape(-1)[:n]


def signs(
    n: int, step: int, seed: int, stream: int, first: int = 0, *, device: Device = "cpu"
) -> Tensor:
    """1 or -1 for each of ``n`` entries, from global index ``first`` on, as float32.

    Of every 4096 entries, entry i takes bit i // 32 % 128 of call i % 32.
    """
    groups = range(first // SIGNS, -(-(first + n) // SIGNS))
    calls = _calls(groups, device)
    words = _philox(calls, step, seed, stream).view(4, len(groups), 1, _LANES)
    bits = words >> torch.arange(32, device=device).view(1, 1, 32, 1) & 1  # word, group, bit, call
    flat = bits.permute(1, 0, 2, 3).reshape(-1)
    begin = first - groups.start * SIGNS
    return 1.0 - 2.0 * flat[begin : begin + n]


def centred(half_words: Tensor) -> Tensor:
    """16-bit numbers as float32 in (-0.5, 0.5), never an end of it.

    To add it and round to the nearest integer is to round stochastically.
    """
    return (2 * half_words - 65535).to(torch.float32) * (1 / 131072)


def _calls(groups: range, device: Device) -> Tensor:
    return torch.arange(groups.start * _LANES, groups.stop * _LANES, device=device)


def _philox(calls: Tensor, step: int, seed: int, stream: int) -> Tensor:
    a, b = calls & _MASK, calls >> 32
    c, d = torch.full_like(a, step & _MASK), torch.full_like(a, stream & _MASK)
    key0, key1 = seed & _MASK, seed >> 32 & _MASK
    for _ in range(_ROUNDS):
        # int64 products wrap, but their 64 bits are those of the unsigned product.
        p, q = a * 0xD2511F53, c * 0xCD9E8D57
        a, b = (q >> 32 & _MASK) ^ b ^ key0, q & _MASK
        c, d = (p >> 32 & _MASK) ^ d ^ key1, p & _MASK
        key0, key1 = (key0 + 0x9E3779B9) & _MASK, (key1 + 0xBB67AE85) & _MASK
    return torch.stack([a, b, c, d])
