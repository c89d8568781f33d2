"""Defines the links of the study: how they are made, and step times where they cannot be made."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from experiments.tools.hosts import messages_from_hosts
from experiments.tools.namespaces import Access
from experiments.tools.processes import Send
from experiments.tools.training import Settings, train

__all__ = [
    "Link",
    "bucket_count",
    "computed",
    "how_made",
    "messages_on",
    "parse",
    "run_rank",
    "settings_on",
]

LINK_UNTIMED = 4  # steps on a limited link before the clock starts: dense ones, rebuilt buckets
SLOW = 0.1  # seconds for a dense gradient, from which on a link gets fewer turns of one step
TIMEOUT = 900


@dataclass(frozen=True)
class Link:
    """Describes the connection between the processes.

    Attributes:
        name: its name in tables.
        rate: bits per second in each direction. None: the loopback device of this machine.
    """

    name: str
    rate: float | None = None

    @property
    def where(self) -> str:
        """Returns the beginning of a sentence about the link."""
        return "On this machine, without a limit," if self.rate is None else f"At {self.name}"


def parse(text: str) -> Link:
    """Reads a link from "unlimited", or a rate such as "1gbit" or "100mbit".

    Raises:
        ValueError: the text is neither.
    """
    if text == "unlimited":
        return Link("unlimited")
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(mbit|gbit)", text)
    if match is None or not float(match[1]):
        raise ValueError(f"a link is 'unlimited', or a rate as '100mbit' or '1gbit', not {text!r}")
    unit, factor = {"mbit": ("Mbit/s", 1e6), "gbit": ("Gbit/s", 1e9)}[match[2]]
    return Link(f"{match[1]} {unit}", float(match[1]) * factor)


def how_made(way: Access, *, wanted: bool = True) -> str:
    """Describes in a sentence how the limited links of this run are made.

    Args:
        way: the result of :func:`experiments.tools.namespaces.access`.
        wanted: whether links may be made; False with ``--computed``.
    """
    if not wanted:
        return "Limited links are computed from bytes, as asked (--computed)."
    if way.kind == "none":
        return f"Limited links are computed from bytes, they cannot be made here: {way.words}."
    return f"Limited links are made: {way.words}."


def settings_on(link: Link, settings: Settings, hooks: Sequence[str], nbytes: float) -> Settings:
    """Returns the settings for a limited link, where only times are measured: fewer steps.

    Args:
        link: a link with a rate.
        settings: settings of the run without a limit.
        hooks: schemes to time.
        nbytes: bytes of a dense gradient.
    """
    assert link.rate is not None
    # A step on a slow link takes a tenth of a second or more, enough to time it alone.
    block, turns = (1, 9) if 8 * nbytes / link.rate > SLOW else (settings.block, 13)
    return replace(
        settings,
        hooks=list(hooks),
        steps=LINK_UNTIMED + turns * block,
        untimed=LINK_UNTIMED,
        block=block,
        measures_error=False,
        dense_steps=1,
    )


def messages_on(link: Link, settings: Settings, world_size: int) -> Iterator[dict[str, Any]]:
    """Trains on hosts that the link joins, and yields the messages of rank 0."""
    assert link.rate is not None
    rate = f"{link.rate / 1e6:g}mbit"
    messages = messages_from_hosts(
        run_rank, asdict(settings), hosts=world_size, rate=rate, timeout=TIMEOUT
    )
    return (message.content for message in messages)


def run_rank(rank: int, world_size: int, send: Send, **settings: Any) -> None:
    """Trains in the process of a rank on a host."""
    train(rank, world_size, send, Settings(**settings))


def computed(
    unlimited_s: Sequence[float],
    *,
    wire_nbytes: float,
    rate: float,
    window_s: float,
    buckets: int,
) -> list[float]:
    """Computes step times on a link that cannot be made, from step times without a limit.

    The bytes of a step take ``t = 8 * wire_nbytes / rate``. They travel while backward computes,
    from the first full bucket on, but the last bucket leaves when backward has ended, so that
    ``max(t - window_s, t / buckets)`` is added to a step.

    Args:
        unlimited_s: seconds of a step without a limit, in each turn.
        wire_nbytes: bytes that a rank sends in a step.
        rate: bits per second of the link.
        window_s: seconds from the first full bucket to the last gradient of a step.
        buckets: number of buckets of a step.
    """
    on_link = 8 * wire_nbytes / rate
    exposed = max(on_link - window_s, on_link / max(buckets, 1))
    return [seconds + exposed for seconds in unlimited_s]


def bucket_count(dense_nbytes: float, bucket_cap_mb: float) -> int:
    """Returns the number of buckets of a gradient."""
    return math.ceil(dense_nbytes / (bucket_cap_mb * 2**20))
