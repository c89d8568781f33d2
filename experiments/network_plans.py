"""Reads the plans of the network study: a scheme, the class that reduces, and its buckets."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["Plan", "plan_of"]

ONE_BUCKET_MB = 1000.0
_TEXT = re.compile(
    r"(?P<scheme>.*?)(?P<torch> on torch)?( in (?P<cap>[\d.]+) MiB)?(?P<copies> by copies)?"
)


class Plan(NamedTuple):
    """Describes how a model is trained.

    Attributes:
        scheme: name with options, as "powersgd:rank=2".
        on_torch: by torch's DistributedDataParallel, otherwise by ours.
        cap_mb: MiB at which a bucket is full. None: the default of our class, one bucket on
            torch's.
        by_copies: gradients are copied to buckets and back, otherwise they are views of them. Our
            class always copies here.
    """

    scheme: str
    on_torch: bool
    cap_mb: float | None
    by_copies: bool


def plan_of(text: str) -> Plan:
    """Returns the plan of a text like "acpsgd:rank=4 on torch in 2 MiB by copies"."""
    found = _TEXT.fullmatch(text)
    assert found is not None  # every part is optional
    on_torch, cap = found["torch"] is not None, found["cap"]
    cap_mb = float(cap) if cap else ONE_BUCKET_MB if on_torch else None
    return Plan(found["scheme"], on_torch, cap_mb, found["copies"] is not None)
