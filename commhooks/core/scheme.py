"""What a scheme is: straight-line code that turns a local gradient into the averaged one.

A scheme yields collectives and is sent their results. Its settings are frozen fields, what it
remembers lives in ``bucket.memory``, and it neither knows nor cares which driver runs it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import wraps
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from commhooks.core.bucket import Bucket, Result, SchemeExchange
from commhooks.core.bytes import as_bytes
from commhooks.core.settings import check_settings, shown
from commhooks.core.slot import Slot
from commhooks.core.traits import Traits
from commhooks.errors import SchemeError
from ddp_core import AllGather, AllReduce

__all__ = [
    "Codec",
    "Scheme",
    "check_declarations",
    "check_decoded",
    "checked_payload",
    "children",
    "pack_payload",
    "slot_error",
    "slots_of",
    "unpack_payload",
    "walk",
]


def _after_check(post_init: Callable[..., None]) -> Callable[..., None]:
    """A ``__post_init__`` that can rely on the types of its settings."""

    @wraps(post_init)
    def run(self: Any, *only_for_init: Any) -> None:
        check_settings(self)
        post_init(self, *only_for_init)

    return run


def _generating(exchange: Callable[..., Any]) -> Callable[..., Any]:
    """An ``exchange`` without a ``yield`` of its own, which has to hand on another's generator."""

    @wraps(exchange)
    def run(self: Any, bucket: Bucket) -> Any:
        result = exchange(self, bucket)
        if not isinstance(result, Generator):
            raise SchemeError(
                f"{type(self).__name__}.exchange is a generator: it yields collectives and returns "
                f"Result(mean, ...); without a `yield` in it, it returned {shown(result)}"
            )
        return result

    return run


class Scheme:
    """Base of all schemes. Subclasses are frozen dataclasses and implement ``exchange``.

    Attributes:
        traits: what the scheme declares: number of rounds, error, what it returns.
        keeps: the tensors that the scheme itself keeps per parameter. Those of schemes inside a
            wrapper are theirs to declare; :func:`slots_of` has all.
    """

    @property
    def traits(self) -> Traits:
        """What the scheme declares about itself."""
        return Traits()

    @property
    def keeps(self) -> tuple[Slot, ...]:
        """The tensors that the scheme itself keeps per parameter."""
        return ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__post_init__" in vars(cls):
            setattr(cls, "__post_init__", _after_check(vars(cls)["__post_init__"]))  # noqa: B010
        if "exchange" in vars(cls) and not inspect.isgeneratorfunction(vars(cls)["exchange"]):
            setattr(cls, "exchange", _generating(vars(cls)["exchange"]))  # noqa: B010

    def __post_init__(self) -> None:
        check_settings(self)

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        """Yields collectives, is sent their results, returns the averaged gradient."""
        raise NotImplementedError
        yield

    def bucket_group(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Hashable:
        """Parameters that it treats alike have equal answers; see ``register(layout="scheme")``."""
        return None

    def environment(self, world_size: int) -> Sequence[str]:
        """Facts besides the settings that must be the same on all ranks, in words."""
        return ()

    def begins_with(
        self, name: str, shape: torch.Size, dtype: torch.dtype, step: int
    ) -> tuple[Slot, ...]:
        """The slots that a parameter has from this step on, those of schemes inside included."""
        inside = (child.begins_with(name, shape, dtype, step) for child in children(self))
        return (*self.keeps, *chain.from_iterable(inside))


class Codec(Scheme):
    """A scheme of one all-gather, given by ``encode`` and ``decode``.

    Every rank decodes the payloads of all ranks, in rank order, so all get equal bits. Where that
    many payloads are more bytes than an all-reduce sends, the bucket travels dense;
    ``commhooks.wrappers.TwoPhase`` around a codec sends as many on any number of ranks.
    """

    def encode(self, gradient: Tensor, bucket: Bucket) -> dict[str, Tensor]:
        """The payload: named tensors; shapes and dtypes depend on the bucket, not on values."""
        raise NotImplementedError

    def decode(self, payload: dict[str, Tensor], like: Tensor, bucket: Bucket) -> Tensor:
        """A tensor like ``like`` from a payload."""
        raise NotImplementedError

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        gradient, world_size = bucket.gradient, bucket.world_size
        payload = checked_payload(self, self.encode(gradient, bucket))
        packed = pack_payload(payload)
        gather = AllGather(packed)
        if gather.wire_nbytes(world_size) > AllReduce(gradient).wire_nbytes(world_size):
            return (yield from bucket.all_reduce())
        gathered = yield gather
        # Divided before the sum, and summed in 32 bits at least: neither the sum of ranks nor one
        # rounding per rank is then a matter of the gradient's own dtype.
        mean = torch.zeros_like(gradient, dtype=bucket.wide_dtype)
        sent = None
        for rank in range(world_size):
            decoded = self.decode(unpack_payload(gathered[rank], payload), gradient, bucket)
            check_decoded(self, decoded, gradient)
            mean.add_(decoded, alpha=1.0 / world_size)
            if rank == bucket.rank:
                sent = decoded
        return Result(mean, sent=sent)


def checked_payload(codec: Codec, payload: Any) -> dict[str, Tensor]:
    """What ``encode`` returned, if it is what it has to be.

    Raises:
        SchemeError: anything but named tensors, one at least.
    """
    named = isinstance(payload, dict) and bool(payload)
    if named and all(isinstance(value, Tensor) for value in payload.values()):
        found: dict[str, Tensor] = payload
        return found
    raise SchemeError(
        f"{type(codec).__name__}.encode returns a dict of named tensors, one at least, "
        f"got {shown(payload)}"
    )


def check_decoded(codec: Codec, decoded: Any, like: Tensor) -> None:
    """Raises ``SchemeError`` where ``decode`` returned no tensor of the bucket's shape."""
    if not isinstance(decoded, Tensor) or decoded.shape != like.shape:
        what = f"shape {tuple(decoded.shape)}" if isinstance(decoded, Tensor) else shown(decoded)
        raise SchemeError(
            f"{type(codec).__name__}.decode returns a tensor of the bucket's shape "
            f"{tuple(like.shape)}, got {what}"
        )


def pack_payload(payload: dict[str, Tensor]) -> Tensor:
    """All tensors of a payload as flat uint8, widest element first so that views align."""
    parts = sorted(payload.items(), key=lambda item: -item[1].element_size())
    return torch.cat([as_bytes(value) for _, value in parts])


def unpack_payload(packed: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """The payload that ``pack_payload`` packed; names, shapes and dtypes are those of ``like``."""
    parts = sorted(like.items(), key=lambda item: -item[1].element_size())
    sizes = [value.numel() * value.element_size() for _, value in parts]
    return {
        name: piece.clone().view(value.dtype).view(value.shape)
        for (name, value), piece in zip(parts, packed.split(sizes), strict=True)
    }


def children(scheme: Scheme) -> list[Scheme]:
    """The schemes a wrapper wraps, found in its fields."""
    found: list[Scheme] = []

    def look(value: object) -> None:
        if isinstance(value, Scheme):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            for item in value:
                look(item)
        elif is_dataclass(value):  # a rule that names a scheme
            for setting in fields(value):
                look(getattr(value, setting.name))

    if is_dataclass(scheme):  # `make` refuses all others
        for own in fields(scheme):
            look(getattr(scheme, own.name))
    return found


def walk(scheme: Scheme) -> Iterator[Scheme]:
    """``scheme`` and all it wraps, outermost first."""
    yield scheme
    for child in children(scheme):
        yield from walk(child)


def slots_of(scheme: Scheme) -> tuple[Slot, ...]:
    """All slots of a scheme and of those inside."""
    return tuple(dict.fromkeys(slot for inside in walk(scheme) for slot in inside.keeps))


def slot_error(scheme: Scheme, key: str, value: Tensor, parameter: torch.Size) -> str | None:
    """Why ``value`` cannot be what a scheme keeps under ``key`` of such a parameter.

    None if it can; "unknown" if the scheme keeps nothing under this key.
    """
    errors = [slot.check(value, parameter) for slot in slots_of(scheme) if slot.key == key]
    return None if None in errors else (errors[0] if errors else "unknown")


def check_declarations(scheme: Scheme) -> None:
    """Raises ``SchemeError`` unless a scheme declares its traits and slots as such."""
    name = type(scheme).__name__
    settings: set[str] = (
        {setting.name for setting in fields(scheme)} if is_dataclass(scheme) else set()
    )
    for attribute in ("traits", "keeps"):
        if attribute in settings:
            raise SchemeError(
                f"{name}: `{attribute}` is a declaration, not a setting; write it without an "
                f"annotation: `{attribute} = ...`"
            )
    if not isinstance(scheme.traits, Traits):
        raise SchemeError(f"{name}.traits is a Traits(...), got {shown(scheme.traits)}")
    keeps: object = scheme.keeps
    if not isinstance(keeps, tuple) or not all(isinstance(one, Slot) for one in keeps):
        raise SchemeError(f"{name}.keeps is a tuple of Slot(...), got {shown(keeps)}")
