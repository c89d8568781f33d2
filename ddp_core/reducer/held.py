"""What every bucket of a reducer has, whether its gradients lie in flat memory or are sparse."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from torch import Tensor, nn

from ddp_core.reducer.bucket import GradBucket
from ddp_core.reducer.parameters import Trained

__all__ = ["HeldBucket"]


class HeldBucket(ABC):
    """Holds a bucket of a reducer; a hook gets a :class:`ddp_core.GradBucket` of it.

    Args:
        members: indices of its parameters.
        parameters: of the whole model.
        number: position in launch order.

    Attributes:
        buffer: what is averaged.
        pending: how many gradients have not come in this step.
    """

    sparse: ClassVar[bool]
    buffer: Tensor
    # By what a hook sees a buffer as gradients; None: the buffer is the gradient.
    _views_of: Callable[[Tensor], list[Tensor]] | None = None

    def __init__(
        self, members: Sequence[int], parameters: Sequence[Trained], *, number: int = 0
    ) -> None:
        self.members = list(members)
        self.number = number
        self.names = [parameters[index].name for index in members]
        self.parameters: list[nn.Parameter] = [parameters[index].parameter for index in members]
        self.pending = len(self.members)

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the buffer."""
        return self.buffer.numel() * self.buffer.element_size()

    def reset(self) -> None:
        """Forgets what has arrived; the step starts anew."""
        self.pending = len(self.members)

    @abstractmethod
    def clear(self) -> None:
        """Sets the gradients to zero, as those of a rank without inputs."""

    @abstractmethod
    def fill(self, gradients: Sequence[Tensor | None], divisor: float | None) -> None:
        """Puts all gradients that are not there yet into the buffer.

        Args:
            gradients: by slot; None is a zero.
            divisor: what they are divided by; None: nothing.
        """

    @abstractmethod
    def scatter(self, result: Tensor, unused: Sequence[bool] | None = None) -> None:
        """Puts the averaged gradient of every parameter in its ``grad``.

        Args:
            result: as large as the buffer, possibly the buffer itself.
            unused: by slot; where true, ``grad`` is left as it is.
        """

    def is_in_view(self, slot: int) -> bool:
        """Whether the parameter's gradient is its view of the buffer."""
        return False

    def adopt_gradients(self) -> None:
        """Moves existing gradients into this bucket's views, if it has any (it is new)."""
        return

    def as_grad_bucket(self, *, is_last: bool, buffer: Tensor | None = None) -> GradBucket:
        """Returns what a hook is given, with another buffer than its own on request."""
        return GradBucket(
            self.number,
            self.buffer if buffer is None else buffer,
            self.parameters,
            names=self.names,
            is_last=is_last,
            views_of=self._views_of,
        )
