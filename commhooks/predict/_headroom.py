"""Measures what compression could save in a job, from steps with and without communication."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from commhooks.errors import RegistrationError
from commhooks.hook._ledger import size_of
from commhooks.hook._parameters import find_ddp
from commhooks.predict._headroom_steps import (
    LEAST_STEPS,
    VARIANTS,
    BucketTransfer,
    Facts,
    InterleavedRun,
)

__all__ = [
    "Difference",
    "Headroom",
    "StepTimes",
    "Verdict",
    "difference_of",
    "headroom",
    "step_times_of",
]


# A difference below this share of a step is called none, however exactly it was measured: a
# scheme's own computations take as much.
_SMALL = 0.02
# And one that may be above this share, for all the measurement knows, was not measured well enough
# to say that it is small.
_WORTH = 0.1


@dataclass(frozen=True)
class StepTimes:
    """Holds the step times of one kind of communication.

    Attributes:
        median_s: seconds of a step.
        low_s, high_s: the middle half of the steps is between them.
        steps: number of steps.
    """

    median_s: float
    low_s: float
    high_s: float
    steps: int


@dataclass(frozen=True)
class Difference:
    """Holds a difference of step times and its noise.

    Attributes:
        seconds: median over the turns of the difference of their medians.
        noise_s: twice its standard error, by the turns or by the steps, whichever is more; a
            smaller difference may be chance.
    """

    seconds: float
    noise_s: float

    def is_large(self, kind: StepTimes) -> bool:
        """Whether the difference exceeds its noise and 2 % of a step."""
        return self.seconds > max(self.noise_s, _SMALL * kind.median_s)

    def may_be_worth(self, kind: StepTimes) -> bool:
        """Whether difference plus noise exceeds 10 % of a step."""
        return self.seconds + self.noise_s > _WORTH * kind.median_s

    def is_impossible(self, kind: StepTimes) -> bool:
        """Whether sending less took longer by more than noise, so that something else disturbed."""
        return self.seconds < -max(self.noise_s, _SMALL * kind.median_s)


def step_times_of(seconds: Sequence[float]) -> StepTimes:
    """Returns the median of step times, and the middle half."""
    low, _, high = statistics.quantiles(seconds, n=4)
    return StepTimes(statistics.median(seconds), low, high, len(seconds))


def difference_of(
    durations: Sequence[Mapping[str, Sequence[float]]], kind: str, base: str
) -> Difference:
    """Returns the difference between the step times of two variants, with its noise."""
    gaps = [statistics.median(turn[kind]) - statistics.median(turn[base]) for turn in durations]
    # Turns that differ by the same each time say little if there are two of them: not below what
    # the steps by themselves leave open.
    parts = [_error([s for turn in durations for s in turn[variant]]) for variant in (kind, base)]
    return Difference(statistics.median(gaps), 2 * max(_error(gaps), math.hypot(*parts)))


def _error(values: Sequence[float]) -> float:
    """Returns the standard error of a median, by the median distance from the median."""
    middle = statistics.median(values)
    spread = 1.4826 * statistics.median(abs(value - middle) for value in values)
    # 1.25: the standard error of a median over that of a mean.
    return 1.25 * spread / math.sqrt(len(values))


# ---- the answer


_HIGHEST = 10_000.0
_RATIOS = (2, 4, 8, 16, 32, 100)  # of the table
Verdict = Literal["hidden", "latency", "bf16", "compress", "unclear"]
_LEFT = 0.1  # a ratio is enough if this share of what compression can save is left


@dataclass(frozen=True)
class Headroom:
    """Holds what compression could save; ``print`` it for a report.

    Attributes:
        dense, bf16, one_value, noop: step times with an uncompressed (dense) all-reduce, a bf16
            all-reduce, one value per bucket, and no communication. A step takes as long as its
            slowest rank.
        exposed: ``dense - noop``: the time that communication adds, since it does not overlap with
            backward.
        savable_over_dense: ``dense - one_value``: the most that compression can save over a dense
            all-reduce. The rest of ``exposed`` is latency, and waiting for other ranks.
        savable_over_bf16: ``bf16 - one_value``: the most that compression can save over bf16.
        saved_by_bf16: ``dense - bf16``: what bf16 saves, with its casts.
        facts: ranks, backend, bytes, buckets.
        travel: when each bucket is sent, and for how long, in order.

    Example:
        >>> print(commhooks.headroom(ddp_model, lambda: train_step(ddp_model)))
    """

    dense: StepTimes
    bf16: StepTimes
    one_value: StepTimes
    noop: StepTimes
    exposed: Difference
    savable_over_dense: Difference
    savable_over_bf16: Difference
    saved_by_bf16: Difference
    facts: Facts
    travel: tuple[BucketTransfer, ...]

    @classmethod
    def of(
        cls,
        durations: Sequence[Mapping[str, Sequence[float]]],
        facts: Facts,
        travel: Sequence[BucketTransfer],
    ) -> Headroom:
        """Returns the headroom of measured steps.

        Args:
            durations: seconds of the steps of each kind of communication, by turn.
            facts: of the job.
            travel: of each bucket.
        """
        kinds = {
            kind: step_times_of([s for turn in durations for s in turn[kind]]) for kind in VARIANTS
        }
        return cls(
            dense=kinds["none"],
            bf16=kinds["bf16"],
            one_value=kinds["one"],
            noop=kinds["noop"],
            exposed=difference_of(durations, "none", "noop"),
            savable_over_dense=difference_of(durations, "none", "one"),
            savable_over_bf16=difference_of(durations, "bf16", "one"),
            saved_by_bf16=difference_of(durations, "none", "bf16"),
            facts=facts,
            travel=tuple(sorted(travel, key=lambda bucket: bucket.ready_s)),
        )

    @property
    def best(self) -> StepTimes:
        """Returns the faster of uncompressed (dense) and bf16, which a scheme has to beat."""
        return min(self.dense, self.bf16, key=lambda kind: kind.median_s)

    @property
    def verdict(self) -> Verdict:
        """Returns the recommendation.

        "hidden": do not compress, backward hides the communication. "latency": do not compress,
        the exposed time does not depend on bytes. "bf16": use bf16; a stronger scheme is not known
        to save more. "compress": a stronger scheme may pay. "unclear": the steps' times differ too
        much.
        """
        if self.savable_over_dense.is_impossible(self.dense):
            return "unclear"
        saves_by_bf16 = self.saved_by_bf16.is_large(self.dense)
        if not self.savable_over_dense.is_large(self.dense):
            if saves_by_bf16:
                return "bf16"
            if self.savable_over_dense.may_be_worth(self.dense):
                return "unclear"
            exposed = self.exposed.is_large(self.dense), self.exposed.may_be_worth(self.dense)
            return "latency" if any(exposed) else "hidden"
        if self.savable_over_bf16.is_large(self.bf16):
            return "compress"
        if saves_by_bf16:
            return "bf16"
        return "unclear" if self.savable_over_bf16.may_be_worth(self.bf16) else "bf16"

    def step_s(self, ratio: float) -> float:
        """Predicts the step time at a compression ratio, without a scheme's computations.

        The time lies between the measured steps with all bytes and with one value per bucket. It
        follows from when buckets begin and how long they travel: the links carry one bucket after
        the other, and the time that depends on bytes is divided by ``ratio``.
        """
        least, most = self._tail(math.inf), self._tail(1)
        share = (self._tail(ratio) - least) / (most - least) if most > least else 1 / ratio
        return self.dense.median_s - max(self.savable_over_dense.seconds, 0.0) * (1 - share)

    def ratio_to_hide(self) -> float:
        """Returns the ratio that saves nine tenths of what compression can save."""
        goal = self.dense.median_s - (1 - _LEFT) * max(self.savable_over_dense.seconds, 0.0)
        return self._first(lambda ratio: self.step_s(ratio) <= goal) or _HIGHEST

    def break_even(self, cost_s: float, *, over: str = "none") -> float | None:
        """Returns the ratio from which a scheme pays that adds ``cost_s`` seconds to a step.

        Args:
            cost_s: seconds that the scheme's computations add to a step.
            over: the baseline, "none" or "bf16", as measured.

        Returns:
            The ratio, or None if it wins at none.
        """
        bar = (self.dense if over == "none" else self.bf16).median_s
        return self._first(lambda ratio: self.step_s(ratio) + cost_s < bar)

    def _tail(self, ratio: float) -> float:
        """Returns for how long buckets travel after the last one has begun."""
        free = -math.inf
        for bucket in self.travel:
            fixed = min(bucket.fixed_s, bucket.dense_s)
            free = max(free, bucket.ready_s) + fixed + (bucket.dense_s - fixed) / ratio
        return max(free, 0.0)

    def _first(self, holds: Callable[[float], bool]) -> float | None:
        """Returns the smallest ratio, up to 10,000, for which a condition holds."""
        ratios = [1.02**power for power in range(466)]  # to _HIGHEST
        return next((ratio for ratio in ratios if holds(ratio)), None)

    def as_dict(self) -> dict[str, Any]:
        """Returns all numbers, for JSON."""
        return asdict(self) | {
            "verdict": self.verdict,
            "ratio_to_hide": self.ratio_to_hide(),
            "step_s_by_ratio": {str(ratio): self.step_s(ratio) for ratio in _RATIOS},
        }

    def save(self, path: str | Path) -> None:
        """Writes all numbers as JSON."""
        Path(path).write_text(json.dumps(self.as_dict(), indent=2) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        return "\n".join([*_measured(self), "", *_answer(self)])


def headroom(ddp_model: nn.Module, step_fn: Callable[[], Any], *, steps: int = 30) -> Headroom:
    """Times steps that send uncompressed (dense) gradients, bf16 and nothing, in turn.

    All ranks call it with equal arguments. Without communication the ranks' parameters drift
    apart: build model and optimizer anew afterwards, and save nothing of these. The model keeps the
    hook, which is dense then.

    Args:
        ddp_model: DistributedDataParallel without a hook, or a module that holds exactly one.
        step_fn: runs one step: forward, backward (of several, one is synchronised), optimizer.
        steps: steps of each kind that count, 10 or more. 1.2 times as many run, and 10 before.

    Returns:
        The measured headroom, the same on all ranks.

    Raises:
        RegistrationError: the model is no DistributedDataParallel or has a hook; or ``step_fn``
            runs no synchronised backward pass, or several.
        MissingRankError: not all ranks called it in time.

    Example:
        >>> print(commhooks.headroom(ddp_model, lambda: train_step(ddp_model)))
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < LEAST_STEPS:
        raise ValueError(
            f"headroom(steps=...) is a whole number, {LEAST_STEPS} or more, got {steps!r}"
        )
    turns = InterleavedRun(find_ddp(ddp_model), steps)
    while not turns.step_begins():
        before = turns.step
        step_fn()
        if turns.step != before + 1:
            raise RegistrationError(
                f"headroom(step_fn=...) runs one synchronised backward pass through the "
                f"DistributedDataParallel, it ran {turns.step - before}; a step of several "
                f"backward passes has all but the last within no_sync()"
            )
    return Headroom.of(*turns.results())


# ---- words


def _measured(headroom: Headroom) -> list[str]:
    facts = headroom.facts
    kinds = (
        ("uncompressed", headroom.dense),
        ("bf16", headroom.bf16),
        ("latency only (1 value per bucket)", headroom.one_value),
        ("no communication (noop)", headroom.noop),
    )
    return [
        f"commhooks headroom: {facts.world_size} ranks over {facts.backend}, "
        f"{size_of(facts.dense_nbytes)} of gradients in "
        f"{facts.buckets} bucket{'s' * (facts.buckets != 1)} per step",
        "",
        f"{'communication':<33}    step [ms]    {'middle half [ms]':<20}    steps",
        *(
            f"{name:<33}    {1e3 * kind.median_s:9.2f}    "
            f"{f'{1e3 * kind.low_s:.2f} to {1e3 * kind.high_s:.2f}':<20}    {kind.steps:5d}"
            for name, kind in kinds
        ),
    ]


def _answer(headroom: Headroom) -> list[str]:
    exposed = _shown(headroom.exposed, headroom.dense)
    over_dense = _shown(headroom.savable_over_dense, headroom.dense)
    over_bf16 = _shown(headroom.savable_over_bf16, headroom.bf16)
    lines = [
        "Exposed communication",
        f"(not overlapped with backward):      {exposed}",
        f"The most that compression can save:  {over_dense}",
        f"The same, if bf16 is used already:   {over_bf16}",
        "",
    ]
    return [*lines, *_WORDS[headroom.verdict](headroom)]


def _hidden(headroom: Headroom) -> list[str]:
    return [
        "Do not compress. Backward hides the communication: no compression can save more",
        f"than {_at_most(headroom.savable_over_dense, headroom.dense)}, and it computes for that.",
    ]


def _latency(headroom: Headroom) -> list[str]:
    return [
        "Do not compress: it can save no more than "
        f"{_at_most(headroom.savable_over_dense, headroom.dense)}.",
        "What else is exposed is latency, or waiting for other ranks, which one value per",
        "bucket costs as well. Fewer buckets (bucket_cap_mb), larger batches and gradient",
        "accumulation help against it.",
    ]


def _bf16(headroom: Headroom) -> list[str]:
    if headroom.savable_over_bf16.may_be_worth(headroom.bf16):
        return [
            f"Use bf16: it saves {_shown(headroom.saved_by_bf16, headroom.dense)}.",
            "What other schemes save beside it is within the noise:",
            f"{_shown(headroom.savable_over_bf16, headroom.bf16)}. Measure more steps.",
            '    commhooks.register(ddp_model, "bf16")',
        ]
    return [
        "Use bf16, and do not compress more: no compression can save more beside it than",
        f"{_at_most(headroom.savable_over_bf16, headroom.bf16)}.",
        '    commhooks.register(ddp_model, "bf16")',
    ]


def _unclear(headroom: Headroom) -> list[str]:
    if headroom.savable_over_dense.is_large(headroom.dense):
        saves, stay = (
            f"{_shown(headroom.savable_over_bf16, headroom.bf16)}, beside bf16",
            _name(headroom),
        )
    else:
        saves, stay = _shown(headroom.savable_over_dense, headroom.dense), "no compression"
    return [
        "No answer: the times of the steps differ by more than what is to be measured.",
        f"Measured savings: {saves}.",
        "Measure more steps, on machines that do nothing else;",
        f"until then use {stay}.",
    ]


def _compress(headroom: Headroom) -> list[str]:
    name = _name(headroom)
    cost = 0.05 * headroom.noop.median_s
    dense, bf16 = headroom.break_even(cost), headroom.break_even(cost, over="bf16")
    enough = headroom.ratio_to_hide()
    doubts = []
    if not headroom.saved_by_bf16.is_large(headroom.dense):
        doubts = [
            f"But bf16, a ratio of 2, saved {_shown(headroom.saved_by_bf16, headroom.dense)}:",
            "what bytes alone predict, here and below, may be too much.",
        ]
    return [
        f"Compression may be worth it. A ratio of {enough:.2g} saves nine tenths of",
        f"what can be saved. A scheme whose computations add {_ms(cost)} (5 % of the",
        f"noop step) breaks even with no compression {_from(dense)},",
        f"with bf16 {_from(bf16)}.",
        *doubts,
        "",
        f"ratio    step [ms]    to be faster than {name}, computations may add [ms]",
        *(
            f"{ratio:5d}    {1e3 * headroom.step_s(ratio):9.2f}    {_spare(headroom, ratio):>10}"
            for ratio in _RATIOS
        ),
        "(predicted from when buckets of uncompressed steps begin and how long they take;",
        f"bf16, a ratio of 2, was measured with its casts: {_ms(headroom.bf16.median_s)})",
    ]


_WORDS: dict[Verdict, Callable[[Headroom], list[str]]] = {
    "hidden": _hidden,
    "latency": _latency,
    "bf16": _bf16,
    "compress": _compress,
    "unclear": _unclear,
}


def _name(headroom: Headroom) -> str:
    return "no compression" if headroom.best is headroom.dense else "bf16"


def _spare(headroom: Headroom, ratio: float) -> str:
    spare = headroom.best.median_s - headroom.step_s(ratio)
    return f"{1e3 * spare:.2f}" if spare > 0 else "loses"


def _shown(gap: Difference, kind: StepTimes) -> str:
    if gap.seconds < 0:  # by chance, or by something else that ran
        return f"nothing ({1e3 * gap.seconds:.2f} ± {_ms(gap.noise_s)}, 95 %)"
    share = gap.seconds / kind.median_s
    return f"{1e3 * gap.seconds:.2f} ± {_ms(gap.noise_s)} (95 %), {100 * share:.0f} % of a step"


def _at_most(gap: Difference, kind: StepTimes) -> str:
    most = max(gap.seconds + gap.noise_s, 0.0)
    return f"{_ms(most)}, {100 * most / kind.median_s:.0f} % of a step"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _from(ratio: float | None) -> str:
    return "at no ratio" if ratio is None else f"from a ratio of {ratio:.3g} on"
