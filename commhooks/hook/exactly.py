"""Averages exactly what ranks of tensor parallelism have to keep equal, beside any scheme.

Norms and biases of row-wise layers are not cut, and equal on these ranks. Most schemes would round
them together with pieces of other parameters, which differ there, and so differently on each rank.
"""

from __future__ import annotations

from collections.abc import Collection

from commhooks.checkpoint.placement import Cut
from commhooks.core.bucket import Bucket, SchemeExchange
from commhooks.core.dense import Dense
from commhooks.core.layout import Layout
from commhooks.core.names import is_padding, whole_name
from commhooks.core.scheme import Scheme, walk
from commhooks.core.traits import Exact
from commhooks.hook.parameters import Parameters
from commhooks.wrappers.feedback import flushing, without_flush
from commhooks.wrappers.guard import Guard
from commhooks.wrappers.parts import Part, whole_of

__all__ = ["Exactly", "shared_and_rounded"]


def shared_and_rounded(scheme: Scheme, parameters: Parameters) -> frozenset[str]:
    """Returns the names of parameters that ranks share, and that a scheme would round differently.

    A rank shares a parameter with those between which it is not cut, while some other parameter is:
    so of two dimensions of tensor parallelism the parameters count that are cut along one of them.
    """
    cuts = parameters.cuts
    every = frozenset().union(*(cut.between for cut in cuts.values()))
    if not every or _rounds_alone(without_flush(scheme)):
        return frozenset()
    return frozenset(
        name
        for name in parameters.shapes
        if not is_padding(name) and cuts.get(whole_name(name), Cut()).between != every
    )


def _rounds_alone(scheme: Scheme) -> bool:
    """Whether a scheme rounds each entry by itself, and equal ones equally.

    Asks all schemes inside: wrappers with feedback, and those around them, count as exact.
    """
    for inside in walk(scheme):
        traits = inside.traits
        if not isinstance(traits.error, Exact):
            return False
        # Random draws are numbered by entry, and pieces may differ in size. A guard judges buckets.
        if getattr(inside, "stochastic", False) or isinstance(inside, Guard):
            return False
        # Updates are no rounded means, whatever their traits say; gossip sums in full precision.
        if traits.returns == "update" and traits.agrees:
            return False
    return True


class Exactly:
    """Averages some parameters of a bucket exactly, and the others by a scheme.

    The exact ones travel in a message of their own. In one with the others, whose sizes may differ
    between ranks of tensor parallelism, their sums could be in another order and have other bits.

    Args:
        names: of these parameters, as in the layouts of buckets.

    Attributes:
        rounds: number of collectives per bucket besides those of the scheme.
    """

    def __init__(self, names: Collection[str] = ()) -> None:
        self._names = frozenset(names)
        self.rounds = int(bool(names))
        self._positions: dict[Layout, tuple[list[int], list[int]]] = {}

    def exchange(self, scheme: Scheme, bucket: Bucket) -> SchemeExchange:
        """Exchanges a bucket."""
        if not self._names:  # before the layout is looked up, which most schemes never need
            return (yield from scheme.exchange(bucket))
        exact, others = self._split(bucket.layout)
        dense = flushing(Dense())  # sends what another scheme has kept of them
        if not exact or not others:
            return (yield from (dense if exact else scheme).exchange(bucket))
        parts = [Part(dense, bucket, exact), Part(scheme, bucket, others)]
        for part in parts:
            part.result = yield from part.exchange
        return whole_of(parts, bucket)

    def _split(self, layout: Layout) -> tuple[list[int], list[int]]:
        """Returns the positions of the exact parameters, and of the others."""
        if layout not in self._positions:
            exact: list[int] = []
            others: list[int] = []
            for position, name in enumerate(layout.names):
                (exact if name in self._names else others).append(position)
            self._positions[layout] = exact, others
        return self._positions[layout]
