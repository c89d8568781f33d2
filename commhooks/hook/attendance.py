"""Defines ``Attendance``, which warns at the end if a hook was made and never called."""

from __future__ import annotations

import os
import warnings
import weakref
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from commhooks._torch import comm_hooks

__all__ = ["Attendance"]

_ADVICE = (
    "Was it registered (commhooks.register(model, ...), or model.register_comm_hook(state, "
    "commhooks.comm_hook)), and is the loss computed through the DistributedDataParallel? "
    "Lightning's DDPStrategy(ddp_comm_hook=...) registers on CUDA only"
)


class Attendance:
    """Counts the calls of a hook, and warns after the hook's state is gone if there were none.

    Attributes:
        calls: number of buckets that came to the hook.
        excused: whether the state was used for something else than to run (saved, say).
    """

    def __init__(self) -> None:
        self.calls = 0
        self.excused = False
        self._knows_model = self._trained = False
        self._handles: list[Any] = []
        self._seen: set[int] = set()

    def report_at_the_end_of(self, state: object, what: str, advice: str = _ADVICE) -> None:
        """Warns when ``state`` is dropped, or the interpreter ends, if it was never called.

        Args:
            state: what should be called.
            what: its name in the warning.
            advice: what may be the matter.
        """
        # A finalizer also runs at exit. It must not hold the state, which would never be dropped.
        weakref.finalize(state, self._end, what, advice)

    def watch(self, state: object, model: DistributedDataParallel) -> None:
        """Watches, until the hook is called, whether the model trains without it."""
        self._knows_model = True
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        looks = partial(self._look, weakref.ref(state), weakref.ref(model))
        # The first and the last parameter: one alone may be unused, all would be many calls.
        for place, parameter in enumerate([*trained[:1], *trained[1:][-1:]]):
            self._handles.append(parameter.register_hook(partial(looks, place)))

    def dismiss(self) -> None:
        """Turns the warning off: the state need not run in a backward pass."""
        self._knows_model, self.excused = False, True
        for handle in self._handles:
            handle.remove()

    def _look(self, state: Any, model: Any, place: int, _: Tensor) -> None:
        """Takes note of a gradient of a watched parameter."""
        ddp = model()
        # What is registered may stand for the state, and call it (torchft).
        named = [hook[1] for hook in (() if ddp is None else comm_hooks(ddp))]
        others = [one for one in named if getattr(one, "stands_for", one) is not state()]
        # Two backward passes without a call are training. In the first one the hook's call may
        # still come, since a bucket is launched after its gradients.
        if not self.calls and not others and getattr(ddp, "require_backward_grad_sync", False):
            self._trained |= place in self._seen
            self._seen.add(place)
        if self.calls or self._trained:
            for handle in self._handles:
                handle.remove()

    def _end(self, what: str, advice: str) -> None:
        # With a model, training decides. Without, a state that was neither called nor used for
        # anything else is suspicious only where there are other ranks to average with.
        if self.calls or (not self._trained if self._knows_model else self.excused):
            return
        if not self._knows_model and not _is_one_of_several():
            return
        trained = ", though its model was trained" if self._trained else ""
        warnings.warn(
            f"{what} was never called{trained}: no gradient was averaged by it. {advice}",
            RuntimeWarning,
            stacklevel=1,
        )


def _is_one_of_several() -> bool:
    """Whether this process takes, or took, part in distributed training."""
    # At exit the process group may be destroyed already; torchrun's variable is still there.
    if dist.is_available() and dist.is_initialized():
        return True
    return os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1")
