"""Times candidates in turns until noise no longer decides, and keeps the best.

A machine that is busy with something else slows the candidate that runs at that moment. So each
candidate runs some steps in every round, until the others are known to be slower, or so close that
it does not matter. Every rank does the same in the same step, and all decide by the slowest rank.

On a GPU a step begins when the GPU comes to it: the host may be many steps ahead.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch.distributed as dist

from commhooks.core._scheme import Scheme
from commhooks.hook._handshake import HANDSHAKE_LIMIT
from commhooks.hook._running import Running
from commhooks.hook._state import CandidateResult
from commhooks.wrappers._make import make
from ddp_core import Timestamp, clock_of, stream_of

__all__ = ["Candidate", "CandidateTiming", "CandidateTimings", "Stage", "Trials", "chosen"]

Moment = float | Timestamp
LOG = logging.getLogger("commhooks")

# A scheme is kept if its steps take at most this share of dense ones.
_WON = 0.98
# Schemes within this share of the fastest one are as fast: the one with the smallest error is kept.
_SAME = 0.01
# After so many times the steps of a trial, the choice is compared with dense steps once more.
_VALIDATE_FACTOR = 5
_CLOSE = 0.01  # differences below this share of a step do not matter
_SURE = 2.0  # standard errors of a difference, from which it is no chance
_MAX_ROUNDS = 6


class Stage(Enum):
    FIRST = "first steps, which are uncompressed and do not count"
    TRIAL = "steps with a candidate"
    VALIDATE = "steps with the choice"
    DONE = "decided"


@dataclass(frozen=True)
class Candidate:
    """Holds a scheme that may be chosen, and the relative squared error of an exchange."""

    name: str
    scheme: Scheme
    error: float


class Trials:
    """Runs the stages of the measurement on one hook.

    Args:
        hook: the hook.
        install: makes the hook run another scheme from the next step on.
        candidates: schemes to choose from; one of them is "none".
        steps: steps that are timed of each scheme in each round.

    Attributes:
        over: whether the decision is taken.
        plan: the decision in words.
        choice: the chosen candidate; None before the decision, and if dense steps are kept.
    """

    def __init__(
        self,
        hook: Running,
        install: Callable[[Scheme], None],
        candidates: Sequence[Candidate],
        *,
        steps: int,
    ) -> None:
        self._hook, self._install = hook, install
        self._candidates, self._steps = candidates, steps
        self.plan = "auto: nothing is decided yet"
        self.choice: Candidate | None = None
        self._stage, self._begun = Stage.FIRST, 0  # the step in which the stage began
        self._times: list[tuple[Moment, Moment]] = []  # begins of a step and of the next one
        self._last: tuple[int, Moment] = (-1, 0.0)  # the latest step, and when it began
        self._dense_s = 0.0
        self._timings = CandidateTimings(candidates)
        self._before: list[CandidateTiming] | None = None  # of the first comparison, if repeated

    @property
    def over(self) -> bool:
        return self._stage is Stage.DONE

    @property
    def candidates(self) -> list[CandidateResult]:
        """Returns all candidates with what was measured so far, the fastest first."""
        first = self._timings.entries if self._before is None else self._before
        again = (
            {}
            if self._before is None
            else {entry.candidate.name: entry for entry in self._timings.entries}
        )
        rows = [
            CandidateResult(
                entry.candidate.name,
                entry.median,
                _median_of(again.get(entry.candidate.name)),
                len(entry.times),
            )
            for entry in first
        ]
        return sorted(rows, key=lambda row: (math.isnan(row.measured_s), row.measured_s))

    def end(self, plan: str) -> None:
        """Ends the measurement with a decision that was taken elsewhere."""
        self._stage, self.choice, self.plan = Stage.DONE, None, plan

    def begin(self) -> None:
        """Begins the measurement anew, with the scheme "none" that the hook runs."""
        self._last, self._timings, self._before = (
            (-1, 0.0),
            CandidateTimings(self._candidates),
            None,
        )
        self._begin_stage(Stage.FIRST)

    def forward_begins(self) -> None:
        """Takes the next decision if a step, and a stage with it, has ended."""
        if not self.over and self._hook.step != self._last[0]:
            self._step_begins()

    def _step_begins(self) -> None:
        clock = clock_of(self._hook.target.device)
        now = clock.now()
        before, began = self._last
        since = self._hook.step - self._begun
        # Two steps warm up: buckets are rebuilt, and memory is made.
        if before == self._hook.step - 1 and since > 2:
            self._times.append((began, now))
        if since == self._steps * (_VALIDATE_FACTOR if self._stage is Stage.VALIDATE else 1) + 2:
            self._end_stage()
            now = clock.now()  # the next step begins after what was decided
        self._last = (self._hook.step, now)

    def _end_stage(self) -> None:
        times = self._times_of_slowest()
        if self._stage is Stage.VALIDATE:
            self._keep_or_compare_again(statistics.median(times))
            return
        if self._stage is Stage.TRIAL:
            self._timings.add(times)
        self._try_next()

    def _enter(self, stage: Stage, scheme: Scheme) -> None:
        self._begin_stage(stage)
        self._install(scheme)

    def _begin_stage(self, stage: Stage) -> None:
        self._stage, self._begun, self._times = stage, self._hook.step, []

    def _try_next(self) -> None:
        entry = self._timings.next()
        if entry is None:
            self._decide()
        else:
            self._enter(Stage.TRIAL, entry.candidate.scheme)

    def _decide(self) -> None:
        """Chooses the fastest scheme of the candidates, or none."""
        tried = [(entry.median, entry.candidate) for entry in self._timings.entries]
        self._dense_s = next(took for took, candidate in tried if candidate.name == "none")
        best = chosen(tried, self._dense_s)
        if best is None:
            self._enter(Stage.DONE, make("none"))
            verdict = "auto runs none: do not compress, nothing that was tried is faster"
        else:
            seconds, self.choice = best
            self._enter(Stage.VALIDATE if self._before is None else Stage.DONE, self.choice.scheme)
            less = 100 * (1 - seconds / self._dense_s)
            verdict = f"auto runs {self.choice.name}: {less:.0f} % less time"
        lines = [f"{candidate.name}: {1e3 * took:.1f} ms per step" for took, candidate in tried]
        self.plan = f"{verdict} than uncompressed steps. {'; '.join(lines)}."
        LOG.info("%s", self.plan)

    def _keep_or_compare_again(self, seconds: float) -> None:
        """Ends the measurement, or compares with dense steps again if the choice seems slower."""
        self.plan += f" It took {1e3 * seconds:.1f} ms per step since."
        if seconds <= self._dense_s:
            self._stage = Stage.DONE
            LOG.info("%s The choice holds.", self.plan)
            return
        # The machine may have become slower for all schemes: only turns can show that.
        LOG.info("%s That is more than uncompressed steps took: compared once more.", self.plan)
        choice = self.choice
        dense = [
            entry.candidate for entry in self._timings.entries if entry.candidate.name == "none"
        ]
        assert choice is not None
        self._before, self._timings, self.choice = (
            self._timings.entries,
            CandidateTimings([choice, *dense]),
            None,
        )
        self._try_next()

    # ---- what ranks exchange

    def _times_of_slowest(self) -> list[float]:
        """Returns the seconds of the stage's steps on the slowest rank, step by step."""
        of_ranks = self._of_all(self._seconds)
        return [float(max(ranks)) for ranks in zip(*of_ranks, strict=False)]

    def _seconds(self) -> list[float]:
        """Returns the seconds of the stage's steps on this rank; waits for the last one's end."""
        if (stream := stream_of(self._hook.target.device)) is not None:
            stream.synchronize()
        return [_seconds_of(end) - _seconds_of(begin) for begin, end in self._times]

    def _of_all(self, measure: Callable[[], Any]) -> list[Any]:
        """Gathers a value from all ranks; raises unless all have called it."""
        hook = self._hook
        hook._handshake("auto", {"stage": self._stage.value, "step": hook.step}, HANDSHAKE_LIMIT)
        values = [measure()]  # no rank is missing, so that no device waits for one
        # Ranks with other parts of the gradients (HSDP) decide the same.
        for group in (hook.target.group(), *hook.target.verdict_groups):
            everyone: list[Any] = [None] * group.size()
            with hook.target.on_device():
                dist.all_gather_object(everyone, values, group=group)
            values = [value for rank_values in everyone for value in rank_values]
        return values


def _seconds_of(moment: Moment) -> float:
    return moment.seconds() if isinstance(moment, Timestamp) else moment


def chosen(
    tried: Sequence[tuple[float, Candidate]], dense_s: float
) -> tuple[float, Candidate] | None:
    """Returns the seconds and the candidate to keep; None if dense steps are as fast.

    Of several candidates that are nearly as fast, the one that changes gradients least is kept.

    Args:
        tried: seconds of a step, by candidate.
        dense_s: seconds of a dense step.
    """
    fastest = min((took for took, _ in tried), default=dense_s)
    if fastest > _WON * dense_s:
        return None
    near = [timed for timed in tried if timed[0] <= min((1 + _SAME) * fastest, _WON * dense_s)]
    return min(near, key=lambda timed: (timed[1].error, timed[0]))


# ---- turns


@dataclass
class CandidateTiming:
    """Holds the step times of one candidate.

    Attributes:
        candidate: the scheme and its name.
        times: seconds of the candidate's steps so far.
        runs: whether the candidate takes part in further rounds.
    """

    candidate: Candidate
    times: list[float] = field(default_factory=list)
    runs: bool = True

    @property
    def median(self) -> float:
        """Returns the median step time; NaN if there is none."""
        return statistics.median(self.times) if self.times else math.nan

    @property
    def deviation(self) -> float:
        """Returns the standard error of the median, seconds; infinite for fewer than 4 steps."""
        if len(self.times) < 4:
            return math.inf
        spread = statistics.median(abs(seconds - self.median) for seconds in self.times)
        # 1.48: a normal distribution's standard deviation over its median absolute deviation;
        # 1.25: the standard error of its median over that of its mean.
        return 1.48 * 1.25 * spread / math.sqrt(len(self.times))


class CandidateTimings:
    """Runs candidates in rounds and drops those that are slower than the fastest.

    Args:
        candidates: in the order of the first round; the next round has the reverse order.

    Example:
        >>> candidates = [Candidate(name, make(name), 0.0) for name in ("none", "int8")]
        >>> timings = CandidateTimings(candidates)
        >>> while (entry := timings.next()) is not None:
        ...     timings.add({"none": [2.0] * 8, "int8": [1.0] * 8}[entry.candidate.name])
        >>> [(entry.candidate.name, entry.median) for entry in timings.entries]
        [('none', 2.0), ('int8', 1.0)]
    """

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self.entries = [CandidateTiming(candidate) for candidate in candidates]
        self._order = list(self.entries)
        self._rounds = 0

    def next(self) -> CandidateTiming | None:
        """Returns the candidate to run next; None if the comparison is over."""
        return self._order[0] if self._order else None

    def add(self, times: Sequence[float]) -> None:
        """Adds the seconds of the steps of the candidate that has run.

        Args:
            times: seconds of at least one step.
        """
        self._order.pop(0).times += times
        if not self._order:
            self._rounds += 1
            self._end_round()

    def _end_round(self) -> None:
        running = [entry for entry in self.entries if entry.runs]
        best = min(running, key=lambda entry: entry.median)
        undecided = False
        for entry in running:
            if entry is best:
                continue
            slower = entry.median - best.median
            # Below infinity: with few steps nothing is known.
            noise = min(_SURE * math.hypot(entry.deviation, best.deviation), best.median)
            if slower > max(noise, _CLOSE * best.median):
                entry.runs = False
            elif noise > _CLOSE * best.median:
                undecided = True
        if undecided and self._rounds < _MAX_ROUNDS:
            self._order = [entry for entry in self.entries if entry.runs]
            if self._rounds % 2:
                self._order.reverse()


def _median_of(entry: CandidateTiming | None) -> float:
    return math.nan if entry is None else entry.median
