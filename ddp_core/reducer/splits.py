"""Buckets that the compiler has chosen, by where it split a model's graphs."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_core.reducer.parameters import Trained

__all__ = ["CompilerSplits"]


class CompilerSplits:
    """Holds the splits of all graphs that were compiled in the first step's forward pass.

    That is on the ranks that have inputs, so all ranks agree once, in the second step, whether
    there are any.

    Args:
        parameters: of the model; the same on all ranks.

    Attributes:
        buckets: indices of the parameters of each split, in the order of backward.
        open: whether the ranks still have to agree on them.
        ignored: none are taken.
    """

    def __init__(self, parameters: Sequence[Trained]) -> None:
        self._index_of = {id(one.parameter): index for index, one in enumerate(parameters)}
        self.buckets: list[list[int]] = []
        self.open, self.ignored = True, False

    def take(self, chosen: Sequence[Sequence[int]]) -> None:
        """Adds those of one graph.

        Args:
            chosen: ids of the parameters of each split, in the order of backward.
        """
        if self.ignored:
            return
        index_of = self._index_of
        new = [[index_of[i] for i in split if i in index_of] for split in chosen]
        # Graphs are compiled in the order of forward, so a later one is earlier in backward. A
        # shared parameter is ready at its last use in backward.
        splits = [*new, *self.buckets]
        owner = {index: number for number, split in enumerate(splits) for index in split}
        own = [
            [index for index in dict.fromkeys(split) if owner[index] == number]
            for number, split in enumerate(splits)
        ]
        self.buckets = [split for split in own if split]
