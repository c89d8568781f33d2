"""Describes the fabric that connects ranks: links inside and between nodes, and their files."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from commhooks.core._settings import Bound, check_settings, from_json, printable, shown

__all__ = ["PRESETS", "Fabric", "Library", "Link", "fabric", "load_fabric", "save_fabric"]


Library = Literal["gloo", "mpi", "nccl"]

MAX_SECONDS = 1e9  # 30 years: sums and products of what is longer leave the range of numbers
_MAX_MEMBERS = 2**31 - 1  # ranks of a node

# The ``source`` of a fabric that was measured on one node.
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
        if not (all(0 <= seconds <= MAX_SECONDS for seconds in times) and self.bandwidth >= 1):
            raise ValueError(
                f"Link(latency, bandwidth, chunk_s): seconds from 0 to {MAX_SECONDS:.0g}, a byte "
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
            SHARP), or None.
        tree_nbytes: size up to which NCCL uses its double tree between nodes; it decides by its own
            assumptions about links. None: the faster of ring and tree.
        cpu_s_per_byte: processor seconds per byte that a rank sends (and receives) if processors
            move the bytes (TCP); on a fully used machine, backward is delayed by as long.
        overlap: share of the latency that concurrent messages of several buckets share: 1 on a long
            line, 0 if latency is a processor's work, or if messages follow each other on one
            stream (NCCL).
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
    cpu_s_per_byte: float = 0.0
    overlap: float = 0.0
    source: str = ""

    @property
    def copied(self) -> bool:
        """Whether the link between nodes was not measured, but copied from that inside nodes."""
        return self.source == COPIED

    def __post_init__(self) -> None:
        check_settings(self)
        object.__setattr__(self, "name", printable(self.name))  # a file's, shown on a terminal
        if not 0 <= self.cpu_s_per_byte <= MAX_SECONDS:
            raise ValueError(
                f"Fabric(cpu_s_per_byte=...): seconds, from 0 to {MAX_SECONDS:.0g}, got "
                f"{self.cpu_s_per_byte!r}"
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
        if not 1 <= self.ranks_per_node <= _MAX_MEMBERS:
            raise ValueError(
                f"Fabric(ranks_per_node=...): a whole number from 1 to {_MAX_MEMBERS}, got "
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
    """Writes a fabric as JSON, for :func:`load_fabric` and ``--network``.

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
        ValueError: the file holds no fabric.
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
            f"load_fabric({str(path)!r}): not a file of a network: {printable(str(error))}"
        ) from error


# ---- presets


# NCCL's model of a hop (src/graph/tuning.cc, version 2.22): NVLink and PCIe in a ring of large
# messages, the network in a tree of small ones.
_NVLINK_S, _PCIE_S, _NET_S = 3.4e-6, 5.7e-6, 5e-6
_TUNER = "latency of NCCL's tuner"
# Kept in github.com/stas00/ml-engineering, folder network.
_TESTS = "nccl-tests (ml-engineering)"
_TOPOLOGY = "NCCL's source (topo.h), not measured"
_SLIDE = "NVIDIA's talk S72583 (GTC 2025)"
# Marks what no source says.
_ASSUMED = "assumed"


def _line(
    name: str,
    *,
    gbit: float,
    share: float,
    latency: float,
    source: str,
    library: Library = "nccl",
    overlap: float = 0.0,
) -> Fabric:
    """Returns a fabric of machines with one rank each, on lines of a rate in Gbit/s.

    Args:
        gbit: the rate.
        share: part of the rate that data can use.
        latency, source, library, overlap: see :class:`Fabric`.
    """
    link = Link(latency, gbit / 8 * 1e9 * share)
    return Fabric(name, link, library=library, overlap=overlap, source=source)


def _card(name: str, *, gbit: float) -> Fabric:
    """Returns a fabric of machines with one network card each, which uses RDMA."""
    # NCCL counts 12 GB/s per 100 Gbit/s.
    source = "NCCL's source (topo.h: 12 GB/s per 100 Gbit/s; tuning.cc), not measured"
    return _line(name, gbit=gbit, share=0.96, latency=_NET_S, source=source)


def _long_line(name: str, *, gbit: float, round_trip: float) -> Fabric:
    """Returns a long-distance fabric, whose latency is propagation delay, which messages share."""
    return _line(
        name,
        gbit=gbit,
        share=0.94,
        latency=round_trip / 2,
        source=f"{_ASSUMED}: a link of {1e3 * round_trip:.0f} ms there and back, the share of "
        f"1gbe; messages of several buckets share its latency",
        library="gloo",
        overlap=1.0,
    )


def _box(
    name: str, inside: float, latency: float, source: str, *, multicast: float | None = None
) -> Fabric:
    """Returns a fabric of machines with 8 GPUs each, connected as ``100gbe``."""
    return Fabric(
        name,
        between=Link(20e-6, 10e9),
        inside=Link(latency, inside),
        ranks_per_node=8,
        multicast=multicast,
        source=f"{source}; {_TUNER}; between machines {_ASSUMED}: 100gbe",
    )


def _nodes(
    name: str,
    between: Link,
    source: str,
    *,
    box: Fabric,
    ranks_per_node: int = 8,
    tree_nbytes: float | None = None,
) -> Fabric:
    """Returns a fabric of GPU nodes as in ``box``, with a network card per GPU."""
    return Fabric(
        name,
        between=between,
        inside=box.inside,
        ranks_per_node=ranks_per_node,
        multicast=box.multicast,
        tree_nbytes=tree_nbytes,
        source=source,
    )


_LINES = (
    _line(
        "1gbe",
        gbit=1,
        share=0.94,
        latency=60e-6,
        source=f"bandwidth measured here (docs/results, line_share); latency {_ASSUMED}",
        library="gloo",
    ),
    _line(
        "2.5gbe",
        gbit=2.5,
        share=0.94,
        latency=60e-6,
        source=f"{_ASSUMED}: the share of 1gbe",
        library="gloo",
    ),
    _line(
        "10gbe",
        gbit=10,
        share=0.88,
        latency=40e-6,
        source=f"{_ASSUMED}: 0.88 of the rate; latency near MG-WFBP's code (37 us on 8 machines)",
        library="gloo",
    ),
    _line("25gbe", gbit=25, share=0.83, latency=30e-6, source=f"{_ASSUMED}: 0.83 of the rate"),
    _line(
        "40gbe",
        gbit=40,
        share=0.80,
        latency=25e-6,
        source=f"{_ASSUMED}: 0.8 of the rate; the cluster of 1-bit Adam reached 0.5 GB/s (iperf)",
    ),
    _line(
        "100gbe",
        gbit=100,
        share=0.80,
        latency=20e-6,
        source=f"{_ASSUMED}: 0.8 of the rate, by TCP",
    ),
    _card("200gbe", gbit=200),
    _card("400gbe", gbit=400),
    _card("edr", gbit=100),
    _card("hdr", gbit=200),
    _card("ndr", gbit=400),
    _line(
        "qdr",
        gbit=40,
        share=0.8,
        latency=7e-6,
        source=f"data sheet: 8 of 10 bits are data; latency {_ASSUMED}: that of fdr",
    ),
    _line(
        "fdr",
        gbit=56,
        share=0.72,
        latency=7e-6,
        source="MG-WFBP's code: 5 GB/s, rings of 4, 8 and 16 machines take 42, 98 and 236 us",
    ),
    _long_line("wan-500m", gbit=0.5, round_trip=0.06),
    _long_line("wan-4g", gbit=4, round_trip=0.03),
)
_BOXES = (
    _box("pcie3", 10e9, _PCIE_S, f"{_ASSUMED}: 10 of 12 GB/s in NCCL's source (topo.h)"),
    _box("pcie4", 24e9, _PCIE_S, _TOPOLOGY),
    _box("pcie5", 48e9, _PCIE_S, _TOPOLOGY),
    _box("pcie6", 96e9, _PCIE_S, _TOPOLOGY),
    _box("nvlink-v100", 120e9, _NVLINK_S, f"{_ASSUMED}: 0.8 of the data sheet"),
    _box("nvlink-a100", 235e9, _NVLINK_S, _TESTS),
    # The switch sums: 480 and 846 GB/s, as nccl-tests count 2 * 7/8 of the bytes.
    _box(
        "nvlink-h100",
        370e9,
        _NVLINK_S,
        f"{_SLIDE}: 370 GB/s, 480 summed by the switch",
        multicast=480e9 / 1.75,
    ),
    _box(
        "nvlink-b200",
        680e9,
        _NVLINK_S,
        f"{_TESTS}: 682 GB/s, 846 summed by the switch",
        multicast=846e9 / 1.75,
    ),
    _box("xgmi-mi300x", 313e9, _NVLINK_S, f"{_TESTS}, all 8 GPUs"),
)
_A100, _H100, _B200 = (
    next(box for box in _BOXES if box.name == name)
    for name in ("nvlink-a100", "nvlink-h100", "nvlink-b200")
)
_FIT = "between nodes fitted to published nccl-tests (experiments.predictions), inside as"
_SMALL = f"latency {_ASSUMED}: that of p6-b200"
_CLUSTERS = (
    # Nodes of 8 GPUs; NCCL takes its tree between them at all sizes that were fitted.
    _nodes(
        "dgx-a100",
        Link(27.5e-6, 192e9),
        f"NCCL's source (24 GB/s per card), not measured; latency {_ASSUMED}: that of dgx-h100",
        box=_A100,
    ),
    _nodes(
        "dgx-h100",
        Link(27.5e-6, 406e9, 3.2e-6),
        f"{_FIT} nvlink-h100",
        box=_H100,
        tree_nbytes=2**40,
    ),
    _nodes(
        "p6-b200", Link(101e-6, 449e9, 9.43e-6), f"{_FIT} nvlink-b200", box=_B200, tree_nbytes=2**40
    ),
    # Amazon's network cards (EFA), version 1 to 3.
    _nodes("p4d", Link(101e-6, 42.5e9), f"{_TESTS}: 340 Gbit/s; {_SMALL}", box=_A100),
    _nodes("p5", Link(101e-6, 330e9), f"{_ASSUMED}: 0.82 of the data sheet; {_SMALL}", box=_H100),
    _nodes("p5en", Link(101e-6, 365e9), f"{_TESTS}, 4 nodes of H200; {_SMALL}", box=_H100),
    _nodes(
        "gb200-nvl72",
        # 72 cards of 400 Gbit/s. nccl-tests count 2 * 31/32 of the bytes of 32 GPUs.
        Link(_NET_S, 72 * 48e9),
        f"{_SLIDE}, 32 GPUs: 680 GB/s, 850 summed by the switch; between racks {_ASSUMED}: ndr",
        box=Fabric(
            "rack",
            Link(_NET_S, 48e9),
            inside=Link(_NVLINK_S, 680e9),
            multicast=850e9 / (2 * 31 / 32),
        ),
        ranks_per_node=72,
    ),
)
PRESETS: dict[str, Fabric] = {fabric.name: fabric for fabric in (*_LINES, *_BOXES, *_CLUSTERS)}


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
    near = difflib.get_close_matches(str(name), PRESETS, n=1)
    hint = f"; did you mean {near[0]!r}? Presets" if near else "; presets"
    raise ValueError(
        f"fabric({shown(str(name))}): neither a file nor a preset{hint} are {', '.join(PRESETS)}"
    )
