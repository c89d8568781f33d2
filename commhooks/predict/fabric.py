"""Describes what joins the ranks: links inside and between nodes, with presets and files."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from commhooks.core.settings import shown

__all__ = ["PRESETS", "Fabric", "Library", "Link", "fabric", "load_fabric", "save_fabric"]

Library = Literal["gloo", "mpi", "nccl"]

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
    bandwidth: float
    chunk_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.latency >= 0 and self.bandwidth > 0 and self.chunk_s >= 0):
            raise ValueError(
                f"Link(latency, bandwidth, chunk_s): 0 or more, above 0, 0 or more, got {self}"
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
        start_s: seconds that a job's first collective takes more.
        core_s_per_byte: seconds of a processor core per byte that a rank sends and receives as
            much, where processors move the bytes (TCP); backward waits for as long on a full
            machine.
        source: where the numbers are from.

    Example:
        >>> Fabric("my office", between=Link(50e-6, 117e6), library="gloo")
    """

    name: str
    between: Link
    inside: Link | None = None
    ranks_per_node: int = 1
    library: Library = "nccl"
    multicast: float | None = None
    tree_nbytes: float | None = None
    start_s: float = 0.0
    core_s_per_byte: float = 0.0
    source: str = ""

    @property
    def copied(self) -> bool:
        """Whether its link between nodes was not measured, but is that inside of one."""
        return self.source == COPIED

    def __post_init__(self) -> None:
        if self.library not in get_args(Library):
            raise ValueError(
                f"Fabric(library=...): {', '.join(get_args(Library))}, got {self.library!r}"
            )
        if not isinstance(self.ranks_per_node, int) or self.ranks_per_node < 1:
            raise ValueError(
                f"Fabric(ranks_per_node=...): a whole number, 1 or more, got "
                f"{self.ranks_per_node!r}"
            )
        if self.ranks_per_node > 1 and self.inside is None:
            raise ValueError(
                f"Fabric(inside=...): the link inside a node of {self.ranks_per_node} ranks is "
                f"missing"
            )


def save_fabric(fabric: Fabric, path: str | Path) -> None:
    """Writes a fabric as JSON, for :func:`load_fabric` and ``--fabric``."""
    Path(path).write_text(json.dumps(asdict(fabric), indent=2) + "\n", encoding="utf-8")


def load_fabric(path: str | Path) -> Fabric:
    """Reads a fabric that :func:`save_fabric` or ``commhooks link`` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file has something else.
    """
    try:
        values: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        between, inside = values.pop("between"), values.pop("inside", None)
        return Fabric(
            between=Link(**between), inside=None if inside is None else Link(**inside), **values
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"load_fabric({str(path)!r}): not a fabric's file: {error}") from error


def fabric(name: str | Path | Fabric) -> Fabric:
    """Returns a preset by name, or the fabric of a file.

    Raises:
        ValueError: there is no such preset and no such file; the message lists the presets.
    """
    if isinstance(name, Fabric):
        return name
    if str(name) in PRESETS:
        return PRESETS[str(name)]
    if Path(name).is_file():
        return load_fabric(name)
    raise ValueError(
        f"fabric({shown(str(name))}): neither a file nor a preset; presets are {', '.join(PRESETS)}"
    )


_TCP = "share of the rate that TCP reached in namespaces of this project (docs/results)"
_NIC = "data sheet times 0.8, the share that nccl-tests reach on most clusters"
_NCCL = "bus bandwidth of nccl-tests on such machines, in talks of NVIDIA (GTC 2024, 2025)"
_FIT = "fitted to published points of nccl-tests (experiments.predictions)"


def _line(
    name: str, gbit: float, share: float, latency: float, *, library: Library = "nccl", source: str
) -> Fabric:
    """Returns machines with one rank each, on lines of a rate in Gbit/s."""
    return Fabric(name, Link(latency, gbit / 8 * 1e9 * share), library=library, source=source)


def _box(
    name: str, inside: float, latency: float, *, multicast: float | None = None, source: str = _NCCL
) -> Fabric:
    """Returns one machine of 8 GPUs; several of them are on a line of 100 Gbit/s."""
    return Fabric(
        name,
        between=Link(20e-6, 12.5e9 * 0.8),
        inside=Link(latency, inside),
        ranks_per_node=8,
        multicast=multicast,
        source=source,
    )


PRESETS: dict[str, Fabric] = {
    one.name: one
    for one in (
        _line("1gbe", 1, 0.94, 60e-6, library="gloo", source=_TCP),
        _line("2.5gbe", 2.5, 0.94, 60e-6, library="gloo", source=_TCP),
        _line("10gbe", 10, 0.88, 40e-6, library="gloo", source=_TCP),
        _line("25gbe", 25, 0.83, 30e-6, source=_TCP),
        _line("100gbe", 100, 0.80, 20e-6, source=_TCP),
        _line("fdr", 56, 0.72, 10e-6, source=_NIC),
        _line("hdr", 200, 0.96, 5e-6, source=_NIC),
        _line("ndr", 400, 0.96, 5e-6, source=_NIC),
        _line(
            "wan-500m", 0.5, 0.94, 30e-3, library="gloo", source="a line of 60 ms there and back"
        ),
        _line("wan-4g", 4, 0.94, 15e-3, library="gloo", source="a line of 30 ms there and back"),
        _box("pcie3", 10e9, 6e-6),
        _box("pcie4", 24e9, 5e-6),
        _box("pcie5", 48e9, 5e-6),
        _box("nvlink-v100", 122e9, 3e-6),
        _box("nvlink-a100", 232e9, 3e-6),
        _box("nvlink-h100", 370e9, 3e-6, multicast=274e9),
        _box("nvlink-b200", 700e9, 3e-6, multicast=486e9),
        # Nodes of 8 GPUs with a network card each.
        Fabric(
            "dgx-a100",
            between=Link(27e-6, 192e9),
            inside=Link(3e-6, 232e9),
            ranks_per_node=8,
            source=_NCCL,
        ),
        Fabric(
            "dgx-h100",
            between=Link(27e-6, 405e9, 3.4e-6),
            inside=Link(3e-6, 370e9),
            ranks_per_node=8,
            multicast=274e9,
            tree_nbytes=2**40,
            source=_FIT,
        ),
        Fabric(
            "p6-b200",
            between=Link(50e-6, 400e9),
            inside=Link(3e-6, 700e9),
            ranks_per_node=8,
            multicast=486e9,
            source=_FIT,
        ),
    )
}
