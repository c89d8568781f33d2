"""The links of the study: how they are made, and what they would cost where they are not."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch.distributed as dist

from experiments.bandwidth.training import Settings, train
from experiments.hosts import joined, messages_from_hosts
from experiments.namespaces import Access

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

LINK_UNTIMED = 4
SLOW = 0.1  # seconds a dense gradient takes on a link that gets fewer turns, of one step each
TIMEOUT = 900


@dataclass(frozen=True)
class Link:
    """What joins the processes.

    Attributes:
        name: in words.
        rate: bits per second in each direction; None: the loopback device of this machine.
    """

    name: str
    rate: float | None = None

    @property
    def where(self) -> str:
        """As a sentence begins."""
        return "On this machine, without a limit," if self.rate is None else f"At {self.name}"


def parse(text: str) -> Link:
    """A link from "unlimited", "1gbit" or "100mbit".

    Raises:
        ValueError: something else.
    """
    if text == "unlimited":
        return Link("unlimited")
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(mbit|gbit)", text)
    if found is None or not float(found[1]):
        raise ValueError(f"a link is 'unlimited', or a rate as '100mbit' or '1gbit', not {text!r}")
    unit, factor = {"mbit": ("Mbit/s", 1e6), "gbit": ("Gbit/s", 1e9)}[found[2]]
    return Link(f"{found[1]} {unit}", float(found[1]) * factor)


def how_made(way: Access, *, wanted: bool = True) -> str:
    """A sentence about the limited links of this run.

    Args:
        way: what :func:`experiments.namespaces.access` found.
        wanted: whether links may be made at all (not with ``--computed``).
    """
    if not wanted:
        return "Limited links are computed from bytes, as asked (--computed)."
    if way.kind == "none":
        return f"Limited links are computed from bytes, they cannot be made here: {way.words}."
    return f"Limited links are made: {way.words}."


def settings_on(link: Link, settings: Settings, hooks: Sequence[str], nbytes: float) -> Settings:
    """For the timing on a limited link: fewer steps, and none watched.

    Args:
        link: one with a rate.
        settings: of the run without a limit.
        hooks: the schemes to time.
        nbytes: of a gradient, from which a step's time follows.
    """
    assert link.rate is not None
    block, turns = (1, 9) if 8 * nbytes / link.rate > SLOW else (settings.block, 13)
    return replace(
        settings,
        hooks=list(hooks),
        steps=LINK_UNTIMED + turns * block,
        untimed=LINK_UNTIMED,
        block=block,
        watch=False,
        dense_steps=1,
    )


def messages_on(link: Link, settings: Settings, world_size: int) -> Iterator[dict[str, Any]]:
    """Trains on hosts that are joined by the link; yields what rank 0 sends."""
    assert link.rate is not None
    rate = f"{link.rate / 1e6:g}mbit"
    messages = messages_from_hosts(
        "experiments.bandwidth", asdict(settings), hosts=world_size, rate=rate, timeout=TIMEOUT
    )
    return (message.content for message in messages)


def run_rank(settings: dict[str, Any]) -> None:
    """In the process of a rank on a host: prints what it has to say as JSON, one object a line."""
    with joined() as rank:
        train(
            rank,
            dist.get_world_size(),
            lambda message: print(json.dumps(message), flush=True),
            Settings(**settings),
        )


def computed(
    unlimited_s: Sequence[float],
    *,
    wire_nbytes: float,
    rate: float,
    window_s: float,
    buckets: int,
) -> list[float]:
    """Step times on a link that cannot be made here, from those without a limit.

    The bytes take ``t = 8 * wire_nbytes / rate``. They travel while backward computes from the
    first full bucket on, and the last bucket only leaves when backward has ended, so that
    ``max(t - window_s, t / buckets)`` is added to a step.

    Args:
        unlimited_s: seconds of a step in each turn.
        wire_nbytes: a rank sends in a step.
        rate: of the link, bits per second.
        window_s: of a step, from the first full bucket to the last gradient.
        buckets: of a step.
    """
    on_link = 8 * wire_nbytes / rate
    exposed = max(on_link - window_s, on_link / max(buckets, 1))
    return [seconds + exposed for seconds in unlimited_s]


def bucket_count(dense_nbytes: float, bucket_cap_mb: float) -> int:
    """Buckets of a gradient."""
    return math.ceil(dense_nbytes / (bucket_cap_mb * 2**20))
