"""Reads the setups of the network study: a scheme, the class that reduces, and its buckets."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["CHOICE", "Setup", "setup_of"]

# What "auto" has chosen, registered by name in the same buckets: that both differ is noise.
CHOICE = "auto's choice"
ONE_BUCKET_MB = 1000.0
_TEXT = re.compile(
    r"(?P<scheme>.+?)( on (?P<torch>torch))?( in (?P<cap>\d+\.?\d*) MiB)?( by (?P<copies>copies))?"
)


class Setup(NamedTuple):
    """Describes how a model is trained.

    Attributes:
        scheme: name with options, as "powersgd:rank=2".
        on_torch: by torch's DistributedDataParallel, otherwise by ours.
        cap_mb: MiB at which a bucket is full, the first one, too. None: the default of our class,
            one bucket on torch's.
        by_copies: gradients are copied to buckets and back, as they always are on our class here;
            otherwise they are views.
    """

    scheme: str
    on_torch: bool
    cap_mb: float | None
    by_copies: bool


def setup_of(text: str) -> Setup:
    """Returns the setup of a text like "acpsgd:rank=4 on torch in 2 MiB by copies".

    Raises:
        ValueError: it asks for copies on our class, which has no other way here, or for buckets of
            no size.
    """
    match = _TEXT.fullmatch(text)
    if (
        match is None
        or (match["copies"] and not match["torch"])
        or (match["cap"] and not 0 < float(match["cap"]) <= ONE_BUCKET_MB)
    ):
        raise ValueError(
            f"{text!r} is no setup: a scheme, then ' on torch', ' in 2 MiB' and, on torch, "
            f"' by copies' as you like"
        )
    on_torch, cap = match["torch"] is not None, match["cap"]
    cap_mb = float(cap) if cap else ONE_BUCKET_MB if on_torch else None
    return Setup(match["scheme"], on_torch, cap_mb, match["copies"] is not None)
