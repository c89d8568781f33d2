"""Defines wrappers that choose a scheme by the step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from commhooks.core._bucket import Bucket, SchemeExchange
from commhooks.core._dense import Dense
from commhooks.core._scheme import Scheme, walk
from commhooks.core._settings import check_value, shown
from commhooks.core._slot import Slot
from commhooks.core._traits import Traits, worst
from commhooks.wrappers._base import Choice, Coalesced, Wrapper, check_is_scheme
from commhooks.wrappers._feedback import FlushResidual, keeps_residual, pop_residual, with_flush

__all__ = ["DelayedStart", "PeriodicDense", "Schedule", "running_at"]


def check_no_start(owner: Scheme, scheme: Scheme) -> None:
    """Raises if an inner scheme has dense first steps of its own, from which it learns."""
    for inside in walk(scheme):
        if setting := inside.traits.dense_warmup:
            raise ValueError(
                f"{type(owner).__name__}({type(scheme).__name__}(...)): {type(inside).__name__} "
                f"has uncompressed first steps of its own, and needs them; set its {setting}"
            )


@dataclass(frozen=True)
class DelayedStart(Wrapper):
    """Runs ``before`` until step ``start_step``, then ``scheme``.

    Early gradients change fast and compress badly; a tenth of the training is a usual start.

    Args:
        scheme: runs from step ``start_step`` on (steps count from 0).
        start_step: number of steps in which ``before`` runs.
        before: runs in the steps before; by default the dense all-reduce.

    Reference: Vogels et al., PowerSGD, 2019 (warm-up).
    """

    scheme: Scheme
    start_step: int
    before: Scheme = field(default_factory=Dense)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_no_start(self, self.scheme)
        if self.start_step < 0:
            raise ValueError(
                f"DelayedStart(start_step=...) is a number of steps, 0 or more, "
                f"got {self.start_step!r}"
            )

    @property
    def traits(self) -> Traits:
        return worst([self.before.traits, self.scheme.traits])

    def begins_with(
        self, name: str, shape: torch.Size, dtype: torch.dtype, step: int
    ) -> tuple[Slot, ...]:
        return self.scheme.begins_with(name, shape, dtype, step)

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        scheme = self.before if bucket.step < self.start_step else self.scheme
        # A residual that ``before`` has left is sent by the scheme after it.
        if scheme is self.scheme and keeps_residual(self.before):
            scheme = with_flush(scheme)
        return (yield from scheme.exchange(bucket))


@dataclass(frozen=True)
class PeriodicDense(Wrapper):
    """Averages densely in every ``every``-th step, and sends the residual of feedback with it.

    Bounds how late an entry arrives, and for how long an approximation can mislead, for
    ``1 / every`` of the dense bytes.

    Args:
        scheme: runs in all other steps.
        every: number of steps from one dense step to the next; 2 or more.

    Example:
        >>> hook = register(ddp_model, PeriodicDense(make("onebit"), every=50))
    """

    scheme: Scheme
    every: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every < 2:
            raise ValueError(
                f"PeriodicDense(every=...) is a number of steps, 2 or more, got {self.every!r}"
            )
        if self.scheme.traits.returns == "update":
            raise ValueError(
                f"PeriodicDense({type(self.scheme).__name__}(...)): it gives the optimizer "
                f"something else than an average of gradients, and an uncompressed step is one; "
                f"use it as it is"
            )

    @property
    def traits(self) -> Traits:
        # A scheme of no rounds has dense steps here, too.
        return self.scheme.traits._replace(rounds=max(1, self.scheme.traits.rounds))

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        if (bucket.step + 1) % self.every:
            return (yield from self.scheme.exchange(bucket))
        if keeps_residual(self.scheme):
            pop_residual(bucket)
        return (yield from bucket.all_reduce())


@dataclass(frozen=True)
class Schedule(Choice):
    """Runs one scheme after the other, each from its step on.

    The residual of error feedback is taken over by the next scheme's feedback, or sent with the
    next gradient if the next scheme has none.

    Args:
        parts: pairs of a step (counted from 0) and the scheme that runs from that step on; the
            first step is 0, and steps ascend.

    Example:
        >>> Schedule([(0, make("none")), (500, make("powersgd", rank=8)),
        ...           (5000, make("powersgd", rank=2))])
    """

    parts: Sequence[tuple[int, Scheme]]

    def __post_init__(self) -> None:
        pairs = tuple(self.parts) if isinstance(self.parts, Iterable) else ()
        if not pairs or not all(
            isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs
        ):
            raise ValueError(
                f"Schedule(parts=...) takes pairs of a step and a scheme, [(0, ...), (500, ...)], "
                f"got {shown(self.parts)}"
            )
        parts = tuple(
            (check_value("Schedule", "step", step, int), scheme) for step, scheme in pairs
        )
        object.__setattr__(self, "parts", parts)
        steps = [step for step, _ in parts]
        if steps[0] != 0 or sorted(set(steps)) != steps:
            raise ValueError(
                f"Schedule(parts=...) takes pairs of a step and a scheme, the first of step 0, in "
                f"ascending order, got steps {steps}"
            )
        for step, scheme in parts:
            check_is_scheme(self, scheme)
            if step:  # the first part runs from step 0, and so gets its dense steps
                check_no_start(self, scheme)

    @property
    def schemes(self) -> list[Scheme]:
        return [scheme for _, scheme in self.parts]

    def at(self, step: int) -> Scheme:
        """Returns the scheme that runs in a step."""
        running: Scheme = [scheme for begin, scheme in self.parts if begin <= step][-1]
        return running

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        scheme = self.at(bucket.step)
        if any(keeps_residual(part) for part in self.schemes):
            scheme = with_flush(scheme)
        return (yield from scheme.exchange(bucket))

    def begins_with(
        self, name: str, shape: torch.Size, dtype: torch.dtype, step: int
    ) -> tuple[Slot, ...]:
        return self.at(step).begins_with(name, shape, dtype, step)


def running_at(scheme: Scheme, step: int) -> Scheme:
    """Returns the scheme that runs in a step, if a scheme chooses by the step."""
    while True:
        if isinstance(scheme, Schedule):
            scheme = scheme.at(step)
        elif isinstance(scheme, DelayedStart):
            scheme = scheme.before if step < scheme.start_step else scheme.scheme
        elif isinstance(scheme, PeriodicDense):
            scheme = scheme.scheme if (step + 1) % scheme.every else Dense()
        elif isinstance(scheme, (FlushResidual, Coalesced)):  # how it is sent, in any step
            scheme = scheme.scheme
        else:
            return scheme
