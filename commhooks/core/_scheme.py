"""Defines the base classes of schemes, and functions that inspect them.

A scheme is straight-line code that turns a local gradient into the averaged one: it yields
collectives and is sent their results. Its settings are frozen fields, the tensors that it keeps
between steps are in slots, and it does not depend on the driver that runs it (lanes, CUDA streams,
simulated ranks).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import wraps
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from commhooks.core._bucket import Bucket, Result, SchemeExchange
from commhooks.core._layout import Span
from commhooks.core._settings import check_settings, shown
from commhooks.core._slot import Slot
from commhooks.core._traits import Traits
from commhooks.errors import SchemeError
from ddp_core import AllGather, AllReduce
from ddp_core.exchange._devices import as_bytes

__all__ = [
    "Codec",
    "Scheme",
    "check_declarations",
    "check_decoded",
    "checked_payload",
    "checked_result",
    "children",
    "pack_payload",
    "slot_error",
    "slots_of",
    "unpack_payload",
    "walk",
]


def _after_check(post_init: Callable[..., None]) -> Callable[..., None]:
    """Wraps a ``__post_init__`` so that the types of settings are checked before it runs."""

    @wraps(post_init)
    def run(self: Any, *only_for_init: Any) -> None:
        check_settings(self)
        post_init(self, *only_for_init)

    return run


def _generating(exchange: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps an ``exchange`` without ``yield``, which has to return another scheme's generator.

    A forgotten ``yield`` would otherwise fail in the driver, far from the scheme.
    """

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
    """Computes the average of a bucket; subclasses are frozen dataclasses with ``exchange``.

    Attributes:
        traits: declares number of rounds, error, and what the scheme returns.
        keeps: declares the tensors that the scheme itself keeps per parameter. Schemes inside a
            wrapper declare their own; :func:`slots_of` returns all.
        touches_files: whether the scheme acts outside of memory, so that no pickle may choose it.
    """

    touches_files: ClassVar[bool] = False

    # Properties with defaults: a subclass writes ``traits = Traits(...)``, or a property where the
    # answer depends on its settings.

    @property
    def traits(self) -> Traits:
        """Declares number of rounds, error, and what the scheme returns."""
        return Traits()

    @property
    def keeps(self) -> tuple[Slot, ...]:
        """Declares the tensors that the scheme itself keeps per parameter."""
        return ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Wrapped, so that settings are checked in subclasses that do not call super(), too.
        if "__post_init__" in vars(cls):
            setattr(cls, "__post_init__", _after_check(vars(cls)["__post_init__"]))  # noqa: B010
        if "exchange" in vars(cls) and not inspect.isgeneratorfunction(vars(cls)["exchange"]):
            setattr(cls, "exchange", _generating(vars(cls)["exchange"]))  # noqa: B010

    def __post_init__(self) -> None:
        check_settings(self)

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        """Averages a bucket: yields collectives, receives their results, returns a ``Result``."""
        raise NotImplementedError
        yield  # makes this a generator function, as every exchange is

    @property
    def gathers(self) -> bool:
        """Whether the scheme implements :meth:`all_gather`."""
        return False

    def all_gather(self, bucket: Bucket, parts: Sequence[Span]) -> SchemeExchange:
        """Gathers the buckets of all ranks; as ``exchange``, it yields collectives.

        Does not change ``bucket.raw``.

        Args:
            bucket: this rank's entries; the output takes those of all ranks.
            parts: begin and end of the entries of each rank in the output.

        Returns:
            A :class:`commhooks.core.Result` whose ``mean`` has the entries of all ranks.
        """
        raise SchemeError(f"{type(self).__name__} averages; it cannot gather")
        yield  # makes this a generator function, as every exchange is

    def bucket_group(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Hashable:
        """Returns a key; parameters of different keys get buckets of their own.

        Used by ``register(layout="scheme")``: equal keys for parameters that are exchanged in the
        same way.
        """
        return None

    def error_growth(self, world_size: int) -> float:
        """Returns the squared error on ``world_size`` ranks over the declared variance.

        Above 1 where ranks share a scale; infinite where no bound holds in every step.
        """
        return 1.0

    def environment(self, world_size: int) -> Sequence[str]:
        """Returns facts besides the settings that must be the same on all ranks, in words."""
        return ()

    def advise(self) -> None:
        """Warns of settings that are mistakes, and logs what a choice costs; for ``register``."""

    def begins_with(
        self, name: str, shape: torch.Size, dtype: torch.dtype, step: int
    ) -> tuple[Slot, ...]:
        """Returns the slots that a parameter has from ``step`` on, with those of schemes inside."""
        inside = (child.begins_with(name, shape, dtype, step) for child in children(self))
        return (*self.keeps, *chain.from_iterable(inside))


class Codec(Scheme):
    """Averages by one all-gather; subclasses implement ``encode`` and ``decode``.

    Every rank decodes the payloads of all ranks in rank order, so the mean has the same bits on
    every rank. A bucket is averaged by a plain all-reduce where that sends fewer bytes than the
    payloads. ``commhooks.wrappers.TwoPhase`` around a codec sends two payloads on any number of
    ranks.
    """

    def encode(self, gradient: Tensor, bucket: Bucket) -> dict[str, Tensor]:
        """Returns the payload: named tensors, whose shapes and dtypes do not depend on values."""
        raise NotImplementedError

    def decode(self, payload: dict[str, Tensor], like: Tensor, bucket: Bucket) -> Tensor:
        """Decodes a payload to a tensor of the shape of ``like``."""
        raise NotImplementedError

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        gradient, world_size = bucket.gradient, bucket.world_size
        payload = checked_payload(self, self.encode(gradient, bucket))
        packed = pack_payload(payload)
        gather = AllGather(packed)
        # ``raw`` and not ``gradient``, which is float32 where a residual is added to 16 bits.
        if gather.wire_nbytes(world_size) > AllReduce(bucket.raw).wire_nbytes(world_size):
            return (yield from bucket.all_reduce())
        gathered = yield gather
        # Each share is divided before it is added, in 32 bits at least: in float16 a sum of ranks
        # could overflow, and every addition would round.
        mean = torch.zeros_like(gradient, dtype=bucket.wide_dtype)
        sent = None
        # This rank's payload is decoded like all others: ``sent`` has the bits that others add.
        for rank in range(world_size):
            decoded = self.decode(unpack_payload(gathered[rank], payload), gradient, bucket)
            check_decoded(self, decoded, gradient)
            mean.add_(decoded, alpha=1.0 / world_size)
            if rank == bucket.rank:
                sent = decoded
        return Result(mean, sent=sent)


def checked_payload(codec: Codec, payload: Any) -> dict[str, Tensor]:
    """Returns the payload that ``encode`` returned, checked.

    Raises:
        SchemeError: the payload is no dict of named tensors, or an empty one.
    """
    named = isinstance(payload, dict) and bool(payload)
    if named and all(isinstance(value, Tensor) for value in payload.values()):
        tensors: dict[str, Tensor] = payload
        return tensors
    raise SchemeError(
        f"{type(codec).__name__}.encode returns a dict of named tensors, one at least, "
        f"got {shown(payload)}"
    )


def check_decoded(codec: Codec, decoded: Any, like: Tensor) -> None:
    """Raises ``SchemeError`` where ``decode`` returned no tensor of the bucket's shape."""
    if not isinstance(decoded, Tensor) or decoded.shape != like.shape:
        form = f"shape {tuple(decoded.shape)}" if isinstance(decoded, Tensor) else shown(decoded)
        raise SchemeError(
            f"{type(codec).__name__}.decode returns a tensor of the bucket's shape "
            f"{tuple(like.shape)}, got {form}"
        )


def checked_result(scheme: Scheme, result: Any) -> Result:
    """Returns what the ``exchange`` of a scheme returned, checked.

    Raises:
        SchemeError: it is no ``Result``.
    """
    if isinstance(result, Result):
        return result
    while len(children(scheme)) == 1:  # a wrapper hands on what the scheme inside returned
        (scheme,) = children(scheme)
    raise SchemeError(
        f"{type(scheme).__name__}.exchange returns Result(mean, ...), got {type(result).__name__}"
    )


def pack_payload(payload: dict[str, Tensor]) -> Tensor:
    """Packs all tensors of a payload into flat uint8, widest elements first so that views align."""
    parts = sorted(payload.items(), key=lambda part: -part[1].element_size())
    return torch.cat([as_bytes(value) for _, value in parts])


def unpack_payload(packed: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the payload that ``pack_payload`` packed.

    Args:
        packed: flat uint8.
        like: tensors with the names, shapes and dtypes of the payload's.
    """
    parts = sorted(like.items(), key=lambda part: -part[1].element_size())
    sizes = [value.numel() * value.element_size() for _, value in parts]
    # Copies: a row of gathered bytes may begin at an address that no wider dtype can be viewed at.
    return {
        name: piece.clone().view(value.dtype).view(value.shape)
        for (name, value), piece in zip(parts, packed.split(sizes), strict=True)
    }


def children(scheme: Scheme) -> list[Scheme]:
    """Returns the schemes directly inside a scheme, found in its fields."""
    schemes: list[Scheme] = []

    def look(value: object) -> None:
        if isinstance(value, Scheme):
            schemes.append(value)
        elif isinstance(value, (tuple, list)):
            for element in value:
                look(element)
        elif is_dataclass(value):  # a rule that names a scheme
            for setting in fields(value):
                look(getattr(value, setting.name))

    if is_dataclass(scheme):  # `make` refuses all others
        for setting in fields(scheme):
            look(getattr(scheme, setting.name))
    return schemes


def walk(scheme: Scheme) -> Iterator[Scheme]:
    """Yields ``scheme`` and all schemes inside, outermost first."""
    yield scheme
    for child in children(scheme):
        yield from walk(child)


def slots_of(scheme: Scheme) -> tuple[Slot, ...]:
    """Returns all slots of a scheme and of the schemes inside, each once."""
    return tuple(dict.fromkeys(slot for inside in walk(scheme) for slot in inside.keeps))


def slot_error(scheme: Scheme, key: str, value: Tensor, parameter: torch.Size) -> str | None:
    """Returns why a loaded value cannot belong to a scheme's slot, or None if it can.

    "unknown" if no slot of the scheme has this key.

    Args:
        scheme: scheme whose slots, and those of schemes inside, are searched.
        key: key of the slot.
        value: the loaded tensor of one parameter.
        parameter: shape of that parameter.
    """
    # Slots of one key may differ (PowerSGD of two ranks in a PerParameter): one has to accept.
    errors = [slot.check(value, parameter) for slot in slots_of(scheme) if slot.key == key]
    return None if None in errors else (errors[0] if errors else "unknown")


def check_declarations(scheme: Scheme) -> None:
    """Raises ``SchemeError`` unless ``traits`` and ``keeps`` of a scheme are of the right types."""
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
    if not isinstance(keeps, tuple) or not all(isinstance(slot, Slot) for slot in keeps):
        raise SchemeError(f"{name}.keeps is a tuple of Slot(...), got {shown(keeps)}")
