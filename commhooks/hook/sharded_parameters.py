"""Describes parameters of which a host such as FSDP2 reduces one shard to each rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from commhooks.checkpoint.names import is_padding, padding_name, piece_name, plain_name
from commhooks.core.layout import Layout
from commhooks.hook.parameters import Parameter, Parameters

__all__ = ["OwnShards", "Sharded", "ShardedParameters"]


class Sharded(NamedTuple):
    """Describes one parameter that a host cuts into a piece for each rank.

    Attributes:
        name: within the model.
        shape: of the whole parameter, as this data-parallel group sees it.
        dtype: of its gradient when it is reduced.
        dim: the dimension that is cut.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    dim: int


class ShardedParameters(Parameters):
    """Holds parameters as pieces, one for each rank, in which a bucket holds them.

    A bucket has all pieces of rank 0, then those of rank 1, and so on. All pieces of a parameter
    have the size of the first, the last ones being filled up with zeros. Memory is kept by piece,
    "layer.weight#1" on rank 1, and saved by parameter, so that any other host may load it.

    Args:
        parameters: of the model.
        world_size: number of ranks, and so of pieces.
    """

    def __init__(self, parameters: Sequence[Sharded], world_size: int) -> None:
        super().__init__()
        self._world_size = world_size
        self._layout_of: dict[tuple[str, ...], Layout] = {}
        self._sharded = {parameter.name: parameter for parameter in parameters}
        for parameter in parameters:
            for rank in range(world_size):
                piece = self._piece(parameter, rank)
                self._by_name[piece.name] = piece

    def __iter__(self) -> Iterator[Parameter]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def layout_of(self, names: Sequence[str]) -> Layout:
        """Returns the layout of a bucket of the parameters of these names."""
        # Kept: the same buckets come in every step, and a new ``Layout`` hashes all names.
        key = tuple(names)
        if key not in self._layout_of:
            pieces = [
                self._by_name[piece_name(name, rank)] for rank in self._ranks() for name in names
            ]
            names_of, shapes = zip(*((one.name, one.shape) for one in pieces), strict=True)
            self._layout_of[key] = Layout(names_of, shapes)
        return self._layout_of[key]

    def _ranks(self) -> Iterable[int]:
        """Returns the ranks whose pieces a bucket has, in order."""
        return range(self._world_size)

    def find(self, name: str) -> str:
        plain = plain_name(name)
        return plain if plain in self._sharded else name

    def as_saved(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        saved = {}
        for name, parameter in self._sharded.items():
            if piece_name(name, 0) not in values:
                continue
            dim, length = parameter.dim, parameter.shape[parameter.dim]
            pieces = [values[piece_name(name, rank)] for rank in range(self._world_size)]
            whole = torch.cat(pieces, dim=dim)
            saved[name] = whole.narrow(dim, 0, length).contiguous()
            if whole.shape[dim] > length:
                # Rotated blocks leave errors there, too: without them a run would not continue bit
                # for bit. Other hosts, and other numbers of ranks, leave them out.
                rest = whole.narrow(dim, length, whole.shape[dim] - length)
                saved[padding_name(name)] = rest.contiguous()
        return saved

    def as_kept(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        kept = {}
        for name, value in values.items():
            if is_padding(name):
                continue
            parameter = self._sharded.get(name)
            if parameter is None or value.shape != parameter.shape:
                kept[name] = value  # of another model: what checks the state says so
                continue
            dim = parameter.dim
            size = self._by_name[piece_name(name, 0)].shape[dim]
            missing = size * self._world_size - value.shape[dim]
            shape = [*value.shape[:dim], missing, *value.shape[dim + 1 :]]
            rest = values.get(padding_name(name))
            if rest is None or list(rest.shape) != shape:
                rest = value.new_zeros(shape)
            pieces = torch.cat([value, rest], dim=dim).split(size, dim=dim)
            for rank, piece in enumerate(pieces):
                kept[piece_name(name, rank)] = piece.contiguous()
        return kept

    def _piece(self, parameter: Sharded, rank: int) -> Parameter:
        shape = list(parameter.shape)
        shape[parameter.dim] = -(-shape[parameter.dim] // self._world_size)
        order = tuple(range(len(shape)))
        name = piece_name(parameter.name, rank)
        return Parameter(name, torch.Size(shape), parameter.dtype, order)


class OwnShards(ShardedParameters):
    """Holds the pieces of one rank of the ranks over which parameters are sharded.

    For the exchange between replicas (HSDP): the ranks of a group all have the same pieces, which
    are saved as they are.

    Args:
        parameters: of the model.
        world_size: number of ranks over which parameters are sharded.
        rank: of this process among them.
    """

    def __init__(self, parameters: Sequence[Sharded], world_size: int, rank: int) -> None:
        super().__init__(parameters, world_size)
        self._rank = rank
        own = {piece_name(parameter.name, rank) for parameter in parameters}
        self._by_name = {name: piece for name, piece in self._by_name.items() if name in own}

    def _ranks(self) -> Iterable[int]:
        return (self._rank,)

    def find(self, name: str) -> str:
        return name

    def as_saved(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(values)

    def as_kept(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(values)
