"""Describes what joins the ranks: links inside and between nodes, and their files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from commhooks.core.settings import Bound, check_settings, from_json, printable, shown

__all__ = ["Fabric", "Library", "Link", "load_fabric", "save_fabric"]

Library = Literal["gloo", "mpi", "nccl"]

MOST_SECONDS = 1e9  # 30 years: sums and products of what is longer leave the range of numbers
_MOST_MEMBERS = 2**31 - 1  # ranks of a node

# What ``source`` says of a fabric that was measured on one node.
COPIED = "commhooks link, on one node: the link between nodes is a copy of that inside"


@dataclass(frozen=True)
class Link:
    """Describes one level of a fabric.

    Attributes:
        latency: seconds that a message takes beside its bytes, from one member to the next.
        bandwidth: bytes per second that a member sends in one direction while all members send.
        chunk_s: seconds that each chunk of a message through several members takes beside its
            bytes (double trees).
    """

    latency: float
    bandwidth: Bound
    chunk_s: float = 0.0

    def __post_init__(self) -> None:
        check_settings(self)
        times = (self.latency, self.chunk_s)
        if not (all(0 <= one <= MOST_SECONDS for one in times) and self.bandwidth >= 1):
            raise ValueError(
                f"Link(latency, bandwidth, chunk_s): seconds from 0 to {MOST_SECONDS:.0g}, a byte "
                f"per second or more, seconds, got {self}"
            )


@dataclass(frozen=True)
class Fabric:
    """Describes the links between ranks.

    Attributes:
        name: shown in tables.
        between: of nodes, through all network cards of a node together.
        inside: of the ranks of a node.
        ranks_per_node: ranks that share a node's network cards.
        library: decides which algorithms there are: "nccl", "mpi", or "gloo" with this package's
            lanes.
        multicast: bytes per second of an all-reduce that the switch of a node computes (NVLink
            SHARP). None: it cannot.
        tree_nbytes: size up to which NCCL takes its double tree between nodes, which it decides by
            what it assumes about the links. None: the faster of ring and tree.
        core_s_per_byte: seconds of a processor core per byte that a rank sends and receives as
            much, where processors move the bytes (TCP); backward waits for as long on a full
            machine.
        overlap: share of the latency that passes for messages of several buckets at once, where
            they are under way together: 1 on a long line, 0 where latency is a processor's work,
            or where messages follow each other on one stream (NCCL).
        source: where the numbers are from.

    Example:
        >>> Fabric("my office", between=Link(50e-6, 117e6), library="gloo")
    """

    name: str
    between: Link
    inside: Link | None = None
    ranks_per_node: int = 1
    library: Library = "nccl"
    multicast: Bound | None = None
    tree_nbytes: Bound | None = None
    core_s_per_byte: float = 0.0
    overlap: float = 0.0
    source: str = ""

    @property
    def copied(self) -> bool:
        """Whether its link between nodes was not measured, but is that inside of one."""
        return self.source == COPIED

    def __post_init__(self) -> None:
        check_settings(self)
        object.__setattr__(self, "name", printable(self.name))  # a file's, shown on a terminal
        if not 0 <= self.core_s_per_byte <= MOST_SECONDS:
            raise ValueError(
                f"Fabric(core_s_per_byte=...): seconds, from 0 to {MOST_SECONDS:.0g}, got "
                f"{self.core_s_per_byte!r}"
            )
        if self.multicast is not None and not self.multicast >= 1:
            raise ValueError(
                f"Fabric(multicast=...): bytes per second, 1 or more, got {self.multicast!r}"
            )
        if not 0 <= self.overlap <= 1 or (self.overlap and self.library != "gloo"):
            raise ValueError(
                f"Fabric(overlap=...): from 0 to 1, and 0 unless the library is gloo, got "
                f"{self.overlap!r} on {self.library}"
            )
        if not 1 <= self.ranks_per_node <= _MOST_MEMBERS:
            raise ValueError(
                f"Fabric(ranks_per_node=...): a whole number from 1 to {_MOST_MEMBERS}, got "
                f"{shown(self.ranks_per_node)}"
            )
        if self.ranks_per_node > 1 and self.inside is None:
            raise ValueError(
                f"Fabric(inside=...): the link inside a node of {self.ranks_per_node} ranks is "
                f"missing"
            )


def save_fabric(
    fabric: Fabric, path: str | Path, *, measured: Mapping[str, Any] | None = None
) -> None:
    """Writes a fabric as JSON, for :func:`load_fabric` and ``--fabric``.

    Args:
        fabric: the links.
        path: of the file.
        measured: what the fabric was fitted to, in JSON's types; it is written as well, for
            readers: :func:`load_fabric` does not return it.
    """
    content = asdict(fabric) | ({} if measured is None else {"measured": measured})
    Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load_fabric(path: str | Path) -> Fabric:
    """Reads a fabric that :func:`save_fabric` or ``commhooks link`` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file has something else.
    """
    try:
        values: dict[str, Any] = from_json(Path(path).read_text(encoding="utf-8"))
        values.pop("measured", None)  # for readers of the file
        between, inside = values.pop("between"), values.pop("inside", None)
        return Fabric(
            between=Link(**between), inside=None if inside is None else Link(**inside), **values
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"load_fabric({str(path)!r}): not a fabric's file: {printable(str(error))}"
        ) from error
