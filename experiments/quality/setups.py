"""Lists the tasks and arms of the study: `plan.md` as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from experiments.tools.schemes import SCHEMES, VARIANTS, Entry
from experiments.tools.tasks import Task, characters, digits, lstm
from experiments.traces.minilm import minilm

__all__ = ["BASE", "NEGATIVE", "POSITIVE", "SETUPS", "Arm", "Setup", "small"]

BASE = "bf16"
POSITIVE, NEGATIVE = "positive control", "negative control"
FIRST_SEED, OTHER_SEEDS = 100, 1_000_000  # seeds below 100 were used to plan the study
CLIP = 0.5  # largest norm of a mean gradient


@dataclass(frozen=True)
class Arm:
    """Describes what is trained beside what.

    Attributes:
        name: in tables.
        entry: the scheme.
        base: name of the arm that it is compared with.
        role: a "positive control" has to be refuted; the "negative control" differs from its base
            in nothing but the seed.
        ranks: simulated ranks; None: those of the task.
        clip: norm to which mean gradients are clipped.
        seeds: runs; None: those of the task.
        first_seed: added to the number of a run.
    """

    name: str
    entry: Entry
    base: str = BASE
    role: str = ""
    ranks: int | None = None
    clip: float | None = None
    seeds: int | None = None
    first_seed: int = FIRST_SEED


@dataclass(frozen=True)
class Setup:
    """Describes a task of the study.

    Attributes:
        name: name of the task; the file of its runs has it.
        task: makes the task for a number of ranks and a seed.
        steps: steps of a run.
        seeds: runs of an arm.
        arms: what is trained.
        batch_size: rows of all ranks together.
        outcome: column of runs that is compared: "loss", or "misses" for one minus the accuracy.
        guess: outcome of a model that has learned nothing, with which a diverged run counts.
        rehearsal: makes the task with a model as small as it gets.
        ranks: simulated ranks.
        items: held-out items of which "misses" is the share.
    """

    name: str
    task: Callable[..., Task]
    steps: int
    seeds: int
    arms: tuple[Arm, ...]
    batch_size: int
    guess: float
    rehearsal: Callable[..., Task]
    outcome: str = "loss"
    ranks: int = 8
    items: int = 0


# ---- arms


def _arm(name: str, **changes: Any) -> Arm:
    return Arm(name, (SCHEMES | VARIANTS)[name], **changes)


BASELINE = _arm(BASE)
EDEN_4 = Arm("eden, 4 bits", Entry("eden", {"bits": 4}))
ONE_BIT = _arm("eden, 1 bit", role=POSITIVE)  # unbiased: it has no feedback
FEW = Arm(
    "topk 0.1 %, no feedback",
    Entry("topk", {"ratio": 0.001, "error_feedback": False}),
    role=POSITIVE,
)
NULL = replace(BASELINE, name="bf16, other seeds", role=NEGATIVE, first_seed=OTHER_SEEDS)
COMMON = (
    BASELINE,
    *map(_arm, ("int8", "int4", "eden, 2 bits", "powersgd, rank 4")),
    FEW,
)
CLIPPED = tuple(
    replace(_arm(name), name=f"{name}, clipped", base=f"{BASE}, clipped", clip=CLIP)
    for name in (BASE, "int4", "powersgd, rank 4")
)
OTHER_RANKS = tuple(
    replace(
        _arm(name), name=f"{name}, {ranks} ranks", base=f"{BASE}, {ranks} ranks", ranks=ranks,
        seeds=20,
    )
    for ranks in (2, 16)
    for name in (BASE, "int8", "int4")
)  # fmt: skip
MANY = (BASE, "int8", "int4", "powersgd, rank 4")  # decided at the narrow margin
ALL = (
    *(replace(arm, seeds=330) if arm.name in MANY else arm for arm in COMMON),
    *map(_arm, ("none", "fp8", "onebit", "powersgd, rank 2", "acpsgd, rank 8, bf16")),
    *map(_arm, ("topk 1 %", "sdp4bit")),
    EDEN_4,
    ONE_BIT,
    NULL,
    *CLIPPED,
    *OTHER_RANKS,
)

NAMED = (
    *(_arm(name) for name in (BASE, "none", "int8", "int4")),
    *(Arm(f"{name}, as named", Entry(name, {})) for name in ("powersgd", "topk")),
    Arm("powersgd, start_step=7", Entry("powersgd", {"start_step": 7})),
)  # as a newcomer's first call of register has them


# ---- tasks


def _with_sgd(task: Task, lr: float) -> Task:
    return replace(task, lr=lr, adam=False)


def _small_transformer(ranks: int, **options: Any) -> Task:
    return characters(ranks, length=48, width=128, depth=2, windows=256, **options)


def _larger_transformer(ranks: int, **options: Any) -> Task:
    task = characters(ranks, length=64, width=256, depth=4, windows=192, **options)
    return replace(task, lr=1e-3)


def _gpu_transformer(ranks: int, **options: Any) -> Task:
    task = characters(ranks, length=256, width=512, depth=10, windows=256, packages=True, **options)
    return replace(task, lr=6e-4)


def _lstm(ranks: int, **options: Any) -> Task:
    return _with_sgd(lstm(ranks, length=48, windows=256, **options), 1.0)


def _small_cnn() -> nn.Module:
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 16, 10))


def _first_try(ranks: int, **options: Any) -> Task:
    return replace(digits(ranks, **options), name="first try", model=_small_cnn, lr=0.1)


def _tiny_transformer(ranks: int, **options: Any) -> Task:
    return characters(ranks, length=16, width=32, depth=1, windows=8, **options)


def _tiny_lstm(ranks: int, **options: Any) -> Task:
    return _with_sgd(lstm(ranks, length=16, windows=8, **options), 1.0)


def _tiny_minilm(ranks: int, **options: Any) -> Task:
    return minilm(ranks, length=8, **options)


def _minilm(ranks: int, **options: Any) -> Task:
    return minilm(ranks, packages=True, candidates=512, **options)


LN_128, LN_10 = 4.852, 2.303  # of a uniform guess
SETUPS: dict[str, Setup] = {
    setup.name: setup
    for setup in (
        Setup("characters", _small_transformer, 200, 100, ALL, 32, LN_128, _tiny_transformer),
        Setup("larger", _larger_transformer, 400, 8, COMMON, 32, LN_128, _tiny_transformer),
        Setup("digits", digits, 150, 30, COMMON, 64, LN_10, digits),
        Setup("lstm", _lstm, 200, 30, COMMON, 32, LN_128, _tiny_lstm),
        # The files of another Python have some more or fewer pairs than 347.
        Setup("minilm", _minilm, 60, 10, COMMON, 64, 1.0, _tiny_minilm, "misses", items=347),
        Setup("first try", _first_try, 66, 30, NAMED, 128, 1.0, _first_try, "misses", 2, 359),
        Setup("gpu", _gpu_transformer, 2000, 8, COMMON[:3], 64, LN_128, _tiny_transformer),
    )
}


def small(setup: Setup) -> Setup:
    """Returns a rehearsal of a task: a few steps of two seeds, on a model as small as it gets.

    All but the first step are compressed.
    """
    arms = tuple(replace(arm, seeds=None, entry=_compressed(arm.entry)) for arm in setup.arms)
    return replace(setup, task=setup.rehearsal, steps=4, seeds=2, arms=arms, batch_size=16)


def _compressed(entry: Entry) -> Entry:
    options = {name: 1 if name == "start_step" else v for name, v in entry.options.items()}
    start = entry.dense_steps and (entry.dense_steps[0], 1)
    return replace(entry, options=options, dense_steps=start)
