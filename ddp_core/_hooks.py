"""The communication hook of a module: set, removed, scheduled, and the layout it asks for."""

from __future__ import annotations

from typing import Any

from ddp_core._construct import check_hook
from ddp_core._launch import CommHook
from ddp_core._layout import BucketCaps
from ddp_core._reducer import Reducer

__all__ = ["CommHooks"]

Registered = tuple[CommHook, Any]  # the hook and its state


class CommHooks:
    """What hook runs now, and what hooks run later.

    Args:
        caps: sizes of buckets, which a hook may change if the user has not asked for any.
    """

    def __init__(self, caps: BucketCaps) -> None:
        self._caps = caps
        self.registered: list[Registered] = []  # one, or none
        self._scheduled: dict[int, Registered | None] = {}

    def set(self, hook: CommHook | None, state: Any, reducer: Reducer) -> None:
        """The hook of all following steps; None: the plain all-reduce."""
        if hook is not None:
            check_hook(hook)
        if reducer.under_way:
            raise RuntimeError(
                "the communication hook changes between two steps: after backward, before forward"
            )
        self.registered[:] = [] if hook is None else [(hook, state)]
        reducer.launcher.hook = self.registered[0] if self.registered else None
        self._ask_for_layout(reducer, getattr(state, "bucket_group", None))

    def schedule(self, step: int, hook: CommHook | None, state: Any, reducer: Reducer) -> None:
        """The hook from synchronised step ``step`` on."""
        if hook is not None:
            check_hook(hook)
        now = reducer.launcher.step
        if step < now:
            raise ValueError(
                f"schedule_comm_hook(step={step}): step {now} is next; steps count the "
                f"synchronised backward passes from 0"
            )
        self._scheduled[step] = None if hook is None else (hook, state)

    def follow_schedule(self, reducer: Reducer) -> None:
        """Sets the hook that was scheduled for the coming step, if any."""
        step = reducer.launcher.step
        if step in self._scheduled:
            hook, state = self._scheduled.pop(step) or (None, None)
            self.set(hook, state, reducer)
            reducer.rebuild()

    def refresh_layout(self, reducer: Reducer) -> None:
        """Asks the hook's state again: its answers have changed."""
        self._ask_for_layout(reducer, reducer.plan.group_of, refresh=True)

    def _ask_for_layout(self, reducer: Reducer, group_of: Any, *, refresh: bool = False) -> None:
        state = self.registered[0][1] if self.registered else None
        caps = self._caps.for_hook(getattr(state, "bucket_cap_mb", None))
        plan = reducer.plan
        again = refresh and group_of is not None
        if group_of is not plan.group_of or caps != plan.caps or again:
            plan.request(group_of, caps)
