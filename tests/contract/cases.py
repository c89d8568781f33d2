"""Every registered scheme, by itself and inside the usual wrappers; layouts, gradients, bounds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import commhooks
from commhooks import ErrorFeedback, PerParameter, Rule, Scheme, Simulation
from commhooks.cli._app import load_files
from commhooks.core import Codec, Layout
from commhooks.core._scheme import walk
from commhooks.research.baselines import AlignedTopK, RandomBlock
from commhooks.schemes import ACPSGD, BatchedPowerSGD, Dense, PowerSGD, RandomK, TwoPhaseCast
from commhooks.wrappers import EF21, AveragedFeedback, Cast, Guard, PeriodicDense, Scaled, TwoPhase
from commhooks.wrappers._feedback import keeps_residual
from tests.shelf import BASELINES

# Files with more schemes, to run all of this on them.
load_files(
    [Path(path) for path in os.environ.get("COMMHOOKS_SCHEMES", "").split(os.pathsep) if path]
)

WORLD_SIZES = (1, 2, 3, 4, 8)
START_STEP = 1  # of the delayed start among the variants
# A 4-D weight, two matrices of one shape, vectors, 1 x n, n x 1, a scalar, nothing at all.
SHAPES = {
    "conv": (6, 4, 3, 3),
    "weight": (24, 20),
    "bias": (24,),
    "row": (1, 33),
    "column": (31, 1),
    "empty": (0, 5),
    "scalar": (),
    "twin": (24, 20),
    "one": (1,),
}
LAYOUT = Layout(list(SHAPES), list(SHAPES.values()))
_MIXED = ("twin", "scalar", "bias", "conv", "column", "one", "empty", "weight", "row")
# One bucket; three in another order; pairs that were apart.
SPLITS = (
    [LAYOUT],
    [LAYOUT.pick([LAYOUT.names.index(n) for n in part]) for part in (_MIXED[:3], _MIXED[3:])],
    [LAYOUT.pick([LAYOUT.names.index(n) for n in part]) for part in (_MIXED[4:], _MIXED[:4])],
)


# What the environment says elsewhere; rows as small as the parameters here.
OPTIONS: dict[str, dict[str, Any]] = {
    "sdp4bit": {"local_size": 2},
    "aligned_topk": {"row": 8},
    "onebit_adam": {"freeze_step": 1},
}
# Options that make another scheme of a name, by a name for the test's id.
FORMS: dict[str, tuple[str, dict[str, Any]]] = {"fp8_mx": ("fp8", {"format": "mx_e4m3"})}


# Those that keep an error of their own, and how they do not.
WITHOUT: dict[str, dict[str, Any]] = {"sdp4bit": {"memory": False}}


def make(name: str, **options: Any) -> Scheme:
    registered_name, form = FORMS.get(name, (name, {}))
    return commhooks.make(registered_name, **OPTIONS.get(name, {}), **form, **options)


def bare(name: str, *, feedback: bool = False, **options: Any) -> Scheme:
    """The scheme to put feedback around, or with plain error feedback around it."""
    return make(name, error_feedback=feedback, **WITHOUT.get(name, {}), **options)


def _contracting(scheme: Scheme) -> Scheme:
    return Scaled(scheme) if scheme.traits.error.variance > 1 else scheme


def _two_phase(scheme: Scheme) -> Scheme:
    assert isinstance(scheme, Codec)
    packed = TwoPhase(scheme)
    return packed if packed.traits.error.variance > 1 else ErrorFeedback(packed)


VARIANTS: dict[str, Callable[[str], Scheme]] = {
    "plain": lambda name: make(name, error_feedback=False),
    "feedback": lambda name: bare(name, feedback=True),
    "fp16": lambda name: make(name, error_feedback=False, wire_dtype="fp16"),
    "fp16_feedback": lambda name: bare(name, feedback=True, wire_dtype="fp16"),
    "ef21": lambda name: EF21(_contracting(bare(name)), momentum=0.5),
    "two_phase": lambda name: _two_phase(make(name, error_feedback=False)),
    "averaged": lambda name: AveragedFeedback(_contracting(bare(name))),
    "guard": lambda name: Guard(make(name), every=2),
    "start_step": lambda name: make(name, start_step=START_STEP),
    "periodic_dense": lambda name: PeriodicDense(make(name), every=3),
    "coalesce": lambda name: make(name, coalesce=True),
    "per_parameter": lambda name: PerParameter(
        [
            Rule(make("none"), max_dim=1),
            Rule(bare(name, feedback=make(name).traits.returns != "update"), name="twin"),
        ],
        default=bare(name, feedback=make(name).traits.returns != "update"),
    ),
}


# One scheme for each way in which wrappers meet schemes; the others have a way of one of these.
REPRESENTATIVES = {
    "allreduce": "dense",
    "bf16": "a wrapper itself",
    "noop": "nothing is exchanged",
    "terngrad": "a codec, unbiased, scaled under feedback",
    "topk": "packed, gathered",
    "int4": "packed, two phases, draws, the residual fused",
    "random_k": "places that all ranks draw",
    "powersgd": "two rounds, remembers",
    "acpsgd": "one round, another in turn, remembers",
    "dgc": "rules inside, momentum",
    "onebit_adam": "starts dense",
    "gossip": "ranks differ",
}


# Its mean is packed by the codec that all begin with, under feedback.
SECOND_ROUNDING = ("qsgd", "two_phase")


class Case(NamedTuple):
    """A registered name in a variant."""

    name: str
    variant: str

    @property
    def at_every_run(self) -> bool:
        """Every built-in scheme by itself and as it is made by name, a few in every variant."""
        if self.name in REPRESENTATIVES or (self.name, self.variant) == SECOND_ROUNDING:
            return True
        by_itself = self.variant == "plain" or repr(self.scheme) == repr(make(self.name))
        return by_itself and self.name not in BASELINES

    @property
    def scheme(self) -> Scheme:
        return VARIANTS[self.variant](self.name)

    def __str__(self) -> str:
        return f"{self.name}-{self.variant}"


def registered() -> list[str]:
    """The names and forms of schemes, without those that only another name for the same scheme."""
    names: dict[str, str] = {}
    for name in [*commhooks.scheme_names(), *FORMS]:
        if not name.startswith("test_"):
            names.setdefault(repr(make(name)), name)
    return sorted(names.values())


LINEAR_SCHEMES = (Dense, PowerSGD, BatchedPowerSGD, ACPSGD, RandomK, RandomBlock)
_OF_AVERAGES = ("feedback", "fp16_feedback", "ef21", "averaged", "periodic_dense")


def _makes_sense(name: str, variant: str) -> bool:
    scheme = bare(name)
    if variant == "two_phase":
        return isinstance(scheme, Codec)
    if variant == "guard":
        return scheme.traits.returns == "mean"
    if variant == "start_step":
        return not scheme.traits.dense_warmup
    return scheme.traits.returns != "update" or variant not in _OF_AVERAGES


def named(names: Iterable[str]) -> pytest.MarkDecorator:
    """A test of each name, of baselines in ``make test-all`` only."""
    marked = [
        pytest.param(name, marks=pytest.mark.slow if name in BASELINES else ()) for name in names
    ]
    return pytest.mark.parametrize("name", marked)


CASES = [
    Case(name, variant)
    for name in registered()
    for variant in VARIANTS
    if _makes_sense(name, variant)
]


def _averages(scheme: Scheme) -> bool:
    return scheme.traits.returns == "mean"


def _is_linear(scheme: Scheme) -> bool:
    """Returns whether the payloads of all ranks are summed by an all-reduce."""
    *_, innermost = walk(scheme)
    return isinstance(innermost, LINEAR_SCHEMES) and not isinstance(innermost, AlignedTopK)


AGREEING = [
    case
    for case in CASES
    if case.scheme.traits.averages and case.scheme.traits.agrees and make(case.name).traits.averages
]
AVERAGING = [case for case in CASES if _averages(case.scheme) and _averages(make(case.name))]
_BARE = {name: make(name, error_feedback=False) for name in registered()}
LINEAR = [name for name, scheme in _BARE.items() if _averages(scheme) and _is_linear(scheme)]
# Without feedback inside, which would send more than the gradient.
MEMORYLESS = [
    case
    for case in AVERAGING
    if not keeps_residual(case.scheme) and not isinstance(case.scheme, (EF21, AveragedFeedback))
]
FEEDBACK = [case for case in AVERAGING if keeps_residual(case.scheme)]


def has_noise(scheme: Scheme) -> bool:
    """Returns whether a step gives less, or something else, than the rounded mean of gradients."""
    parts = [scheme, *(scheme.schemes if isinstance(scheme, PerParameter) else ())]
    return any(
        isinstance(inner, (EF21, AveragedFeedback)) or inner.traits.error.variance > 2**-8
        for part in parts
        for inner in walk(part)
    )


def normal(numel: int, *seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """N(0, 1); ``seed`` is any tuple of small numbers."""
    number = 1
    for part in seed:
        number = number * 1009 + part
    generator = torch.Generator().manual_seed(number)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def rank_gradients(world_size: int, step: int, layout: Layout = LAYOUT) -> list[Tensor]:
    """Returns a flat float32 gradient for each rank."""
    return [normal(layout.numel, step, rank) for rank in range(world_size)]


def permuted(flat: Tensor, source: Layout, buckets: Sequence[Layout]) -> Tensor:
    """``flat``, laid out as ``source``, in the order of ``buckets``."""
    views = dict(zip(source.names, source.views(flat), strict=True))
    return torch.cat([views[name].reshape(-1) for bucket in buckets for name in bucket.names])


def joined(buckets: Sequence[Layout]) -> Layout:
    """The layout of all buckets together."""
    return Layout(
        [name for bucket in buckets for name in bucket.names],
        [shape for bucket in buckets for shape in bucket.shapes],
    )


def run_split(ranks: Simulation, step: int, split: int = 0) -> list[Tensor]:
    """A step in the given split; gradients in and means out are laid out as ``LAYOUT``."""
    buckets, world_size = SPLITS[split], len(ranks.engines)
    grads = [permuted(grad, LAYOUT, buckets) for grad in rank_gradients(world_size, step)]
    means = ranks.step(grads, buckets=buckets)
    return [permuted(mean, joined(buckets), [LAYOUT]) for mean in means]


def simulation(case: Case, world_size: int, layout: Layout = LAYOUT) -> Simulation:
    """Simulated ranks that run ``case``."""
    shapes = dict(zip(layout.names, layout.shapes, strict=True))
    return Simulation(case.scheme, shapes, world_size=world_size, seed=5)


def memory_of(ranks: Simulation) -> list[dict[tuple[str, str], Tensor]]:
    """A copy of everything each rank remembers."""
    return [
        {(key, name): value.clone() for key, name, value in engine.memory.items()}
        for engine in ranks.engines
    ]


def epsilon(scheme: Scheme, dtype: torch.dtype = torch.float32) -> float:
    """Spacing of 1 in the narrowest type that a payload or a gradient of ``scheme`` takes."""
    parts = [scheme, *(scheme.schemes if isinstance(scheme, PerParameter) else ())]
    inside = [inner for part in parts for inner in walk(part)]
    narrow = [inner.dtype for inner in inside if isinstance(inner, (Cast, TwoPhaseCast))]
    return max(torch.finfo(kind).eps for kind in (*narrow, dtype))


def rounding(scheme: Scheme, grads: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> float:
    """Bounds the distance of sums over ranks from exact ones, per entry.

    A payload entry is at most the Euclidean norm of the gradient (an entry of it, or of its
    product with a unit vector). The mean over n ranks rounds each of n terms of size norm / n and
    each of n - 1 partial sums, half a spacing each: below (n + 1) / 2 spacings of the norm.
    Encoding multiplies by unit vectors and sums up to k = 40 terms in float32 (the longest inner
    dimension here, and of the square of the batched scheme): k spacings; decoding the same.
    """
    norm = max(float(grad.double().norm()) for grad in grads)
    wide = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    return norm * ((len(grads) + 1) / 2 * epsilon(scheme, dtype) + 2 * 40 * wide)
