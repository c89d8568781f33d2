"""Joins the shards that ranks save on a host that shards parameters to whole parameters.

Between nodes (HSDP) the ranks of one group have the same shard of every parameter, and each shard
has a group of its own. Shards of all groups are joined before a state is distributed over
other ranks, so that another mesh, or another host, finds whole parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from commhooks.checkpoint._format import MemoryDict, Part, Saved
from commhooks.core._names import padding_name, split_shard_name
from commhooks.errors import CheckpointError
from ddp_core.exchange._errors import listed, ranks_in_words

__all__ = ["join_shards", "merge_shard_groups"]


def join_shards(
    values: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]
) -> dict[str, Tensor]:
    """Joins values by shard of a parameter to values by parameter.

    Padding behind the last shard has a name of its own, see :func:`padding_name`.

    Args:
        values: tensors by name; those that are not of pieces stay as they are.
        shapes: shapes of whole parameters, by name.

    Raises:
        CheckpointError: pieces are missing, or do not fit the parameter.
    """
    whole: dict[str, Tensor] = {}
    pieces: dict[str, dict[int, Tensor]] = {}
    for name, value in values.items():
        parameter, number = split_shard_name(name)
        if number is None or parameter not in shapes:
            whole[name] = value
        else:
            pieces.setdefault(parameter, {})[number] = value
    for name, parts in pieces.items():
        shape = shapes[name]
        dim = _cut_dimension(shape, parts)
        if dim is None:
            raise CheckpointError(
                f"load_state_dict: the shards {listed(sorted(parts), 8)} of parameter {name!r} do "
                f"not make up its shape {tuple(shape)}. On another mesh, or in another "
                f"integration, give state_dict(gather=True), the list of the states of all ranks, "
                f"or from torch.distributed.checkpoint use commhooks.load_dcp; or is the "
                f"checkpoint another model's?"
            )
        joined = torch.cat([parts[number] for number in range(len(parts))], dim=dim)
        length = shape[dim]
        whole[name] = joined.narrow(dim, 0, length).contiguous()
        if joined.shape[dim] > length:
            rest = joined.narrow(dim, length, joined.shape[dim] - length)
            whole[padding_name(name)] = rest.contiguous()
    return whole


def _cut_dimension(shape: torch.Size, parts: Mapping[int, Tensor]) -> int | None:
    """Returns the dimension along which pieces make up a shape; None if they do not."""
    first, count = parts.get(0), len(parts)
    if first is None or first.dim() != len(shape) or max(parts) != count - 1:
        return None
    if any((piece.shape, piece.dtype) != (first.shape, first.dtype) for piece in parts.values()):
        return None
    cut = [dim for dim, length in enumerate(shape) if first.shape[dim] != length]
    # Nothing was cut where all is in the first piece: the others only fill up.
    cut = cut or [dim for dim, length in enumerate(shape) if count == 1 or length <= 1][:1]
    if len(cut) != 1 or first.shape[cut[0]] * count < shape[cut[0]]:
        return None
    return cut[0]


def merge_shard_groups(
    saved: Saved, shapes: Mapping[str, torch.Size], keys: Collection[str]
) -> Saved:
    """Converts a state of several groups of ranks, one for each shard, to that of one group.

    Args:
        saved: the parts of all groups; those of one rank within its group belong together.
        shapes: shapes of whole parameters, by name.
        keys: keys of memory whose values have the shapes of shards. Other values keep the names of
            shards.

    Raises:
        CheckpointError: pieces are missing, or two groups have the same.
    """
    by_rank: dict[int, list[Part]] = {}
    for part in sorted(saved.parts, key=lambda part: part.global_rank):
        by_rank.setdefault(part.rank, []).append(part)
    leader = min(part.leader for part in saved.parts)
    parts = []
    for rank, some in by_rank.items():
        memory: MemoryDict = {}
        for part in some:
            for key, values in part.memory.items():
                known = memory.setdefault(key, {})
                if twice := known.keys() & values.keys():
                    raise CheckpointError(
                        f"load_state_dict: {key!r} of {listed(sorted(twice))} is there twice, from "
                        f"{ranks_in_words([part.global_rank for part in some])}: give the states "
                        f"of one part of the model (one rank of tensor parallelism)"
                    )
                known |= values
        for key in memory.keys() & set(keys):
            memory[key] = join_shards(memory[key], shapes)
        parts.append(Part(rank, some[0].global_rank, leader, memory, arrival=some[0].arrival))
    return Saved(saved.common, parts)
