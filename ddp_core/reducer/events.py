"""What becomes of a step, told to the state of the communication hook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

__all__ = ["StepEvents"]


class StepEvents:
    """Calls the methods that a hook's state has; looked up once, when the hook is set.

    Of every synchronised step that has begun, a state hears exactly one end: ``step_landed`` or
    ``step_abandoned``. See ``DistributedDataParallel.register_comm_hook`` for what each means.
    """

    def __init__(self, state: Any = None) -> None:
        # Looked up once: every step asks for them, and most states have none.
        self._no_more_buckets: Callable[[], object] | None = _method(state, "no_more_buckets")
        self._step_landed: Callable[[Sequence[nn.Parameter]], object] | None
        self._step_landed = _method(state, "step_landed")
        self._step_abandoned: Callable[[], object] | None = _method(state, "step_abandoned")

    @property
    def wants_left_alone(self) -> bool:
        """Whether anybody looks at the parameters whose gradients were not written."""
        return self._step_landed is not None

    def no_more_buckets(self) -> None:
        """Tells that backward has ended well: the step's last bucket was launched."""
        if self._no_more_buckets is not None:
            self._no_more_buckets()

    def step_landed(self, left_alone: Sequence[nn.Parameter]) -> None:
        """Tells that all gradients were written, but for those of ``left_alone``."""
        if self._step_landed is not None:
            self._step_landed(left_alone)

    def step_abandoned(self) -> None:
        """Tells that the step's results will not be used."""
        if self._step_abandoned is not None:
            self._step_abandoned()


def _method(state: Any, name: str) -> Any:
    found = getattr(state, name, None)
    return found if callable(found) else None
