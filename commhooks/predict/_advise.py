"""Chooses a scheme and a bucket size by prediction, within a budget of error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from commhooks.core._scheme import Scheme
from commhooks.core._settings import shown
from commhooks.errors import OptionError
from commhooks.predict._device import Device
from commhooks.predict._fabric import Fabric
from commhooks.predict._step import Step, predict_step
from commhooks.predict._workload import Workload
from commhooks.research._simulation import Simulation
from commhooks.wrappers._feedback import ErrorFeedback
from commhooks.wrappers._make import make

__all__ = [
    "CANDIDATES",
    "CAPS_MB",
    "SAFE_ERROR",
    "Option",
    "advise",
    "best_of",
    "error_of",
    "made_candidates",
]

# By the bits that they send; of schemes with about as many, those that cost least to compute.
CANDIDATES = ("none", "bf16", "int8", "int4", "sdp4bit", "onebit", "powersgd", "topk")
CAPS_MB = (1.0, 2.0, 4.0, 8.0, 16.0, 25.0, 50.0, 100.0)
# A scheme has to win by this share of the step: predictions are not more exact than that.
MARGIN = 0.02
# Relative squared error of an exchange up to which a scheme is safe: int8 has 6e-5, int4 0.02.
SAFE_ERROR = 1e-3
# Entries on which the error of a scheme is measured.
_SAMPLE = 2**20


@dataclass(frozen=True)
class Option:
    """Holds the prediction of one scheme with one bucket size.

    Attributes:
        name: of the scheme, with options.
        scheme: the scheme.
        cap_mb: MiB at which a bucket is full.
        step: the prediction.
        error: relative squared error of an exchange.
    """

    name: str
    scheme: Scheme
    cap_mb: float
    step: Step
    error: float

    def __str__(self) -> str:
        return f"{self.name} in buckets of {self.cap_mb:g} MiB"


def made_candidates(candidates: Iterable[str] | Mapping[str, Scheme]) -> dict[str, Scheme]:
    """Returns schemes by name; "none" and "bf16" are always among them.

    Args:
        candidates: registered names, or schemes by any name.

    Raises:
        ValueError: a scheme does not average gradients.
    """
    if isinstance(candidates, str):
        raise OptionError(
            f"candidates=... is a list of names, or schemes by name: [{candidates!r}], not "
            f"{candidates!r}"
        )
    if isinstance(candidates, Mapping):
        given = dict(candidates)
    elif isinstance(candidates, Iterable) and all(isinstance(name, str) for name in candidates):
        given = {name: make(name) for name in candidates}
    else:
        raise OptionError(
            f"candidates=... is a list of names, or schemes by name as in "
            f'{{"mine": scheme}}, got {shown(candidates)}'
        )
    usual = {"none": make("none"), "bf16": make("bf16")}
    for name, scheme in given.items():
        if not isinstance(name, str) or not isinstance(scheme, Scheme):
            raise OptionError(
                f"candidates=...: schemes by name, got {shown(scheme)} by {shown(name)}"
            )
        if scheme != usual.get(name, scheme):
            raise OptionError(f"candidates=...: {name!r} is {usual[name]}; take another name")
        if scheme.traits.returns != "mean":
            raise ValueError(
                f"candidates={shown(name)}: it returns no average of gradients, so that it is no "
                f"replacement for the others"
            )
    return usual | given


def error_of(scheme: Scheme, gradients: Mapping[str, Tensor] | None = None) -> float:
    """Returns the relative squared error of a scheme's mean over two ranks.

    Args:
        scheme: the scheme; feedback around it, which sends the error later, is left out.
        gradients: of a model, by parameter name: both ranks have them. None: normal entries.
    """
    while isinstance(scheme, ErrorFeedback):
        scheme = scheme.scheme
    if gradients is None:
        generator = torch.Generator().manual_seed(0)
        gradients = {"w": torch.randn(512, 512, generator=generator)}
    taken: dict[str, Tensor] = {}
    total = 0
    for name, gradient in sorted(
        gradients.items(), key=lambda name_and_gradient: -name_and_gradient[1].numel()
    ):
        if not taken or total + gradient.numel() <= _SAMPLE:
            taken[name] = gradient
            total += gradient.numel()
    flat = torch.cat([gradient.detach().reshape(-1).float().cpu() for gradient in taken.values()])
    ranks = Simulation(
        scheme, {name: tuple(gradient.shape) for name, gradient in taken.items()}, world_size=2
    )
    for engine in ranks.engines:
        engine.step = 10**9  # after warm-ups and dense starts
    ranks.step([flat, flat])  # a first step may only learn scales or factors
    mean = ranks.step([flat, flat])[0]
    return float((mean - flat).square().sum() / flat.square().sum().clamp_min(1e-30))


def advise(
    workload: Workload,
    *,
    ranks: int,
    fabric: Fabric,
    device: Device,
    candidates: Iterable[str] | Mapping[str, Scheme] = CANDIDATES,
    max_error: float = 0.05,
    caps_mb: Sequence[float] = CAPS_MB,
    first_mb: float | None = None,
) -> list[Option]:
    """Returns predictions of all candidates within the budget, the fastest first.

    Args:
        workload: a step without communication.
        ranks: number of ranks.
        fabric: the links.
        device: computes the schemes' part.
        candidates: registered names, or schemes by name.
        max_error: largest relative squared error of an exchange of normal entries.
        caps_mb: bucket sizes, MiB.
        first_mb: size of the first bucket, MiB. None: that of the others, as with
            ``DistributedDataParallel(bucket_cap_mb=...)``.

    Raises:
        PredictionError: a scheme cannot be predicted; the message says why.
    """
    made = made_candidates(candidates)
    errors = {name: error_of(scheme) for name, scheme in made.items()}
    allowed = {
        name: scheme
        for name, scheme in made.items()
        if errors[name] <= max_error or name in ("none", "bf16")
    }
    where: dict[str, Any] = {"ranks": ranks, "fabric": fabric, "device": device}
    firsts = {cap_mb: cap_mb if first_mb is None else first_mb for cap_mb in caps_mb}
    options = []
    for name, scheme in allowed.items():
        steps = [
            predict_step(scheme, workload, **where, cap_mb=cap, first_mb=first)
            for cap, first in firsts.items()
        ]
        options += [
            Option(name, scheme, cap_mb, step, errors[name])
            for cap_mb, step in zip(firsts, steps, strict=True)
        ]
    options.sort(key=lambda option: option.step.step_s)
    return options


def best_of(options: Sequence[Option]) -> Option:
    """Returns the option to take: the fastest, or a simpler one that is nearly as fast.

    The simplest is "none", then "bf16", then the scheme that changes gradients least.
    """
    fastest = min(options, key=lambda option: option.step.step_s)
    near = [
        option for option in options if option.step.step_s <= fastest.step.step_s * (1 + MARGIN)
    ]
    for name in ("none", "bf16"):
        for option in sorted(near, key=lambda option: option.step.step_s):
            if option.name == name:
                return option
    return min(near, key=lambda option: (option.error, option.step.step_s))
