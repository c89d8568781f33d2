"""Defines the hook of ``register(model, "auto")`` on FSDP2: it races schemes, without predictions.

FSDP2 decides in which pieces gradients are reduced, and waits for each of them, so that there is
no bucket size to choose and little to predict: the candidates run in turns, and the fastest stays.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from commhooks.core.registry import need_known
from commhooks.core.scheme import Scheme
from commhooks.hook.sharded_bucket import need_shards
from commhooks.predict.advise import Option, error_of, made_candidates
from commhooks.predict.auto import AutoHook
from commhooks.predict.race import Race
from commhooks.predict.search import Search, Stage
from commhooks.predict.step import Step

__all__ = ["SHARDED_CANDIDATES", "ShardedAutoHook"]

# Without memory: feedback keeps four bytes for each entry of the whole model on every rank.
SHARDED_CANDIDATES = ("none", "bf16", "int8", "eden")
_UNKNOWN = Step(0.0, 0.0, 0.0, 0.0, 0, 0.0, 0)


@dataclass(frozen=True)
class _Entry(Option):
    """Holds a candidate of which nothing was predicted."""

    def __str__(self) -> str:
        return self.name

    @property
    def predicted_s(self) -> float:
        return math.nan

    def told(self, took: float) -> str:
        return f"{self.name}: {1e3 * took:.1f} ms per step"


class _Search(Search):
    """Times dense steps, then all candidates in turns."""

    def _end_stage(self) -> None:
        if self._stage is not Stage.DENSE:
            super()._end_stage()
            return
        self._dense_s = statistics.median(self._times_of_slowest())
        entries = [
            _Entry(name, scheme, 0.0, _UNKNOWN, error_of(scheme))
            for name, scheme in self._candidates.items()
        ]
        exact = ("none", "bf16")
        self._race = Race([one for one in entries if one.error <= self._error or one.name in exact])
        self._try_next()

    def _of_all(self, value: Any) -> list[Any]:
        found = super()._of_all(value)
        # Ranks with other parts of the gradients decide the same.
        for group in self._hook._binding.beside:
            everyone: list[Any] = [None] * group.size()
            with self._hook._binding.on_device():
                dist.all_gather_object(everyone, found, group=group)
            found = [one for theirs in everyone for one in theirs]
        return found


class ShardedAutoHook(AutoHook):
    """Chooses the scheme of FSDP2's reduce-scatter, or between its nodes, by timing steps.

    Args:
        shards: whether it is the reduce-scatter, which not all schemes can be.
        candidates: registered names, or schemes by name; "none" and "bf16" always take part.
        error: largest relative squared error of an exchange, of normal entries and without
            feedback.
        measure_steps: steps that are timed, for each scheme in each round.
        process_group, seed, history: see :class:`commhooks.HookState`.

    Raises:
        RegistrationError: a candidate cannot live there.
    """

    def __init__(
        self,
        *,
        shards: bool,
        candidates: Iterable[str] | Mapping[str, Scheme] = SHARDED_CANDIDATES,
        error: float = 0.05,
        measure_steps: int = 8,
        process_group: dist.ProcessGroup | None = None,
        seed: int = 0,
        history: int = 100_000,
        **unknown: Any,
    ) -> None:
        need_known("'auto' on FSDP2", unknown, ("candidates", "error", "measure_steps"))
        if shards:
            for scheme in made_candidates(candidates).values():
                need_shards(scheme, "FSDP2")
        super().__init__(
            None,
            candidates=candidates,
            error=error,
            measure_steps=measure_steps,
            process_group=process_group,
            seed=seed,
            history=history,
        )

    def _make_search(self, **settings: Any) -> Search:
        return _Search(self, super(AutoHook, self).switch, self._candidates, **settings)

    def saved_plan(self) -> str:
        plan = json.loads(super().saved_plan())
        return json.dumps(plan | {"cap_mb": None} if "cap_mb" in plan else plan)
