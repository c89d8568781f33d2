"""Defines the hook of ``register(model, "auto")``, which measures and chooses a scheme."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from commhooks.auto._trials import Candidate, Trials
from commhooks.checkpoint._format import read
from commhooks.core._registry import check_known
from commhooks.core._scheme import Scheme
from commhooks.core._settings import check_value, from_json
from commhooks.errors import CheckpointError, OptionError
from commhooks.hook._ledger import Summary
from commhooks.hook._saving import without_start
from commhooks.hook._sharded import check_returns_shards
from commhooks.hook._state import CandidateResult, HookState, asks_for_scheme
from commhooks.predict._advise import error_of, made_candidates
from commhooks.wrappers._feedback import unwrap_flush
from commhooks.wrappers._make import describe, make, make_for_training

__all__ = ["CANDIDATES", "SHARDED_CANDIDATES", "AutoHook"]

CANDIDATES = ("none", "bf16", "int8", "int4", "powersgd")
# Without memory: feedback keeps four bytes for each entry of the whole model on every rank.
SHARDED_CANDIDATES = ("none", "bf16", "int8", "eden")


class AutoHook(HookState):
    """Chooses the scheme of a model by measurement, in its first steps.

    Candidates run in turns until differences of 1 % are not due to chance, or for six rounds: 40 to
    300 steps. The fastest scheme is kept if it saves 2 % of an uncompressed (dense) step or more;
    of those within 1 % of it, the one with the smallest error.

    Args:
        model: see :class:`commhooks.HookState`.
        shards_for: name of the host that needs shards of the mean, which not all schemes return; ""
            for none.
        candidates: registered names, or schemes by name, to choose from; "none" and "bf16" always
            take part. By default "int8", "int4" and "powersgd", and on FSDP2 "int8" and "eden".
        max_error: largest relative squared error of an exchange of normal entries, without
            feedback: 0.05 allows 4 bits per entry, and no sparse or low-rank scheme.
        measure_steps: steps that are timed, of each scheme in each round.

    Raises:
        ValueError: a candidate does not average gradients, or a number is out of range.
        RegistrationError: a candidate cannot return shards.

    Example:
        >>> hook = commhooks.register(ddp_model, "auto", max_error=0.05)
        >>> print(hook.plan)  # after some steps
        auto runs int8: 34 % less time than dense steps. ...
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        shards_for: str = "",
        candidates: Iterable[str] | Mapping[str, Scheme] | None = None,
        max_error: float = 0.05,
        measure_steps: int = 8,
        process_group: dist.ProcessGroup | None = None,
        seed: int = 0,
        history: int = 100_000,
        **unknown: Any,
    ) -> None:
        check_known("'auto'", unknown, ("candidates", "max_error", "measure_steps"))
        if candidates is None:
            candidates = CANDIDATES if model is not None else SHARDED_CANDIDATES
        made = made_candidates(candidates)
        for scheme in made.values() if shards_for else ():
            check_returns_shards(scheme, shards_for)
        steps = check_value("auto", "measure_steps", measure_steps, int)
        if steps < 1:
            raise ValueError(f"auto(measure_steps=...) is 1 or more, got {measure_steps}")
        most = check_value("auto", "max_error", max_error, float)
        self._schemes, self._begins_anew = made, False
        if most < 0:
            raise OptionError(f"auto(max_error=...): a squared error, 0 or more, got {max_error}")
        judged = [Candidate(name, scheme, _error_of(name, scheme)) for name, scheme in made.items()]
        allowed = [
            candidate
            for candidate in judged
            if candidate.error <= most or candidate.name in ("none", "bf16")
        ]
        for candidate in allowed:
            make_for_training(candidate.scheme)  # warns here, and not at each trial
        self._allowed = [candidate.name for candidate in allowed]
        self._trials = Trials(self, self._switch_to, allowed, steps=steps)
        super().__init__("none", model, process_group=process_group, seed=seed, history=history)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # Times of this process say nothing about another one: a hook with the present scheme.
        return HookState, ("none",), self.__getstate__()

    def __deepcopy__(self, memo: dict[int, Any]) -> HookState:
        return copy.copy(self)

    def _facts(self, scheme: Scheme) -> dict[str, Any]:
        return super()._facts(scheme) | {"candidates": self._allowed}

    @property
    def plan(self) -> str:
        """Returns the decision in words."""
        return self._trials.plan

    @property
    def decided(self) -> bool:
        """Whether the choice is final."""
        return self._trials.over

    @property
    def candidates(self) -> list[CandidateResult]:
        return self._trials.candidates

    def forward_begins(self) -> None:
        """Ends a step, and takes the next decision when a stage is over."""
        super().forward_begins()
        self._trials.forward_begins()

    @asks_for_scheme
    def switch(self, scheme: str | Scheme, **options: Any) -> None:
        """Ends the trials and runs another scheme, see :meth:`HookState.switch`."""
        super().switch(scheme, **options)
        self._trials.end("auto: the scheme was chosen by hook.switch.")

    def summary(self, steps: int = 100) -> str:
        """Describes the latest steps and the decision."""
        summary = super().summary(steps)
        facts = getattr(summary, "facts", ())
        return Summary(f"{summary} {self.plan}", (*facts, ("plan", self.plan)))

    def load_state_dict(
        self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, strict: bool = True
    ) -> None:
        """Continues from a saved state, with the scheme that was chosen in the saved run.

        The measurement begins anew if the saved run had not chosen yet.
        """
        common = read(state, "load_state_dict").common
        plan = _read_plan(common.get("plan", ""))
        if plan.get("undecided"):
            super().load_state_dict(state, strict=False)
            self._begin_anew()
            return
        if strict and plan.get("split"):
            raise CheckpointError(
                "load_state_dict: the saved run had two schemes, which 'auto' cannot have; "
                "strict=False keeps step and residual, and times the candidates anew"
            )
        choice = self._saved_choice(without_start(common)[1])
        before = self.scheme
        if choice is not None:
            self._replace(choice[1])
        try:
            super().load_state_dict(state, strict=strict)
        except BaseException:
            self._replace(before)
            raise
        if choice is None:  # without ``strict``: the saved run had a scheme that is no candidate
            self._begin_anew()
        else:
            self._trials.end(f"auto runs {choice[0]}, as the run that was saved.")

    def _begin_anew(self) -> None:
        self._replace(make("none"))  # no ``switch``: other ranks may not have loaded
        self._trials.begin()

    def plan_state(self) -> str:
        """Returns the choice as JSON, for ``load_state_dict``."""
        choice = self._trials.choice
        if choice is None:
            return json.dumps({"undecided": not self._trials.over})
        return json.dumps({"name": choice.name})

    def apply_plan(self, plan: str, scheme: str) -> None:
        """Runs the choice of the ranks that this one joins; without a choice all begin anew."""
        saved = _read_plan(plan)
        if saved.get("undecided"):
            self._trials.end("auto: the ranks change.")
            self._replace(make("none"))
            self._begins_anew = True
            return
        choice = self._saved_choice(scheme)
        if choice is not None and describe(choice[1]) != describe(unwrap_flush(self.scheme)):
            self._replace(choice[1])
        if not self.decided:
            name = choice[0] if choice else "the scheme it has"
            self._trials.end(f"auto runs {name}, as the ranks it joins.")

    def on_group_changed(self) -> None:
        """Begins the trials anew if they were not over: they have measured other ranks."""
        if self._begins_anew:
            self._begins_anew = False
            self._trials.begin()

    def _saved_choice(self, saved: str) -> tuple[str, Scheme] | None:
        """Returns the candidate that the saved run had."""
        for name, scheme in self._schemes.items():
            if describe(scheme) == saved:
                return name, scheme
        return None


def _error_of(name: str, scheme: Scheme) -> float:
    try:
        return error_of(scheme)
    except Exception as error:  # a scheme of the user's
        raise OptionError(
            f"auto(candidates=...): {name!r} failed on a matrix of 512 x 512 entries: {error}"
        ) from error


def _read_plan(text: str) -> dict[str, Any]:
    """Returns what ``plan_state`` wrote; empty for a run that chose nothing.

    Raises:
        CheckpointError: the text is no saved choice.
    """
    try:
        plan = from_json(text or "{}")
        if isinstance(plan, dict):
            return plan
    except (ValueError, TypeError):
        pass
    raise CheckpointError(f"load_state_dict: 'plan' is no plan of auto, got {text[:80]!r}; damaged")
