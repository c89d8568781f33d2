"""Counter-based random bits (Philox4x32-7; Salmon et al., "Parallel Random Numbers", 2011)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .runtime.arguments import check_whole, whole

__all__ = [
    "SIGNS",
    "RandomBits",
    "as_seed",
    "centred",
    "check_key",
    "half_words",
    "key_of",
    "signs",
    "words",
]

SIGNS = 4096  # entries that share 32 calls if each takes one bit

Device = torch.device | str
_GROUP, _LANES = 256, 32  # entries that share calls, calls
_MASK = 0xFFFFFFFF
_ROUNDS = 7  # as few as pass all of BigCrush, by the paper; 10 is the usual margin
_SEEDS, _NUMBERS, _PLACES = 2**63, 2**32, 2**62


def as_seed(value: Any, caller: str = "RandomBits", name: str = "seed") -> int:
    """The seed that ``value`` is, as an integer of 64 bits with a sign.

    Args:
        value: a whole number of Python or NumPy, from -2^63 to 2^64 - 1, as ``torch.manual_seed``
            takes it. Those of 2^63 and more are the negative ones of the same 64 bits.
        caller, name: the function and its argument, for messages.

    Raises:
        TypeError: it is no whole number; floats, bools and None are none.
        ValueError: it has more than 64 bits.

    Example:
        >>> as_seed(2**64 - 1)
        -1
    """
    seed = whole(caller, name, value)
    if not -_SEEDS <= seed < 2 * _SEEDS:
        raise ValueError(f"{caller}({name}): -2^63 to 2^64 - 1, got {seed}")
    return seed - 2 * _SEEDS if seed >= _SEEDS else seed


@dataclass(frozen=True)
class RandomBits:
    """Random bits that depend on nothing but these numbers and an entry's place.

    Args:
        seed: the key; 64 bits, see :func:`as_seed`.
        step: int64 tensor of one number, on the device of the data: a captured CUDA graph reads it
            anew at every replay.
        number: tells apart streams of one seed and step; 0 to 2^32 - 1.
        first: global index of the first entry, a multiple of 256; slices of a bucket then get the
            bits that the whole bucket would get.
    """

    seed: int
    step: Tensor
    number: int = 0
    first: int = 0

    def __post_init__(self) -> None:
        if not (type(self.seed) is type(self.number) is type(self.first) is int):
            object.__setattr__(self, "number", whole("RandomBits", "number", self.number))
            object.__setattr__(self, "first", whole("RandomBits", "first", self.first))
        object.__setattr__(self, "seed", as_seed(self.seed))
        _check_step(self.step)
        _check_numbers(self.number, self.first)

    @property
    def key(self) -> Key:
        """As ops take it: step, seed, stream, first."""
        return self.step, self.seed, self.number, self.first


Key = tuple[Tensor | None, int, int, int]
NO_STREAM: Key = (None, 0, 0, 0)  # rounding to nearest


def key_of(caller: str, random: RandomBits | None, name: str = "random") -> Key:
    """Returns the key of random bits, or that of none."""
    if random is None:
        return NO_STREAM
    if not isinstance(random, RandomBits):
        raise TypeError(f"{caller}({name}): RandomBits or None, got {type(random).__name__}")
    return random.key


def check_key(data: Tensor, step: Tensor | None, seed: int, number: int, first: int = 0) -> None:
    """Raises unless these numbers are a stream's, on the device of ``data``, or no stream's."""
    if step is None:
        return
    _check_step(step)
    if not (step.is_cpu and data.is_cpu) and step.device != data.device:
        raise ValueError(
            f"RandomBits(step) lies on the device of the data, {data.device}, got {step.device}"
        )
    if not -_SEEDS <= seed < _SEEDS:
        raise ValueError(f"RandomBits(seed): 64 bits, got {seed}")
    _check_numbers(number, first)


def _check_step(step: Any) -> None:
    if not isinstance(step, Tensor):
        raise TypeError(
            f"RandomBits(step) is an int64 tensor of one number, got {type(step).__name__}"
        )
    if step.dtype != torch.int64 or step.numel() != 1:
        raise TypeError(
            f"RandomBits(step) is an int64 tensor of one number, "
            f"got {step.dtype} of shape {tuple(step.shape)}"
        )


def _check_numbers(number: int, first: int) -> None:
    check_whole("RandomBits", "number", number, 0, _NUMBERS)
    check_whole("RandomBits", "first", first, 0, _PLACES)
    if first % _GROUP:
        raise ValueError(f"RandomBits(first) is a multiple of {_GROUP}, got {first}")


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
