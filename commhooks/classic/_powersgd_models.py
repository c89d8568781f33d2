"""A PowerSGDState's parts, one on each model, and what waits for the models to come."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from commhooks.classic._hook_access import (
    continue_from,
    group_of,
    layout_of,
    load,
    set_seed,
    set_step,
    step_under_way,
)
from commhooks.classic._launch import Wires
from commhooks.classic._owner import Group, Owner, owner_of
from commhooks.classic._powersgd_settings import Kind, PowerSGDSettings, made_from, scheme_of
from commhooks.classic._saved_alone import Saved, agree_on_parts
from commhooks.core.layout import Layout
from commhooks.errors import CheckpointError, RegistrationError
from commhooks.hook.handshake import handshake
from commhooks.hook.state import HookState

__all__ = ["Counted", "Inner", "OnModels"]


class Counted(NamedTuple):
    """A bucket, and the entries it has before and after compression."""

    layout: Layout
    before: int
    after: int


@dataclass(eq=False)
class Inner:
    """A PowerSGDState's part on one model."""

    hook: HookState
    group: Group  # as the state had it; None: the model's
    runs: tuple[Any, ...]  # what the hook's scheme was made from
    agreed: bool = False
    restored: Saved | None = None  # the saved state that was loaded, until agreed
    counted: dict[Any, Counted] = field(default_factory=dict)
    buckets: dict[int, Counted] = field(default_factory=dict)  # of the latest step, by index

    def count(
        self, settings: PowerSGDSettings, kind: Kind, index: int, parameters: Sequence[Tensor]
    ) -> Counted:
        """Takes down a bucket of this step, and says how many entries it has and sends."""
        key = (self.runs, *map(id, parameters))
        counted = self.counted.get(key)
        if counted is None:
            shapes = [parameter.shape for parameter in parameters]
            whole = sum(shape.numel() for shape in shapes)
            layout = layout_of(self.hook, parameters)
            counted = self.counted[key] = Counted(layout, whole, kind.numel(settings, shapes))
        if index == 0:
            self.buckets.clear()
        self.buckets[index] = counted
        return counted


class OnModels:
    """Where a PowerSGDState is in use, and the saved states that wait for its models.

    It does not hold the state, which its methods take as ``settings``.

    Attributes:
        inners: the parts, by model.
        first_iter: the step count that new parts begin with, if it was set.
        saved: states to be loaded by the models to come, with strictness.
        was_pickled: whether these came by pickle.
    """

    def __init__(self) -> None:
        self.inners: weakref.WeakKeyDictionary[Owner, Inner] = weakref.WeakKeyDictionary()
        self.first_iter: int | None = None
        self.saved: list[tuple[Saved, bool]] = []
        self.was_pickled = False

    def step(self) -> int:
        """Steps so far; of the model that made most, if there are several."""
        if self.inners:
            return max(inner.hook.step for inner in self.inners.values())
        if self.first_iter is None and self.saved:
            saved, _ = self.saved[0]
            return int((saved if isinstance(saved, Mapping) else saved[0])["step"])
        return self.first_iter or 0

    def set_step(self, value: int) -> None:
        """Goes on with another step count on every model."""
        self.first_iter = value
        for inner in self.inners.values():
            if inner.hook.step != value:
                set_step(inner.hook, value)
                inner.agreed = False  # ranks that count differently send different things

    def only(self, call: str) -> Inner | None:
        """The part on the one model; None if there is none yet.

        Raises:
            RegistrationError: there are several.
        """
        if len(self.inners) > 1:
            raise RegistrationError(
                f"PowerSGDState.{call}: the state is in use on {len(self.inners)} models; "
                f"make one for each to save them apart, or pickle the state"
            )
        return next(iter(self.inners.values()), None)

    def told_hook(self) -> HookState | None:
        """The hook that is meant; of several models autograd tells each one's steps."""
        return next(iter(self.inners.values())).hook if len(self.inners) == 1 else None

    def ready(
        self, settings: PowerSGDSettings, kind: Kind, bucket: GradBucket, wires: Wires
    ) -> Inner:
        """The part that a bucket belongs to, agreed on by all ranks, with the settings of now."""
        parameters = bucket.parameters()
        inner = self.part(settings, owner_of(parameters), parameters, kind, wires)
        if not inner.agreed:
            self._agree(inner)
        # Between two steps, or not at all: an abandoned step is closed by its successor.
        if bucket.index() == 0 and not step_under_way(inner.hook):
            runs = made_from(settings, kind, wires)
            if inner.runs != runs:
                if inner.runs[-1] != settings.random_seed:
                    set_seed(inner.hook, settings.random_seed)
                inner.hook.switch(scheme_of(settings, kind, wires))
                inner.runs = runs
        return inner

    def part(
        self,
        settings: PowerSGDSettings,
        owner: Owner,
        parameters: Sequence[Tensor],
        kind: Kind,
        wires: Wires,
    ) -> Inner:
        """The part on one model; a new one where there is none over this group."""
        group = settings.process_group
        inner = self.inners.get(owner)
        if inner is not None and (inner.group is group or step_under_way(inner.hook)):
            return inner
        scheme = scheme_of(settings, kind, wires)
        hook = owner.make(scheme, group, parameters, seed=settings.random_seed)
        if self.first_iter is not None:
            set_step(hook, self.first_iter)
        # The same model with other parameters, or over another group.
        for other in [one for one in self.inners if one is owner or owner.extends(one)]:
            continue_from(hook, self.inners.pop(other).hook)
        made = self.inners[owner] = Inner(hook, group, made_from(settings, kind, wires))
        return made

    def restored(
        self, settings: PowerSGDSettings, parameters: Sequence[Tensor], kind: Kind, wires: Wires
    ) -> Inner:
        """The part on the model with these parameters before its first step, loaded already."""
        inner = self.part(settings, owner_of(parameters), parameters, kind, wires)
        self._restore(inner)
        return inner

    def _restore(self, inner: Inner) -> None:
        """Loads what waits for the next model; a pickled state may be another rank's alone."""
        if not self.saved:
            return
        state, strict = self.saved[0]
        load(inner.hook, state, strict=strict, alone=self.was_pickled, call="PowerSGDState")
        inner.restored = state if self.was_pickled else None
        del self.saved[0]

    def _agree(self, inner: Inner) -> None:
        """Loads what waits to be loaded; if that fails on any rank, it fails on all."""
        error: CheckpointError | None = None
        outcome = "nothing to restore"
        try:
            self._restore(inner)
            if inner.restored is not None:
                outcome = "restored"
        except CheckpointError as raised:
            error, outcome = raised, str(raised)
        group = group_of(inner.hook)
        facts = {"saved state": outcome, "iter": inner.hook.step}
        handshake("PowerSGDState, first step", facts, group)
        if error is not None:
            raise error
        if inner.restored is not None:
            agree_on_parts(inner.restored, group)
        inner.agreed, inner.restored = True, None
