"""Says what compression could save in a training job, from steps with and without communication."""

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
from commhooks.hook.parameters import find_ddp
from commhooks.predict.headroom_words import RATIOS, words
from commhooks.predict.turns import KINDS, Facts, Travel, Turns

__all__ = ["Gap", "Headroom", "Kind", "Verdict", "headroom"]

_HIGHEST = 10_000.0
# A difference below this share of a step is called none, however exactly it was measured: a
# scheme's own computations take as much.
_SMALL = 0.02
# And one that may be above this share, for all the measurement knows, was not measured well enough
# to say that it is small.
_WORTH = 0.1
Verdict = Literal["hidden", "latency", "bf16", "compress", "unclear"]
_LEFT = 0.1  # a ratio is enough if this share of what compression can save is left


@dataclass(frozen=True)
class Kind:
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
class Gap:
    """Holds a difference of step times.

    Attributes:
        seconds: median over the turns of the difference of their medians.
        noise_s: twice its standard error, by the turns or by the steps, whichever is more; a
            smaller difference may be chance.
    """

    seconds: float
    noise_s: float

    def is_large(self, kind: Kind) -> bool:
        """Whether it is more than chance, and than what is worth a word, beside a step."""
        return self.seconds > max(self.noise_s, _SMALL * kind.median_s)

    def may_be_worth(self, kind: Kind) -> bool:
        """Whether the noise is such that it may be a good part of a step."""
        return self.seconds + self.noise_s > _WORTH * kind.median_s


@dataclass(frozen=True)
class Headroom:
    """Holds what compression could save; ``print`` it for words and numbers.

    Attributes:
        dense, bf16, one, noop: step times with a dense all-reduce, one of bf16, one of a single
            value per bucket, and none. A step takes as long as its slowest rank.
        exposed: ``dense - noop``: what communication costs.
        beside_dense: ``dense - one``: the most that compression can save where there is none. The
            rest of ``exposed`` is latency, and waiting for each other.
        beside_bf16: ``bf16 - one``: the most that it can save where bf16 is used already.
        facts: ranks, backend, bytes, buckets.
        travel: how each bucket travels, in the order in which they begin.

    Example:
        >>> print(commhooks.headroom(ddp_model, lambda: train_step(ddp_model)))
    """

    dense: Kind
    bf16: Kind
    one: Kind
    noop: Kind
    exposed: Gap
    beside_dense: Gap
    beside_bf16: Gap
    facts: Facts
    travel: tuple[Travel, ...]

    @classmethod
    def of(
        cls,
        durations: Sequence[Mapping[str, Sequence[float]]],
        facts: Facts,
        travel: Sequence[Travel],
    ) -> Headroom:
        """Returns the headroom of measured steps.

        Args:
            durations: seconds of the steps of each kind of communication, by turn.
            facts: of the job.
            travel: of each bucket.
        """
        kinds = {kind: _kind([s for turn in durations for s in turn[kind]]) for kind in KINDS}
        return cls(
            dense=kinds["none"],
            bf16=kinds["bf16"],
            one=kinds["one"],
            noop=kinds["noop"],
            exposed=_gap(durations, "none", "noop"),
            beside_dense=_gap(durations, "none", "one"),
            beside_bf16=_gap(durations, "bf16", "one"),
            facts=facts,
            travel=tuple(sorted(travel, key=lambda bucket: bucket.ready_s)),
        )

    @property
    def best(self) -> Kind:
        """Returns dense or bf16: what a scheme has to beat."""
        return min(self.dense, self.bf16, key=lambda kind: kind.median_s)

    @property
    def verdict(self) -> Verdict:
        """Returns what to do.

        "hidden": do not compress, backward hides the communication. "latency": do not compress,
        what is exposed does not go with the bytes. "bf16": use it, and nothing stronger.
        "compress": a stronger scheme may pay. "unclear": the steps' times differ too much.
        """
        if not self.beside_dense.is_large(self.dense):
            if self.beside_dense.may_be_worth(self.dense):
                return "unclear"
            exposed = self.exposed.is_large(self.dense), self.exposed.may_be_worth(self.dense)
            return "latency" if any(exposed) else "hidden"
        if self.beside_bf16.is_large(self.bf16):
            return "compress"
        return "unclear" if self.beside_bf16.may_be_worth(self.bf16) else "bf16"

    def step_s(self, ratio: float) -> float:
        """Predicts the step time at a ratio of compression, if its computations took no time.

        Between the measured steps with all bytes and with one value per bucket. From when the
        buckets begin and for how long they travel: the links carry one after the other, each in
        ``1 / ratio`` of the time that goes with its bytes.
        """
        least, most = self._tail(math.inf), self._tail(1)
        share = (self._tail(ratio) - least) / (most - least) if most > least else 1 / ratio
        return self.dense.median_s - max(self.beside_dense.seconds, 0.0) * (1 - share)

    def ratio_to_hide(self) -> float:
        """Returns the ratio that saves nine tenths of what compression can save."""
        goal = self.dense.median_s - (1 - _LEFT) * max(self.beside_dense.seconds, 0.0)
        return self._first(lambda ratio: self.step_s(ratio) <= goal) or _HIGHEST

    def break_even(self, cost_s: float, *, over: str = "none") -> float | None:
        """Returns the ratio from which on a scheme wins that adds ``cost_s`` seconds to a step.

        Args:
            cost_s: what the scheme's computations add to a step.
            over: what it has to beat: "none" or "bf16", as measured.

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
        """Returns the least ratio, up to 10,000, from which on something holds."""
        ratios = [1.02**power for power in range(466)]  # to _HIGHEST
        return next((ratio for ratio in ratios if holds(ratio)), None)

    def as_dict(self) -> dict[str, Any]:
        """Returns all numbers, for JSON."""
        return asdict(self) | {
            "verdict": self.verdict,
            "ratio_to_hide": self.ratio_to_hide(),
            "step_s_by_ratio": {str(ratio): self.step_s(ratio) for ratio in RATIOS},
        }

    def save(self, path: str | Path) -> None:
        """Writes all numbers as JSON."""
        Path(path).write_text(json.dumps(self.as_dict(), indent=2) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        return "\n".join(words(self))


def headroom(ddp_model: nn.Module, step_fn: Callable[[], Any], *, steps: int = 30) -> Headroom:
    """Measures what compression could save, with steps of dense, bf16 and no communication in turn.

    All ranks call it with equal arguments. Without communication the ranks' parameters drift
    apart: build model and optimizer anew afterwards, and save nothing of these. The model keeps the
    hook, which is dense then.

    Args:
        ddp_model: DistributedDataParallel without a hook, or a module that holds exactly one.
        step_fn: runs one step: forward, backward (of several, one is synchronised), optimizer.
        steps: steps of each kind that count, 10 or more. 1.2 times as many run, and 10 before.

    Returns:
        The answer, the same on all ranks.

    Raises:
        RegistrationError: the model is no DistributedDataParallel or has a hook; or ``step_fn``
            runs no synchronised backward pass, or several.
        MissingRankError: not all ranks came in time.

    Example:
        >>> print(commhooks.headroom(ddp_model, lambda: train_step(ddp_model)))
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 10:
        raise ValueError(f"headroom(steps=...) is a whole number, 10 or more, got {steps!r}")
    turns = Turns(find_ddp(ddp_model), steps)
    while not turns.mark():
        before = turns.step
        step_fn()
        if turns.step != before + 1:
            raise RegistrationError(
                f"headroom(step_fn=...) runs one synchronised backward pass through the "
                f"DistributedDataParallel, it ran {turns.step - before}; a step of several "
                f"backward passes has all but the last within no_sync()"
            )
    return Headroom.of(*turns.results())


def _kind(seconds: Sequence[float]) -> Kind:
    low, _, high = statistics.quantiles(seconds, n=4)
    return Kind(statistics.median(seconds), low, high, len(seconds))


def _gap(durations: Sequence[Mapping[str, Sequence[float]]], kind: str, base: str) -> Gap:
    gaps = [statistics.median(turn[kind]) - statistics.median(turn[base]) for turn in durations]
    # Turns that differ by the same each time say little if there are two of them: not below what
    # the steps by themselves leave open.
    parts = [_error([s for turn in durations for s in turn[one]]) for one in (kind, base)]
    return Gap(statistics.median(gaps), 2 * max(_error(gaps), math.hypot(*parts)))


def _error(values: Sequence[float]) -> float:
    """Returns the standard error of a median, by the median distance from it."""
    middle = statistics.median(values)
    spread = 1.4826 * statistics.median(abs(value - middle) for value in values)
    # 1.25: the standard error of a median over that of a mean.
    return 1.25 * spread / math.sqrt(len(values))
