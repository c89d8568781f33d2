"""Lets ranks leave a run and hand over what they keep, while they can still speak."""

from __future__ import annotations

from collections.abc import Sequence

from commhooks.checkpoint.form import Part
from commhooks.checkpoint.ranks import merged, resizes_of
from commhooks.hook.gather import gather
from commhooks.hook.group_change import need_between_steps, own_memory
from commhooks.hook.running import Running

__all__ = ["leave"]


def leave(hook: Running, ranks: Sequence[int]) -> None:
    """Does what ``HookState.leave`` does."""
    call, group = "HookState.leave", hook._binding.group()
    hook._bind()
    size, rank = group.size(), group.rank()
    fault = need_between_steps(hook) or None
    leaving = sorted(set(ranks)) if all(type(one) is int for one in ranks) else None
    if leaving is None or not leaving or leaving[0] < 0 or leaving[-1] >= size:
        fault = fault or f"ranks are some of 0 to {size - 1}, got {list(ranks)!r}"
    elif len(leaving) == size:
        fault = fault or "no rank would be left to take over; save state_dict(gather=True)"
    resizes, state = resizes_of(hook.scheme), None
    if fault is None:
        own = own_memory(hook)
        wanted = ("sum", "mean") if leaving is not None and rank in leaving else ("mean",)
        state = {
            "ranks": leaving,
            "step": hook.step,
            f"rank{rank}": {"memory": {k: own[k] for k in own if resizes.get(k) in wanted}},
        }
    with hook._binding.on_device():
        whole = gather(call, state, fault, group, None)
    assert leaving is not None
    staying = [one for one in range(size) if one not in leaving]
    if rank in leaving:
        hook._close()
        return
    parts = []
    for number in range(size):
        memory = dict(whole[f"rank{number}"]["memory"])
        if number == rank:
            memory = {**own_memory(hook), **memory}
        heir = staying[leaving.index(number) % len(staying)] if number in leaving else number
        parts.append(Part(heir, number, 0, memory))
    # By the number of ranks before: what a rank keeps weighs the same until the ranks change.
    values = merged(parts, rank, size, size, resizes)
    kept = {key: value for key, value in own_memory(hook).items() if resizes.get(key) == "drop"}
    hook._engine.memory.load({**values, **kept})
    hook._left = tuple(leaving)
