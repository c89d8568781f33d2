"""Describes the parameters of hosts that reduce one shard of each gradient to each rank (FSDP)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from commhooks.checkpoint._placement import ShardSpec
from commhooks.core._layout import Layout
from commhooks.core._names import (
    is_padding,
    padding_name,
    parameter_name,
    piece_name,
    plain_name,
    split_shard_name,
)
from commhooks.core._scheme import Scheme, walk
from commhooks.core._slot import Slot
from commhooks.errors import RegistrationError
from commhooks.hook._parameters import Parameter, Parameters

__all__ = [
    "FlatParameters",
    "OwnShards",
    "ShardedParameter",
    "ShardedParameters",
    "check_returns_shards",
]


class ShardedParameter(NamedTuple):
    """Describes one parameter that a host cuts into a piece for each rank.

    Attributes:
        name: within the model.
        shape: shape of the whole parameter, as this data-parallel group sees it.
        dtype: dtype of the gradient when it is reduced.
        dim: the dimension that is cut.
        trained: whether it is trained when the hook is registered.
        cut: shard of a larger parameter that it is (tensor parallelism).
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    dim: int
    trained: bool
    cut: ShardSpec = ShardSpec()


class ShardedParameters(Parameters):
    """Holds parameters as shards, one for each rank, as they lie in a bucket.

    A bucket has all pieces of rank 0, then those of rank 1, and so on. All pieces of a parameter
    have the size of the first, the last ones being filled up with zeros. Memory is kept by piece,
    "layer.weight#1" on rank 1, and saved by parameter, so that any other host may load it. Values
    that are not shaped as their parameters, such as factors and packed bytes, are saved by piece.
    With one rank a piece is the parameter, and has its name.

    Args:
        parameters: the model's parameters.
        world_size: number of ranks, and so of pieces of each.
    """

    def __init__(self, parameters: Sequence[ShardedParameter], world_size: int) -> None:
        super().__init__()
        self._world_size = world_size
        self._layout_of: dict[tuple[str, ...], Layout] = {}
        self._sharded = {parameter.name: parameter for parameter in parameters}
        self.cuts = {parameter.name: parameter.cut for parameter in parameters}
        self._trained: list[Parameter] = []
        for parameter in parameters:
            for rank in range(world_size):
                piece = self._piece(parameter, rank)
                self._by_name[piece.name] = piece
                if parameter.trained:
                    self._trained.append(piece)

    # As in DistributedDataParallel: frozen ones are known, and no state has memory of them.
    def __iter__(self) -> Iterator[Parameter]:
        return iter(self._trained)

    def __len__(self) -> int:
        return len(self._trained)

    def layout_of(self, names: Sequence[str]) -> Layout:
        """Returns the layout of a bucket, given the names of its parameters."""
        # Kept: the same buckets come in every step, and a new ``Layout`` hashes all names.
        key = tuple(names)
        if key not in self._layout_of:
            pieces = [
                self._by_name[self._name(name, rank)] for rank in self._ranks() for name in names
            ]
            names_of, shapes = zip(*((piece.name, piece.shape) for piece in pieces), strict=True)
            self._layout_of[key] = Layout(names_of, shapes)
        return self._layout_of[key]

    def _ranks(self) -> Iterable[int]:
        """Returns the ranks whose shards are in a bucket, in order."""
        return range(self._world_size)

    def find(self, name: str) -> str:
        plain = plain_name(name)
        return plain if plain in self._sharded else name

    @property
    def saved_shapes(self) -> dict[str, torch.Size]:
        return {name: parameter.shape for name, parameter in self._sharded.items()}

    def is_portable(self, slot: Slot) -> bool:
        return type(slot).shape is Slot.shape

    def accepts_names(self, names: Collection[str]) -> bool:
        ranks: dict[str, set[int]] = {}
        for name in names:
            parameter, rank = split_shard_name(name)
            if self._world_size == 1 and rank is None:
                rank = 0
            if rank is None or parameter not in self._sharded:
                return False
            ranks.setdefault(parameter, set()).add(rank)
        # All pieces: with fewer, or more, they are of another number of ranks.
        here = [set(range(self._world_size)), set(self._ranks())]
        return all(some in here for some in ranks.values())

    def local_values(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: value
            for name, value in values.items()
            if name in self._by_name or parameter_name(name) not in self._sharded
        }

    def to_checkpoint_layout(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        saved = {}
        for name, parameter in self._sharded.items():
            if self._name(name, 0) not in values:
                continue
            dim, length = parameter.dim, parameter.shape[parameter.dim]
            pieces = [values[self._name(name, rank)] for rank in range(self._world_size)]
            whole = torch.cat(pieces, dim=dim)
            saved[name] = whole.narrow(dim, 0, length).contiguous()
            if whole.shape[dim] > length:
                # Rotated blocks leave errors there, too: without them a run would not continue bit
                # for bit. Other hosts, and other numbers of ranks, leave them out.
                rest = whole.narrow(dim, length, whole.shape[dim] - length)
                saved[padding_name(name)] = rest.contiguous()
        return saved

    def to_bucket_layout(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        bucket_values = {}
        for name, value in values.items():
            if is_padding(name):
                continue
            parameter = self._sharded.get(name)
            if parameter is None or value.shape != parameter.shape:
                bucket_values[name] = value  # of another model: what checks the state says so
                continue
            dim = parameter.dim
            size = self._piece(parameter, 0).shape[dim]
            missing = size * self._world_size - value.shape[dim]
            shape = [*value.shape[:dim], missing, *value.shape[dim + 1 :]]
            rest = values.get(padding_name(name))
            if rest is None or list(rest.shape) != shape:
                rest = value.new_zeros(shape)
            pieces = torch.cat([value, rest], dim=dim).split(size, dim=dim)
            for rank in self._ranks():
                bucket_values[self._name(name, rank)] = pieces[rank].contiguous()
        return bucket_values

    def _name(self, name: str, rank: int) -> str:
        return name if self._world_size == 1 else piece_name(name, rank)

    def _piece(self, parameter: ShardedParameter, rank: int) -> Parameter:
        shape = list(parameter.shape)
        shape[parameter.dim] = -(-shape[parameter.dim] // self._world_size)
        order = tuple(range(len(shape)))
        name = self._name(parameter.name, rank)
        return Parameter(name, torch.Size(shape), parameter.dtype, order)


class OwnShards(ShardedParameters):
    """Holds this rank's shards alone, for the exchange between replicas (HSDP).

    The ranks of a replica group all have the same shards. A rank saves its own; a gathered state
    has all shards, by parameter.

    Args:
        parameters: the model's parameters.
        world_size: number of ranks over which parameters are sharded.
        rank: rank of this process among them.
    """

    def __init__(self, parameters: Sequence[ShardedParameter], world_size: int, rank: int) -> None:
        super().__init__(parameters, world_size)
        self._rank = rank
        local_names = {self._name(parameter.name, rank) for parameter in parameters}
        self._by_name = {
            name: piece for name, piece in self._by_name.items() if name in local_names
        }
        self._trained = [piece for piece in self._trained if piece.name in local_names]

    def _ranks(self) -> Iterable[int]:
        return (self._rank,)

    def to_checkpoint_layout(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(values)


class FlatParameters(Parameters):
    """Holds the whole parameters in flat gradients, and the padding between them (FSDP1).

    Args:
        units: for each flat gradient, its parameters and padding, and whether each is trained.

    Attributes:
        layouts: names and shapes in each flat gradient.
    """

    def __init__(self, units: Sequence[Sequence[tuple[Parameter, bool]]]) -> None:
        super().__init__()
        pieces = [piece for unit in units for piece in unit]
        self._by_name = {piece.name: piece for piece, _ in pieces}
        self._trained = [piece for piece, trained in pieces if trained]
        self.layouts = [
            Layout([piece.name for piece, _ in unit], [piece.shape for piece, _ in unit])
            for unit in units
        ]

    # As in DistributedDataParallel: frozen ones are known, and no state needs memory of them.
    def __iter__(self) -> Iterator[Parameter]:
        return iter(self._trained)

    def __len__(self) -> int:
        return len(self._trained)

    def to_bucket_layout(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        bucket_values = super().to_bucket_layout(values)
        for piece in self._trained:
            if is_padding(piece.name):
                saved = values.get(piece.name)
                if saved is None or saved.shape != piece.shape:  # of another number of ranks
                    saved = torch.zeros(piece.shape, dtype=torch.float32, device="cpu")
                bucket_values[piece.name] = saved
        return bucket_values


# ---- schemes


def check_returns_shards(scheme: Scheme, host: str, call: str = "register") -> None:
    """Raises RegistrationError unless a scheme can return one shard of the mean alone.

    Args:
        host: the class or framework that needs shards, for the message.
        call: the public call that gives it the scheme.
    """
    if not scheme.traits.shards:
        between = (
            ". Between replicas of FSDP2 (HSDP) any scheme runs: "
            'register(model, scheme, replicate_group=mesh["replicate"])'
        )
        # The innermost: ``scheme`` may be a policy of many rules, of which one is the reason.
        *_, whole = (part for part in walk(scheme) if not part.traits.shards)
        raise RegistrationError(
            f"{call}: {whole} averages whole buckets, and {host} needs one shard of each on each "
            f"rank: it would send and keep what no rank needs. Schemes that exchange blocks of "
            f"entries run here: none, fp16, bf16, int8, int4, fp8, onebit, eden, topk, and "
            f"a codec in commhooks.wrappers.TwoPhase(...), also in ErrorFeedback, AveragedFeedback "
            f"or PerParameter{between if host == 'FSDP2' else ''}"
        )
    if scheme.traits.coalesce:
        raise RegistrationError(
            f"{call}: coalesce=True joins the buckets of a step, and {host} needs the mean of each "
            f"before it hands over the next one; leave it out"
        )
