"""What a scheme is: straight-line code that turns a local gradient into the averaged one.

A scheme yields collectives and is sent their results. Its settings are frozen fields, what it
remembers lives in ``ctx.memory``, and it neither knows nor cares which driver runs it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Hashable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from commhooks._memory import Layout, Memory
from commhooks.kernels import Stream
from ddp_core import AllGather, AllReduce, Collective

__all__ = [
    "Codec",
    "Context",
    "Exchanged",
    "Scheme",
    "SchemeExchange",
    "children",
    "pack_payload",
    "unpack_payload",
    "walk",
]


class Exchanged(NamedTuple):
    """What one exchange of a bucket gave.

    Attributes:
        mean: flat averaged gradient, the same bits on every rank.
        sent: what this rank's share decoded to, flat; the mean of it over ranks is ``mean``.
            None: everything was sent.
        unsent: ``grad - sent``, where the scheme computed it cheaper than by subtracting.
        finite: one bool, the same on every rank; None where the scheme did not look.
    """

    mean: Tensor
    sent: Tensor | None = None
    unsent: Tensor | None = None
    finite: Tensor | None = None


SchemeExchange = Generator[Collective, Tensor, Exchanged]


@dataclass
class Context:
    """Where an exchange runs: bucket layout, step, ranks, memory, random streams.

    Attributes:
        memory: tensors that survive the step, see :class:`commhooks.Memory`.
        output: flat tensor in the gradient's dtype that may take the mean; may be ``grad`` itself.
        step: counts synchronised backward passes from 0.
        rank, world_size: within the process group.
        seed: base of all random streams; the same on every rank.
        keep_unsent: error feedback needs ``sent`` or ``unsent``; without it they may be omitted.
            With it, ``grad`` is left as it was, unless it is ``output`` or returned as ``unsent``.
        residual: float32 (float64), flat, only for schemes that say ``adds_residual``: to be added
            to ``grad`` and left as it is.
        unsent: same dtype and size, given with ``residual``: what is not sent goes there.
        agreed: what a scheme found out together with the other ranks, for its own later rounds.
    """

    memory: Memory
    output: Tensor
    step: int = 0
    rank: int = 0
    world_size: int = 1
    seed: int = 0
    keep_unsent: bool = False
    residual: Tensor | None = None
    unsent: Tensor | None = None
    agreed: Any = None
    find_layout: Any = None

    @cached_property
    def layout(self) -> Layout:
        """Parameter names and shapes in the flat gradient."""
        layout: Layout = self.find_layout()
        return layout

    def replace(self, **changes: Any) -> Context:
        """The same context but for ``changes``."""
        return replace(self, **changes)

    def part(self, purpose: str) -> Context:
        """For a part of the bucket: the same, but for draws of its own."""
        return replace(self, seed=_number(f"{self.seed}/{purpose}") >> 1)

    def corrected(self, grad: Tensor) -> Tensor:
        """``grad``; where there is a residual, their sum, which lies in ``unsent`` then."""
        if self.residual is None:
            return grad
        return torch.add(grad, self.residual, out=self.unsent)

    def generator(
        self, name: str, *, shared: bool = True, step: int | None = None
    ) -> torch.Generator:
        """A CPU random generator keyed by parameter name and step, and by rank unless ``shared``.

        Keyed draws need no state in a checkpoint, and do not depend on the bucket layout.
        """
        step = self.step if step is None else step
        text = f"{self.seed}/{name}/{step}/{'shared' if shared else self.rank}"
        return torch.Generator().manual_seed(_number(text) >> 1)

    def random(self, purpose: str, *, shared: bool) -> Stream:
        """Random bits for kernels, on the gradient's device: of this bucket, step and purpose.

        Args:
            purpose: tells apart streams of one bucket.
            shared: the same on every rank.
        """
        text = f"{self.layout.names[0]}/{purpose}/{'shared' if shared else self.rank}"
        step = torch.full((), self.step, dtype=torch.int64, device=self.output.device)
        return Stream(self.seed, step, number=_number(text) >> 33)


def _number(text: str) -> int:
    """64 bits that stand for a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class Scheme:
    """Base of all schemes. Subclasses are frozen dataclasses and implement ``exchange``.

    Attributes:
        rounds: collectives per bucket, at most.
        biased: converges only with error feedback.
        variance: of an unbiased random scheme, the most that E|C(x) - x|^2 / |x|^2 can be; 0 for
            others. Above 1 error feedback needs ``Scaled``.
        linear: payloads of all ranks may be summed by an all-reduce.
        stateful: keeps something in ``ctx.memory``.
        averages: returns the average over ranks (False: no-op and local schemes).
        adds_residual: adds ``ctx.residual`` to the gradient itself, in the pass that encodes it,
            and returns ``ctx.unsent`` as ``unsent``.
        optimizes: gives the optimizer something else than an average of gradients (momentum,
            signs); error feedback around it has no meaning.
        per_rank: keys of its memory that differ between ranks, and what becomes of their values
            on another number of ranks: "sum" (the sum over ranks stays), "mean", or "drop". All
            others are equal on all ranks.
    """

    rounds: int = 1
    biased: ClassVar[bool] = False
    variance: float = 0.0
    linear: ClassVar[bool] = False
    stateful: bool = False
    averages: ClassVar[bool] = True
    adds_residual: ClassVar[bool] = False
    optimizes: bool = False
    per_rank: ClassVar[Mapping[str, str]] = {}
    coalesce: bool = False

    def exchange(self, grad: Tensor, ctx: Context) -> SchemeExchange:
        """Yields collectives, is sent their results, returns the averaged gradient.

        Args:
            grad: flat local gradient of one bucket; may be overwritten unless ``ctx.keep_unsent``.
            ctx: where the exchange runs.
        """
        raise NotImplementedError
        yield

    def bucket_group(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Hashable:
        """Parameters that it treats alike have equal answers; see ``register(layout="scheme")``."""
        return None

    def memory_error(self, key: str, value: Tensor, parameter: torch.Size) -> str | None:
        """Why ``value`` cannot be this scheme's memory of such a parameter; None if it can.

        Keys a scheme does not own are answered by "unknown".
        """
        return "unknown"

    def initial_memory(self, name: str, shape: torch.Size, ctx: Context) -> dict[str, Tensor]:
        """A parameter's memory before its first step, by key; makes checkpoints complete."""
        return {}


class Codec(Scheme):
    """A scheme of one all-gather, given by ``encode`` and ``decode``.

    Every rank decodes the payloads of all ranks, in rank order, so all get equal bits. Where that
    many payloads are more bytes than an all-reduce sends, the bucket travels dense;
    ``commhooks.TwoPhase`` around a codec sends as many on any number of ranks.
    """

    def encode(self, grad: Tensor, ctx: Context) -> dict[str, Tensor]:
        """The payload: named tensors; shapes and dtypes depend on the bucket, not on values."""
        raise NotImplementedError

    def decode(self, payload: dict[str, Tensor], like: Tensor, ctx: Context) -> Tensor:
        """A tensor like ``like`` from a payload."""
        raise NotImplementedError

    def exchange(self, grad: Tensor, ctx: Context) -> SchemeExchange:
        payload = self.encode(grad, ctx)
        packed = pack_payload(payload)
        gather = AllGather(packed)
        dense = AllReduce(grad)
        if gather.wire_nbytes(ctx.world_size) > dense.wire_nbytes(ctx.world_size):
            dense = AllReduce(grad.clone() if ctx.keep_unsent else grad)
            mean = yield dense
            return Exchanged(mean, sent=dense.sent)
        gathered = yield gather
        # Divided before the sum, and summed in 32 bits at least: neither the sum of ranks nor one
        # rounding per rank is then a matter of the gradient's own dtype.
        mean = torch.zeros_like(grad, dtype=torch.promote_types(grad.dtype, torch.float32))
        sent = None
        for rank in range(ctx.world_size):
            decoded = self.decode(unpack_payload(gathered[rank], payload), grad, ctx)
            mean.add_(decoded, alpha=1.0 / ctx.world_size)
            if rank == ctx.rank:
                sent = decoded
        return Exchanged(mean, sent=sent)


def pack_payload(payload: dict[str, Tensor]) -> Tensor:
    """All tensors of a payload as flat uint8, widest element first so that views align."""
    parts = sorted(payload.items(), key=lambda item: -item[1].element_size())
    return torch.cat([value.contiguous().view(-1).view(torch.uint8) for _, value in parts])


def unpack_payload(packed: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """The payload that ``pack_payload`` packed; names, shapes and dtypes are those of ``like``."""
    parts = sorted(like.items(), key=lambda item: -item[1].element_size())
    sizes = [value.numel() * value.element_size() for _, value in parts]
    return {
        name: piece.clone().view(value.dtype).view(value.shape)
        for (name, value), piece in zip(parts, packed.split(sizes), strict=True)
    }


S = TypeVar("S", bound=Scheme)


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

    for own in fields(scheme):  # type: ignore[arg-type]
        look(getattr(scheme, own.name))
    return found


def walk(scheme: Scheme) -> Iterator[Scheme]:
    """``scheme`` and all it wraps, outermost first."""
    yield scheme
    for child in children(scheme):
        yield from walk(child)
