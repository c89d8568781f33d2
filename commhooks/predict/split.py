"""Predicts plans with one scheme for the first buckets of a step and another for the last ones.

The last bucket starts when backward is over, so that nothing hides it; the first ones have all of
backward. A scheme that sends less, or computes less, can thus pay for the last ones alone.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from commhooks.core.scheme import Scheme
from commhooks.core.settings import check_settings, shown
from commhooks.errors import OptionError
from commhooks.predict.device import Device
from commhooks.predict.fabric import Fabric
from commhooks.predict.pipeline import Parts, pipelined
from commhooks.predict.planned import planned
from commhooks.predict.step import Step, message_seconds
from commhooks.predict.workload import Buckets, Workload
from commhooks.wrappers.per_parameter import PerParameter, Rule

__all__ = ["Split", "best_split", "split_scheme"]


@dataclass(frozen=True)
class Split:
    """Describes a plan of two schemes.

    Attributes:
        first, last: names of the schemes for the first and for the last buckets of a step.
        count: number of last buckets.
        of: number of all buckets.
        parameters: those of the last buckets.
    """

    first: str
    last: str
    count: int
    of: int
    parameters: tuple[str, ...]

    def __post_init__(self) -> None:
        check_settings(self)
        if not all(isinstance(one, str) for one in self.parameters):
            raise OptionError(f"Split(parameters=...): names, got {shown(self.parameters)}")

    def __str__(self) -> str:
        which = "bucket" if self.count == 1 else f"{self.count} buckets"
        return f"{self.first}, then {self.last} for the last {which} of {self.of}"


def split_scheme(split: Split, schemes: Mapping[str, Scheme]) -> Scheme:
    """Returns the scheme that runs a plan; ``schemes``: by the names that the plan has."""
    last = schemes[split.last]
    # A rule's name is a pattern.
    rules = [Rule(last, name=glob.escape(name)) for name in split.parameters]
    return PerParameter(rules, default=schemes[split.first])


def best_split(
    schemes: Mapping[str, Scheme],
    workload: Workload,
    *,
    ranks: int,
    fabric: Fabric,
    device: Device,
    cap_mb: float,
    first_mb: float = 1.0,
) -> tuple[Split, Step] | None:
    """Returns the fastest plan of two of the schemes, of all pairs and numbers of last buckets.

    None if there is one bucket, or one scheme.

    Args:
        schemes: by name; see :func:`commhooks.predict.predict_step` for the other arguments.
    """
    buckets = workload.buckets(cap_mb=cap_mb, first_mb=first_mb)
    count = len(buckets.ready)
    if count < 2 or len(schemes) < 2:
        return None
    names = list(schemes)
    exchanges = _exchanges(list(schemes.values()), buckets, ranks, fabric, device)
    pairs = [(a, b) for a in range(len(names)) for b in range(len(names)) if a != b]
    cases = np.array([(a, b, last) for a, b in pairs for last in range(1, count)]).T
    # The scheme of each bucket, by case.
    which = np.where(np.arange(count)[:, None] < count - cases[2], cases[0], cases[1])
    ends = pipelined(
        _chosen(exchanges, which),
        backward_ends=workload.forward_s + workload.backward_s,
        contention=device.contention,
    )
    best = int(ends.argmin())
    first, last, lasting = cases[:, best].tolist()
    members = [name for bucket in buckets.names[count - lasting :] for name in bucket]
    split = Split(names[first], names[last], lasting, count, tuple(members))
    taken = _chosen(exchanges, which[:, [best]])
    plans = [
        planned(schemes[names[scheme]], shapes, ranks)
        for scheme, shapes in zip(which[:, best].tolist(), buckets.shapes, strict=True)
    ]
    messages = [message for plan in plans for message in plan.messages]
    return split, Step(
        step_s=float(ends[best])
        + workload.optimizer_s
        + workload.behind_s * np.count_nonzero(taken.rounds),
        compute_s=workload.compute_s,
        wire_s=float(taken.wire.sum()),
        codec_s=float(taken.codec.sum() + taken.overlap.sum()),
        payload_nbytes=sum(message.nbytes for message in messages),
        wire_nbytes=sum(message.wire_nbytes for message in messages),
        rounds=len(messages),
    )


def _exchanges(
    schemes: Sequence[Scheme], buckets: Buckets, ranks: int, fabric: Fabric, device: Device
) -> Parts:
    """Returns what every bucket takes under every scheme: a case for each scheme."""
    plans = [[planned(scheme, shapes, ranks) for shapes in buckets.shapes] for scheme in schemes]
    parts = Parts.empty(
        buckets=len(buckets.ready),
        rounds=max(len(one.messages) for many in plans for one in many),
        cases=(len(schemes),),
    )
    parts.ready[:] = buckets.ready[:, None]
    for s, scheme in enumerate(schemes):
        for b, (shapes, plan) in enumerate(zip(buckets.shapes, plans[s], strict=True)):
            seconds = device.parts(scheme, shapes, ranks)
            parts.fill(seconds, (b, s))
            wire, shared = message_seconds(plan.messages, ranks, [fabric])
            for m, message in enumerate(plan.messages):
                parts.wire[b, m, s], parts.shared[b, m, s] = wire[m, 0], shared[m, 0]
                parts.limited[b, m, s] = message.collective == "all_reduce"
                parts.core[b, m, s] = message.wire_nbytes * fabric.core_s_per_byte
    return parts


def _chosen(parts: Parts, which: np.ndarray) -> Parts:
    """Returns what buckets take if each has a scheme of its own, by bucket and case."""
    each = np.arange(len(which))[:, None]
    rounds = np.arange(parts.codec.shape[1])[:, None]
    by_part = (each[:, None], rounds, which[:, None])
    return replace(
        parts,
        ready=parts.ready[each, which],
        rounds=parts.rounds[each, which],
        codec=parts.codec[by_part],
        overlap=parts.overlap[by_part],
        wire=parts.wire[by_part],
        shared=parts.shared[by_part],
        limited=parts.limited[by_part],
        core=parts.core[by_part],
    )
