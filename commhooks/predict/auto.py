"""Defines the hook of ``register(model, "auto")``, which measures and chooses a scheme."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from torch import nn

from commhooks.checkpoint.form import read
from commhooks.core.registry import need_known
from commhooks.core.scheme import Scheme
from commhooks.core.settings import fitting, from_json
from commhooks.errors import CheckpointError
from commhooks.hook.reporting import Tried
from commhooks.hook.state import HookState
from commhooks.hook.summary import Summary
from commhooks.predict.advise import CANDIDATES, made_candidates
from commhooks.predict.search import Search
from commhooks.predict.split import Split, split_scheme
from commhooks.wrappers.feedback import without_flush
from commhooks.wrappers.make import describe, make

__all__ = ["AutoHook"]

_MOST_MB = 1e6  # of a bucket


class AutoHook(HookState):
    """Chooses the scheme of a model by measurement, in its first steps.

    A search takes 20 to 400 steps: dense ones, dense ones without overlap, and some with each
    of up to three schemes that are predicted to be the fastest, in turns with dense ones. Turns go
    on until differences of 1 % are not due to chance, or for six rounds. The fastest scheme is kept
    if it saves 2 % of a dense step or more; of those within 1 % of it, the one with the smallest
    error.

    Args:
        model: see :class:`commhooks.HookState`.
        candidates: registered names, or schemes by name, to choose from; "none" and "bf16" always
            take part.
        error: largest relative squared error of an exchange of this model's gradients, without
            feedback: 0.05 allows 4 bits per entry, and no sparse or low-rank scheme.
        measure_steps: steps that are timed, for each scheme in each round.
        link_s: seconds in which the links are measured, about.

    Raises:
        ValueError: a candidate is no average of gradients, or a number is out of range.

    Example:
        >>> hook = commhooks.register(ddp_model, "auto", error=0.05)
        >>> print(hook.plan)  # after some steps
        auto runs int8 in buckets of 4 MiB: 34 % less time than dense steps. ...
    """

    def __init__(
        self,
        model: nn.Module | None,
        *,
        candidates: Iterable[str] | Mapping[str, Scheme] = CANDIDATES,
        error: float = 0.05,
        measure_steps: int = 8,
        link_s: float = 2.0,
        process_group: dist.ProcessGroup | None = None,
        seed: int = 0,
        history: int = 100_000,
        **unknown: Any,
    ) -> None:
        need_known("'auto'", unknown, ("candidates", "error", "measure_steps", "link_s"))
        self._candidates = made_candidates(candidates)
        self._begins_anew = False
        steps = fitting("auto", "measure_steps", measure_steps, int)
        if steps < 1:
            raise ValueError(f"auto(measure_steps=...) is 1 or more, got {measure_steps}")
        self._search = self._make_search(
            error=fitting("auto", "error", error, float),
            steps=steps,
            link_s=fitting("auto", "link_s", link_s, float),
        )
        super().__init__("none", model, process_group=process_group, seed=seed, history=history)

    def _make_search(self, **settings: Any) -> Search:
        return Search(self, super().switch, self._candidates, **settings)

    @property
    def plan(self) -> str:
        """Returns the decision in words."""
        return self._search.plan

    @property
    def decided(self) -> bool:
        """Whether the search is over."""
        return self._search.over

    @property
    def tried(self) -> list[Tried]:
        return self._search.tried

    @property
    def bucket_cap_mb(self) -> float | None:
        chosen = self._search.cap_mb
        return super().bucket_cap_mb if chosen is None else chosen

    def forward_begins(self) -> None:
        """Ends a step, and takes the next decision when a stage of the search is over."""
        super().forward_begins()
        self._search.forward_begins()

    def switch(self, scheme: str | Scheme, **options: Any) -> None:
        """Ends the search and runs another scheme, see :meth:`HookState.switch`."""
        super().switch(scheme, **options)
        self._search.end("auto: the scheme was chosen by hook.switch.")

    def summary(self, steps: int = 100) -> str:
        """Describes the latest steps, and the decision."""
        found = super().summary(steps)
        facts = getattr(found, "facts", ())
        return Summary(f"{found} {self.plan}", (*facts, ("plan", self.plan)))

    def load_state_dict(
        self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, strict: bool = True
    ) -> None:
        """Continues from a saved state: with the scheme that was chosen there.

        The search begins anew where none was chosen yet.
        """
        common = read(state, "load_state_dict").common
        plan = _read_plan(common.get("plan", ""))
        if plan.get("undecided"):
            super().load_state_dict(state, strict=False)
            self._search.begin()
            return
        found = self._saved_choice(plan, common["scheme"])
        before = self.scheme
        if found is not None:
            self._replace(found[1])
        try:
            super().load_state_dict(state, strict=strict)
        except BaseException:
            self._replace(before)
            raise
        self._search.end(f"auto runs {found[0] if found else 'none'}, as the run that was saved.")
        self._search.cap_mb = plan.get("cap_mb")

    def saved_plan(self) -> str:
        """Returns the choice as JSON, for ``load_state_dict``."""
        choice = self._search.choice
        if choice is None:
            return json.dumps({"undecided": not self._search.over})
        split = None if choice.split is None else asdict(choice.split)
        return json.dumps({"name": choice.name, "cap_mb": self._search.cap_mb, "split": split})

    def follow_plan(self, plan: str, scheme: str) -> None:
        """Runs the choice of the ranks that this one joins; without a choice all begin anew."""
        theirs = _read_plan(plan)
        if theirs.get("undecided"):
            self._search.end("auto: the ranks change.")
            self._replace(make("none"))
            self._begins_anew = True
            return
        found = self._saved_choice(theirs, scheme)
        if found is not None and describe(found[1]) != describe(without_flush(self.scheme)):
            self._replace(found[1])
        if not self.decided:
            self._search.end(f"auto runs {found[0] if found else 'none'}, as the ranks it joins.")
            self._search.cap_mb = theirs.get("cap_mb")

    def ranks_changed(self) -> None:
        """Begins the search anew if it was not over: it has measured other ranks."""
        if self._begins_anew:
            self._begins_anew = False
            self._search.begin()

    def _saved_choice(self, plan: dict[str, Any], saved: str) -> tuple[str, Scheme] | None:
        """Returns the scheme of a plan, or the candidate that a run without a plan had."""
        split = plan.get("split")
        if split is not None and {split.first, split.last} <= set(self._candidates):
            return str(split), split_scheme(split, self._candidates)
        for name, scheme in self._candidates.items():
            if describe(scheme) == saved:
                return name, scheme
        return None


def _read_plan(text: str) -> dict[str, Any]:
    """Returns what ``saved_plan`` wrote, its split made; empty for a run that chose nothing.

    Raises:
        CheckpointError: it is something else.
    """
    try:
        plan: dict[str, Any] = {"cap_mb": None, "split": None, **from_json(text or "{}")}
        if plan["split"] is not None:
            # Tuples, as frozen schemes need them; a text would be taken for its letters.
            members = fitting("Split", "parameters", plan["split"]["parameters"], list)
            plan["split"] = Split(**{**plan["split"], "parameters": tuple(members)})
        cap_mb = fitting("plan", "cap_mb", plan["cap_mb"], float | None)
        if cap_mb is None or 0 < cap_mb <= _MOST_MB:
            return plan
    except (ValueError, TypeError, KeyError):
        pass
    raise CheckpointError(f"load_state_dict: 'plan' is no plan of auto, got {text[:80]!r}; damaged")
