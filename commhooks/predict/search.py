"""Searches for the scheme of ``register(model, "auto")``, stage by stage, between two steps.

The first steps are dense and are timed; then gradients are exchanged after backward, which shows
when each comes; then the links are measured, all candidates are predicted, and the most promising
ones are tried in turns. Every rank does the same in the same step, and all decide by the slowest
rank.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch.distributed as dist
from torch import nn

from commhooks.core.scheme import Scheme
from commhooks.hook.handshake import MEETING
from commhooks.hook.reporting import Tried
from commhooks.hook.running import Running
from commhooks.predict.advise import CAPS_MB, Option, advise, scheme_of
from commhooks.predict.contention import measure_contention
from commhooks.predict.device import ThisDevice
from commhooks.predict.link import measure_link
from commhooks.predict.race import Entry, Race
from commhooks.predict.recorded import Recorder
from commhooks.predict.tried import tried_of
from commhooks.wrappers.make import make
from ddp_core import DistributedDataParallel as CoreDDP

__all__ = ["Search", "Stage", "chosen", "promising"]

LOG = logging.getLogger("commhooks")

# A scheme is kept if its steps take at most this share of dense ones.
_WON = 0.98
# Schemes within this share of the fastest one are as fast: the one with the smallest error is kept.
_SAME = 0.01
# After so many times the steps of a trial, the choice is compared with dense steps once more.
_WATCHED = 5
# Candidates that are predicted within this factor of the best one are tried, up to a number.
_NEAR, _TRIALS = 1.10, 3


class Stage(Enum):
    DENSE = "dense steps"
    HELD = "dense steps whose gradients are exchanged after backward"
    TRIAL = "steps with a candidate"
    KEPT = "steps with the choice"
    DONE = "decided"


class Search:
    """Runs the stages of a search on one hook.

    Args:
        hook, install: the hook, and what makes it run another scheme from the next step on.
        candidates: schemes by name.
        error: largest relative squared error of an exchange.
        steps: steps that are timed in each stage, and of each scheme in each round of trials.
        link_s: seconds in which the links are measured, about.

    Attributes:
        over: whether the decision is taken.
        plan: the decision in words.
        choice: what was chosen; None before that, and where dense steps are kept.
        cap_mb: MiB at which a bucket is full. None: not chosen.
    """

    def __init__(
        self,
        hook: Running,
        install: Callable[[Scheme], None],
        candidates: Mapping[str, Scheme],
        *,
        error: float,
        steps: int,
        link_s: float,
    ) -> None:
        self._hook, self._install, self._candidates = hook, install, candidates
        self._error, self._steps, self._link_s = error, steps, link_s
        self.plan = "auto: nothing is decided yet"
        self.choice: Option | None = None
        self.cap_mb: float | None = None
        self._stage, self._begun = Stage.DENSE, 0  # the step in which the stage began
        self._times: list[float] = []
        self._last = (-1, 0.0)  # the latest step, and when it began
        self._dense_s = 0.0
        self._recorder: Recorder | None = None
        self._predicted: list[Option] = []
        self._race: Race[Option] = Race([])
        self._first: list[Entry[Option]] | None = None  # of the first race, if there is another one

    @property
    def over(self) -> bool:
        return self._stage is Stage.DONE

    @property
    def tried(self) -> list[Tried]:
        """Returns all candidates with what was predicted and measured so far."""
        return tried_of(self._predicted, self._race.entries, before=self._first)

    def end(self, plan: str) -> None:
        """Ends the search with a decision that was taken elsewhere."""
        self._stage, self.cap_mb, self.choice, self.plan = Stage.DONE, None, None, plan
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None

    def begin(self) -> None:
        """Begins the search, or begins it anew: after a state of an undecided search was loaded."""
        self._last, self._race, self._first, self._predicted = (-1, 0.0), Race([]), None, []
        self._enter(Stage.DENSE, make("none"))

    def forward_begins(self) -> None:
        """Takes the next decision if a step has ended and a stage with it."""
        if not self.over and self._hook.step != self._last[0]:
            self._step_begins()

    def _step_begins(self) -> None:
        now = time.perf_counter()
        before, began = self._last
        since = self._hook.step - self._begun
        # Two steps warm up: buckets are rebuilt, and memory is made.
        if before == self._hook.step - 1 and since > 2:
            self._times.append(now - began)
        if self._stage is Stage.HELD and since == 2:
            self._recorder = Recorder(self._model(), sample=2**20)
        if since == self._steps * (_WATCHED if self._stage is Stage.KEPT else 1) + 2:
            self._end_stage()
            now = time.perf_counter()  # the next step begins after what was measured
        if self._recorder is not None:
            self._recorder.step_begins(self._waited())
        self._last = (self._hook.step, now)

    def _end_stage(self) -> None:
        times = self._times_of_slowest()
        if self._stage is Stage.DENSE:
            self._dense_s = statistics.median(times)
            self._enter(Stage.HELD, make("none", coalesce=True))
        elif self._stage is Stage.HELD:
            self._choose()
        elif self._stage is Stage.KEPT:
            self._keep_or_race_again(statistics.median(times))
        else:
            self._race.add(times)
            self._try_next()

    def _enter(self, stage: Stage, scheme: Scheme) -> None:
        self._stage, self._begun, self._times = stage, self._hook.step, []
        self._install(scheme)

    def _choose(self) -> None:
        """Predicts all candidates and begins to try the most promising ones."""
        assert self._recorder is not None
        recorder, self._recorder = self._recorder, None
        recorder.step_begins(self._waited())
        group = self._hook._binding.group()
        with self._hook._binding.on_device():
            workload = recorder.workload(type(self._model()).__name__, group)
        gradients = recorder.gradients()
        recorder.close()
        options = advise(
            workload,
            **_measured(self._model(), group, self._link_s),
            candidates=self._candidates,
            error=self._error,
            gradients=gradients,
        )
        self._predicted = self._agreed_on(options)
        to_try = promising(self._predicted)
        names = ", ".join(map(str, to_try)) or "nothing"
        LOG.info("auto: a dense step takes %.1f ms; to be tried: %s", 1e3 * self._dense_s, names)
        self._race = Race(to_try)
        self._try_next()

    def _try_next(self) -> None:
        entry = self._race.next()
        if entry is None:
            self._decide()
            return
        self.cap_mb = _chosen_size(entry.what, self._model())
        self._enter(Stage.TRIAL, entry.what.scheme)

    def _decide(self) -> None:
        """Takes the fastest scheme of those that were tried, or none."""
        tried = [(entry.median, entry.what) for entry in self._race.entries]
        # Timed in turns with the others, unlike the first steps of a run.
        dense_s = next((took for took, one in tried if one.name == "none"), self._dense_s)
        best = chosen(tried, dense_s)
        if best is None:
            stage, self.cap_mb, scheme = Stage.DONE, None, make("none")
            verdict = "auto runs none: do not compress, nothing that was tried is faster"
        else:
            seconds, option = best
            stage = Stage.KEPT if self._first is None else Stage.DONE
            self.choice, scheme = option, option.scheme
            self.cap_mb = _chosen_size(option, self._model())
            verdict = f"auto runs {option}: {100 * (1 - seconds / dense_s):.0f} % less time"
        self._dense_s = dense_s
        self._enter(stage, scheme)
        lines = [f"dense: {1e3 * self._dense_s:.1f} ms per step"]
        lines += [option.told(took) for took, option in tried]
        self.plan = f"{verdict} than dense steps. {'; '.join(lines)}."
        LOG.info("%s", self.plan)

    def _keep_or_race_again(self, seconds: float) -> None:
        """Ends the search, or races the choice against dense steps if it seems to have lost."""
        self.plan += f" It took {1e3 * seconds:.1f} ms per step since."
        if seconds <= self._dense_s:
            self._stage = Stage.DONE
            LOG.info("%s The choice holds.", self.plan)
            return
        # The machine may have become slower for all schemes: only turns can tell.
        LOG.info("%s That is more than dense steps took: compared once more.", self.plan)
        choice = self.choice
        dense = [entry.what for entry in self._race.entries if entry.what.name == "none"]
        assert choice is not None
        self._first, self._race, self.choice = self._race.entries, Race([choice, *dense]), None
        self._try_next()

    # ---- parts

    def _times_of_slowest(self) -> list[float]:
        """Returns the seconds of the stage's steps on the slowest rank, step by step."""
        return [float(max(ranks)) for ranks in zip(*self._of_all(self._times), strict=False)]

    def _waited(self) -> float:
        """Returns the seconds of the latest step that were communication after backward."""
        return self._hook.ledger.last_step().get("exposed_s", 0.0)

    def _model(self) -> nn.Module:
        model: nn.Module = self._hook._binding.model
        return model

    def _agreed_on(self, options: list[Option]) -> list[Option]:
        """Returns the options of rank 0, which are the same on all ranks."""
        mine = [(one.name, one.cap_mb, one.step, one.error, one.split) for one in options]
        return [
            Option(name, scheme_of(name, split, self._candidates), cap_mb, step, error, split)
            for name, cap_mb, step, error, split in self._of_all(mine)[0]
        ]

    def _of_all(self, value: Any) -> list[Any]:
        """Gathers a value from all ranks, which have all come here, or raises."""
        self._hook._meet("auto", {"stage": self._stage.value, "step": self._hook.step}, MEETING)
        group = self._hook._binding.group()
        found: list[Any] = [None] * group.size()
        with self._hook._binding.on_device():
            dist.all_gather_object(found, value, group=group)
        return found


def _measured(model: nn.Module, group: dist.ProcessGroup, link_s: float) -> dict[str, Any]:
    """Returns what predictions have to know of ranks, links, device and buckets."""
    device = next(model.parameters()).device
    fabric = measure_link(group, budget_s=link_s)
    # All ranks come from the last message of that, and measure this at the same time.
    contention = measure_contention(device)
    return {
        "ranks": group.size(),
        "fabric": fabric,
        "device": ThisDevice(device, contention=contention),
        **_sizes(model),
    }


def _chooses_sizes(model: nn.Module) -> bool:
    """Whether sizes of buckets are part of the choice: on our class, unless the user gave some."""
    free = getattr(model, "bucket_bytes_cap_default", True)
    return free and isinstance(model, CoreDDP)


def _chosen_size(option: Option, model: nn.Module) -> float | None:
    """Returns the size of buckets that an option chooses, MiB."""
    return option.cap_mb if _chooses_sizes(model) else None


def _sizes(model: nn.Module) -> dict[str, Any]:
    """Returns the sizes that buckets can have, and that of the first one, MiB.

    Of a list of sizes the first and the last count, which holds for all buckets that follow.
    """
    if _chooses_sizes(model):
        return {"caps_mb": CAPS_MB, "first_mb": 1.0}
    listed = getattr(model, "bucket_bytes_cap_list", None)
    cap = listed[-1] if listed else getattr(model, "bucket_bytes_cap", 25 * 2**20)
    usual = getattr(model, "bucket_bytes_cap_default", True)
    first = listed[0] if listed else 2**20 if usual else cap
    # 0 gives each parameter a bucket of its own.
    return {"caps_mb": (max(cap, 1) / 2**20,), "first_mb": max(first, 1) / 2**20}


def promising(options: Sequence[Option]) -> list[Option]:
    """Returns what is to be tried: the best option of each scheme that is near the best of all.

    Of the two best schemes also the one in the fewest buckets, if that is near: what each further
    bucket costs in waiting for the slowest rank is what is predicted worst. The best dense option
    comes last.

    Args:
        options: predictions, the fastest first.
    """
    best: dict[str, Option] = {}
    for option in options:
        best.setdefault(option.name, option)
    fastest = min((one.step.step_s for one in best.values()), default=0.0)
    near = [one for one in options if one.name != "none" and one.step.step_s <= _NEAR * fastest]
    some = [one for one in best.values() if one in near][:_TRIALS]
    fewest = [
        max((one for one in near if one.name == scheme.name), key=lambda one: one.cap_mb)
        for scheme in some[:2]
    ]
    some += [one for one in fewest if one not in some]
    return [*some, best["none"]] if some else []


def chosen(tried: Sequence[tuple[float, Option]], dense_s: float) -> tuple[float, Option] | None:
    """Returns the seconds and the option to keep, or None if dense steps are as fast.

    Of several that are nearly as fast as the fastest, the one that changes gradients least.

    Args:
        tried: seconds of a step, by option.
        dense_s: seconds of a dense step.
    """
    fastest = min((took for took, _ in tried), default=dense_s)
    if fastest > _WON * dense_s:
        return None
    near = [one for one in tried if one[0] <= min((1 + _SAME) * fastest, _WON * dense_s)]
    return min(near, key=lambda one: (one[1].error, one[0]))
