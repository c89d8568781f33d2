"""Generates random bits from a counter and a key, the same on every device.

Reference: Philox4x32 with 7 rounds; Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3,
2011.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .runtime.arguments import check_whole, whole

__all__ = [
    "ROW",
    "SIGNS",
    "RandomBits",
    "as_seed",
    "below_half",
    "centred",
    "check_key",
    "dither",
    "half_words",
    "key_of",
    "signs",
    "words",
]

# Row r of a message of several payloads begins at index r times this, so that a row is packed by
# itself with the bits that it has in the whole message.
ROW = 2**40
SIGNS = 4096  # entries that share 32 calls of 128 bits, at one bit per entry

Device = torch.device | str
_GROUP, _LANES = 256, 32  # entries that share 32 calls at 16 bits per entry; the number of calls
_MASK = 0xFFFFFFFF
_DITHER = 2**62  # behind the calls of half-words
_ROUNDS = 7  # the fewest that pass BigCrush, by the paper; 10 is the usual margin
_SEEDS, _NUMBERS, _PLACES = 2**63, 2**32, 2**62


def as_seed(value: Any, caller: str = "RandomBits", name: str = "seed") -> int:
    """Converts a seed to a signed 64-bit integer.

    Args:
        value: an integer of Python or NumPy from -2^63 to 2^64 - 1, as ``torch.manual_seed`` takes
            it. Seeds of 2^63 and more become the negative numbers with the same bits.
        caller, name: the function and its argument, for messages.

    Raises:
        TypeError: ``value`` is no integer, such as a float, a bool or None.
        ValueError: ``value`` has more than 64 bits.

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
    """Selects random bits, which depend only on these numbers and on the place of an entry.

    Args:
        seed: the key, 64 bits; see :func:`as_seed`.
        step: int64 tensor of one entry on the device of the data. A tensor, so that every replay of
            a captured CUDA graph reads the current step.
        number: distinguishes streams of the same seed and step; 0 to 2^32 - 1.
        first: global index of the first entry, a multiple of 256. A slice of a bucket gets the bits
            that its entries have in the whole bucket.
    """

    seed: int
    step: Tensor
    number: int = 0
    first: int = 0

    def __post_init__(self) -> None:
        # Schemes make several of these for every bucket and step: what is right is seen at once.
        seed, step, number, first = self.seed, self.step, self.number, self.first
        if (
            type(seed) is type(number) is type(first) is int
            and -_SEEDS <= seed < _SEEDS
            and 0 <= number < _NUMBERS
            and 0 <= first < _PLACES
            and not first % _GROUP
            and isinstance(step, Tensor)
            and step.dtype == torch.int64
            and step.numel() == 1
        ):
            return
        object.__setattr__(self, "number", whole("RandomBits", "number", number))
        object.__setattr__(self, "first", whole("RandomBits", "first", first))
        object.__setattr__(self, "seed", as_seed(seed))
        _check_step(step)
        _check_numbers(self.number, self.first)

    def row(self, number: int) -> RandomBits:
        """Returns the bits of one row of a message of several payloads."""
        return RandomBits(self.seed, self.step, self.number, self.first + number * ROW)


Key = tuple[Tensor | None, int, int, int]
NO_STREAM: Key = (None, 0, 0, 0)  # for rounding to nearest


def key_of(caller: str, random: RandomBits | None, name: str = "random") -> Key:
    """Returns the arguments of ops for ``random``: step, seed, stream, first; or those for None."""
    if random is None:
        return NO_STREAM
    if not isinstance(random, RandomBits):
        raise TypeError(f"{caller}({name}): RandomBits or None, got {type(random).__name__}")
    return random.step, random.seed, random.number, random.first


def check_key(x: Tensor, step: Tensor | None, seed: int, stream: int, first: int = 0) -> None:
    """Raises unless the numbers are a valid key on the device of ``x``, or ``step`` is None."""
    if step is None:
        return
    _check_step(step)
    if step.device != x.device:
        raise ValueError(
            f"RandomBits(step) lies on the device of the data, {x.device}, got {step.device}"
        )
    if not -_SEEDS <= seed < _SEEDS:
        raise ValueError(f"RandomBits(seed): 64 bits, got {seed}")
    _check_numbers(stream, first)


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
    """Returns 16 random bits per entry, from global index ``first`` on, as int64.

    In each group of 256 entries, entry i takes half-word (i // 32) % 8 of call i % 32, so that the
    lanes of a CUDA warp and of a CPU vector compute the bits that they need themselves.
    """
    groups = range(first // _GROUP, -(-(first + n) // _GROUP))
    calls = _calls(groups, device)
    # int64, as torch has hardly any operations on unsigned 32-bit integers.
    words = _philox(calls, step, seed, stream)  # (4, groups * 32)
    halves = torch.stack([words & 0xFFFF, words >> 16], 1)  # (4, 2, groups * 32)
    flat = halves.view(8, len(groups), _LANES).permute(1, 0, 2).reshape(-1)
    begin = first - groups.start * _GROUP
    return flat[begin : begin + n]


def words(n: int, step: int, seed: int, stream: int, *, device: Device = "cpu") -> Tensor:
    """Returns 32 random bits per entry as int64.

    In each group of 128 entries, entry i takes word (i // 32) % 4 of call i % 32.
    """
    calls = _calls(range(-(-n // 128)), device)
    return _philox(calls, step, seed, stream).view(4, -1, _LANES).permute(1, 0, 2).reshape(-1)[:n]


def signs(
    n: int, step: int, seed: int, stream: int, first: int = 0, *, device: Device = "cpu"
) -> Tensor:
    """Returns 1 or -1 per entry, from global index ``first`` on, as float32.

    In each group of 4096 entries, entry i takes bit (i // 32) % 128 of call i % 32.
    """
    groups = range(first // SIGNS, -(-(first + n) // SIGNS))
    calls = _calls(groups, device)
    words = _philox(calls, step, seed, stream).view(4, len(groups), 1, _LANES)
    bits = words >> torch.arange(32, device=device).view(1, 1, 32, 1) & 1  # word, group, bit, call
    flat = bits.permute(1, 0, 2, 3).reshape(-1)
    begin = first - groups.start * SIGNS
    return 1.0 - 2.0 * flat[begin : begin + n]


def dither(
    n: int,
    step: int,
    seed: int,
    stream: int,
    first: int = 0,
    *,
    rank: int = 0,
    ranks: int = 1,
    device: Device = "cpu",
) -> Tensor:
    """Returns 32 random bits per entry as int64, from global index ``first`` on.

    In group g of 256 entries, entry i takes ``a + b i`` modulo 2^32, where a and b are the first
    words of call ``2^62 + g``. The upper 24 bits of any two entries are independent, so that
    variances of sums are those of independent draws; and a call serves 256 entries in place of 8.

    Args:
        rank, ranks: adds rank / ranks of the range, modulo 2^32.

    Reference: Dietzfelbinger, Universal Hashing and k-wise Independent Random Variables via Integer
    Arithmetic without Primes, 1996.
    """
    groups = range(first // _GROUP, -(-(first + n) // _GROUP))
    calls = torch.arange(_DITHER + groups.start, _DITHER + groups.stop, device=device)
    a, b = _philox(calls, step, seed, stream)[:2, :, None].unbind()
    draws = torch.addcmul(a, b, torch.arange(_GROUP, device=device)).view(-1)[:n]
    return draws + rank * (2**32 // ranks) & _MASK


def below_half(draws: Tensor, bits: int) -> Tensor:
    """Converts 32-bit draws u to float32 numbers, 1/2 minus u / 2^32, in (-0.5, 0.5).

    They are odd multiples of ``2^-bits``, and symmetric around 0.
    """
    places = (draws >> (32 - bits) | 1).to(torch.float32)
    return places.mul(2.0**-bits).neg().add(0.5)


def centred(half_words: Tensor) -> Tensor:
    """Converts 16-bit numbers to float32 in the open interval (-0.5, 0.5), symmetric around 0.

    Adding the result and rounding to the nearest integer rounds stochastically.
    """
    return (2 * half_words - 65535).to(torch.float32) * (1 / 131072)


def _calls(groups: range, device: Device) -> Tensor:
    return torch.arange(groups.start * _LANES, groups.stop * _LANES, device=device)


def _philox(calls: Tensor, step: int, seed: int, stream: int) -> Tensor:
    a, b = calls & _MASK, calls >> 32
    c, d = torch.full_like(a, step & _MASK), torch.full_like(a, stream & _MASK)
    key0, key1 = seed & _MASK, seed >> 32 & _MASK
    for _ in range(_ROUNDS):
        # Signed products wrap around, with the same 64 bits as the unsigned product.
        p, q = a * 0xD2511F53, c * 0xCD9E8D57
        a, b = (q >> 32 & _MASK) ^ b ^ key0, q & _MASK
        c, d = (p >> 32 & _MASK) ^ d ^ key1, p & _MASK
        key0, key1 = (key0 + 0x9E3779B9) & _MASK, (key1 + 0xBB67AE85) & _MASK
    return torch.stack([a, b, c, d])
