"""The schemes that are tried, wrappers around them, and which law each is under."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

import commhooks
import commhooks.research.baselines
from commhooks import (
    ErrorFeedback,
    PerParameter,
    Rule,
    Schedule,
    Scheme,
)
from commhooks.core._scheme import children, walk
from commhooks.schemes import TwoPhaseCast
from commhooks.wrappers import (
    EF21,
    AveragedFeedback,
    Cast,
    Guard,
    PeriodicDense,
    TwoPhase,
)
from commhooks.wrappers._base import Choice
from commhooks.wrappers._feedback import keeps_residual
from tests.hook.test_cut_buckets import Small

__all__ = ["OPTIONS", "SCHEMES", "WRAPPERS", "Law", "build", "law_of"]

# By name, options that suit a model of some hundred entries.
SCHEMES: dict[str, dict[str, Any]] = {
    "none": {},
    "allreduce": {},
    "fp16": {},
    "bf16": {},
    "powersgd": {"rank": 2, "min_compression_rate": 1.0},
    "acpsgd": {"rank": 2, "min_compression_rate": 1.0},
    "batched_powersgd": {"rank": 1},
    "int8": {"block": 64},
    "fp8": {"block": 64},
    "int4": {"block": 64},
    "onebit": {"block": 64},
    "sdp4bit": {"local_size": 2, "inside_block": 64, "between_block": 64},
    "eden": {"bits": 2, "block": 128},
    "topk": {"ratio": 0.1},
    "random_k": {"ratio": 0.1},
    "signsgd": {},
    "dgc": {"ratio": 0.1},
    "demo": {},
    "onebit_adam": {"freeze_step": 2, "block": 64},
    "noop": {},
}
# A codec of ``encode`` and ``decode`` only, as users write them, which is not drawn.
CODEC: dict[str, dict[str, Any]] = {"qsgd": {"block": 64}}
# Those that code each parameter, or each entry, by itself: a small gradient beside large ones has
# errors of its own size. In the others it shares a block, a scale or a matrix with them.
APART = {
    *("none", "allreduce", "fp16", "bf16", "topk", "random_k", "powersgd", "acpsgd", "noop"),
}
# Of ``commhooks.make``, for any scheme.
OPTIONS: dict[str, tuple[Any, ...]] = {
    "error_feedback": (True,),
    "start_step": (2,),
    "wire_dtype": ("fp16", "bf16"),
    "coalesce": (True,),
}
WRAPPERS: dict[str, Callable[[Scheme], Scheme]] = {
    "periodic": lambda value: PeriodicDense(value, every=3),
    "guard": lambda value: Guard(value, every=2),
    "rules": lambda value: PerParameter(
        [Rule(commhooks.make("none"), max_dim=1), Rule(value, name="*middle*")], default=value
    ),
    "schedule": lambda value: Schedule([(0, commhooks.make("none")), (2, value)]),
    "schedule_off": lambda value: Schedule([(0, value), (2, commhooks.make("bf16"))]),
    "two_phase": lambda value: ErrorFeedback(TwoPhase(_bare(value))),
    "ef21": lambda value: EF21(_bare(value), momentum=0.5),
    "averaged": lambda value: AveragedFeedback(_bare(value)),
}
# As ``WRAPPERS``, but not drawn.
OTHERS: dict[str, Callable[[Scheme], Scheme]] = {"cut": lambda value: Small(value, 40)}


def _bare(scheme: Scheme) -> Any:
    return scheme.scheme if isinstance(scheme, ErrorFeedback) else scheme


def build(name: str, options: dict[str, Any], wrap: tuple[str, ...]) -> Scheme:
    """The scheme of a case."""
    scheme = commhooks.make(name, **{**{**SCHEMES, **CODEC}[name], **options})
    for value in wrap:
        scheme = {**WRAPPERS, **OTHERS}[value](scheme)
    return scheme


class Law(NamedTuple):
    """The law that holds of what a scheme applies.

    Attributes:
        kind: "sum" (applied and residual are the sum of gradients; with no residual, each step is
            exact), "noisy" (likewise, but for noise), "other", "local" (nothing is averaged).
        noise: most that the squared error of a step can be expected to be, in squared gradients.
        wire: spacing of 1 in the narrowest type that a payload takes; 0: the gradient's own.
        least: the smallest number of that type.
    """

    kind: str
    noise: float = 0.0
    wire: float = 0.0
    least: float = 0.0


def law_of(scheme: Scheme) -> Law:
    """The law of a scheme."""
    inside = list(walk(scheme))
    kinds = [torch.finfo(o.dtype) for o in inside if isinstance(o, (Cast, TwoPhaseCast))]
    wire = max((kind.eps for kind in kinds), default=0.0)
    least = max((kind.eps * kind.tiny for kind in kinds), default=0.0)
    if not scheme.traits.averages:
        return Law("local" if isinstance(scheme, commhooks.schemes.Noop) else "other")
    if scheme.traits.returns == "update" or any(
        isinstance(value, (EF21, AveragedFeedback)) for value in inside
    ):
        return Law("other")
    noise = 0.0
    for leaf in _leaves(scheme):
        if keeps_residual(leaf):
            continue
        if leaf.traits.biased:
            return Law("other")
        noise = max(noise, (1 + leaf.traits.error.variance) ** max(leaf.traits.rounds, 1) - 1)
    return Law("noisy" if noise else "sum", noise, wire, least)


def _leaves(scheme: Scheme) -> Iterator[Scheme]:
    """The schemes that run side by side, or one after the other."""
    if isinstance(scheme, (Choice, commhooks.wrappers.DelayedStart)):
        for value in children(scheme):
            yield from _leaves(value)
    elif isinstance(scheme, (Guard, PeriodicDense, commhooks.wrappers.Coalesced)):
        yield from _leaves(scheme.scheme)
    else:
        yield scheme
