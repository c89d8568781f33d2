"""Describes what joins the ranks: links inside and between nodes, with presets and files."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from commhooks.core.settings import shown

__all__ = ["PRESETS", "Fabric", "Library", "Link", "fabric", "load_fabric", "save_fabric"]

Library = Literal["gloo", "nccl"]


@dataclass(frozen=True)
class Link:
    """Describes one level of a fabric.

    Attributes:
        latency: seconds that a message takes beside its bytes, from one member to the next.
        bandwidth: bytes per second that a member sends in one direction while all members send.
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not self.latency >= 0 or not self.bandwidth > 0:
            raise ValueError(f"Link(latency, bandwidth): 0 or more, and above 0, got {self}")


@dataclass(frozen=True)
class Fabric:
    """Describes the links between ranks.

    Attributes:
        name: shown in tables.
        between: of nodes, through all network cards of a node together.
        inside: of the ranks of a node.
        ranks_per_node: ranks that share a node's network cards.
        library: decides which algorithms there are: "nccl", or "gloo" with this package's lanes.
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
    core_s_per_byte: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
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
    except (json.JSONDecodeError, TypeError, KeyError, AttributeError) as error:
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


def _ethernet(name: str, gbit: float, share: float, latency: float, library: Library) -> Fabric:
    return Fabric(name, Link(latency, gbit / 8 * 1e9 * share), library=library, source=_TCP)


_TCP = "share of the rate that TCP reached in namespaces of this project (docs/results)"
PRESETS: dict[str, Fabric] = {
    one.name: one
    for one in (
        _ethernet("1gbe", 1, 0.94, 60e-6, "gloo"),
        _ethernet("10gbe", 10, 0.88, 40e-6, "gloo"),
        _ethernet("25gbe", 25, 0.83, 30e-6, "nccl"),
        _ethernet("100gbe", 100, 0.80, 20e-6, "nccl"),
    )
}
