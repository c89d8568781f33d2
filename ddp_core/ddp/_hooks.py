"""Sets, removes and schedules a module's communication hook, and requests its layout."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn

from ddp_core.ddp._construct import check_hook
from ddp_core.ddp._replica import BufferHook
from ddp_core.reducer._launch import CommHook, name_of
from ddp_core.reducer._plan import BucketCaps
from ddp_core.reducer._reducer import Reducer

__all__ = ["CommHooks"]

Registered = tuple[CommHook, Any]  # the hook and its state


class CommHooks:
    """Holds the registered hook of a module, and the scheduled ones.

    Args:
        model: the module that averages with the hooks; a hook's state may read it.
        caps: sizes of buckets, which a hook may change if the user has set none.
    """

    _reducer: Reducer

    def __init__(self, model: weakref.ref[nn.Module], caps: BucketCaps) -> None:
        self._model, self._caps = model, caps
        self.registered: list[Registered] = []  # one, or none
        self._scheduled: dict[int, Registered | None] = {}

    def attach(self, reducer: Reducer) -> None:
        """Sets the reducer that averages the model's gradients from now on."""
        self._reducer = reducer

    def set(self, hook: CommHook | None, state: Any) -> None:
        """Sets the hook of all following steps; None stands for the plain all-reduce."""
        reducer = self._reducer
        if hook is not None:
            self._check(hook)
        # The step of a backward pass that raised belongs to no hook now; without this it would
        # count as under way until the next forward pass.
        reducer.drop_raised_step()
        if reducer.under_way:
            raise RuntimeError(
                "the communication hook changes between two steps: after backward, before forward"
            )
        self.registered[:] = [] if hook is None else [(hook, state)]
        self.launch_with_hooks()
        self._ask_for_layout(getattr(state, "bucket_group", None))
        attached = getattr(state, "attached_to_model", None)
        if callable(attached):
            attached(self._model())

    def _check(self, hook: CommHook) -> None:
        try:
            check_hook(hook)
        except (TypeError, ValueError) as error:
            self._reducer.launcher.error = f"{type(error)}: {error}"  # for the logging data
            raise

    def launch_with_hooks(self) -> None:
        """Makes the present reducer launch buckets through the registered hook."""
        self._reducer.launcher.set_hook(self.registered[0] if self.registered else None)

    def schedule(self, step: int, hook: CommHook | None, state: Any) -> None:
        """Sets the hook from synchronised step ``step`` on."""
        if hook is not None:
            self._check(hook)
        now = self._reducer.launcher.step
        if step < now:
            raise ValueError(
                f"schedule_comm_hook(step={step}): step {now} is next; steps count the "
                f"synchronised backward passes from 0"
            )
        self._scheduled[step] = None if hook is None else (hook, state)

    def follow_schedule(self) -> None:
        """Sets the hook that is scheduled for the coming step, if any."""
        step = self._reducer.launcher.step
        if step in self._scheduled:
            hook, state = self._scheduled.pop(step) or (None, None)
            self.set(hook, state)
            self._reducer.rebuild()  # the new one may want another layout, in this step

    def refresh_layout(self) -> None:
        """Asks the hook's state again for its layout, since its answers have changed."""
        self._ask_for_layout(self._reducer.plan.group_of, refresh=True)

    def check_states_follow(self, buffer_hook: BufferHook | None) -> None:
        """Raises unless the states of all hooks can change to other ranks between two steps."""
        self._reducer.drop_raised_step()
        if self._reducer.under_way:
            raise RuntimeError(
                "_update_process_group: the ranks change between two steps: after backward, before "
                "forward"
            )
        for (hook, state), remedy in self._everything(buffer_hook):
            if not callable(getattr(state, "change_group", None)):
                raise RuntimeError(
                    f"_update_process_group: the hook {name_of(hook)} averages over the process "
                    f"group that it was registered with, and its state ({type(state).__name__}) "
                    f"has no method change_group(group) by which it could follow. {remedy}"
                )

    def change_group(self, group: dist.ProcessGroup, buffer_hook: BufferHook | None) -> None:
        """Calls ``change_group`` of the states of all hooks."""
        # A state may have several hooks, and is notified once.
        states = {id(state): state for (_, state), _ in self._everything(buffer_hook)}
        for state in states.values():
            state.change_group(group)

    def _everything(self, buffer_hook: BufferHook | None) -> Iterator[tuple[Registered, str]]:
        """Yields all hooks with their states, and advice for one that cannot change ranks."""
        for registered in self.registered:
            yield (
                registered,
                (
                    "Call remove_comm_hook() before, and register a hook with a state of the new "
                    "group after"
                ),
            )
        for step, later in self._scheduled.items():
            if later is not None:
                yield later, f"It is scheduled for step {step}: schedule it after the change"
        if buffer_hook is not None:
            yield (buffer_hook.hook, buffer_hook.state), "Give the buffer hook's state one"

    def _ask_for_layout(self, group_of: Any, *, refresh: bool = False) -> None:
        state = self.registered[0][1] if self.registered else None
        caps = self._caps.for_hook(getattr(state, "bucket_cap_mb", None))
        plan = self._reducer.plan
        # The same function may answer otherwise now, which cannot be seen from here.
        again = refresh and group_of is not None
        if group_of is not plan.group_of or caps != plan.caps or again:
            plan.request(group_of, caps)
