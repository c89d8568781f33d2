"""Defines GradBucket, the flat gradient of several parameters that a hook receives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.distributed import GradBucket as TorchGradBucket  # type: ignore[attr-defined]

from ddp_core.exchange._task import RoundRecord

__all__ = ["GradBucket"]


class GradBucket:
    """Holds one bucket as torch's class of this name does, and also its parameters' names.

    ``isinstance(bucket, torch.distributed.GradBucket)`` holds.

    Args:
        index: position in launch order within the step.
        buffer: flat gradient, one dimension.
        parameters: the parameters whose gradients ``buffer`` holds, in order.
        names: their names in the model.
        is_last: whether this is the step's last bucket.
        views_of: returns the gradients as views of a buffer; one after the other by default.
        note: called with a record of every round of the bucket's exchange.
    """

    def __init__(
        self,
        index: int,
        buffer: Tensor,
        parameters: Sequence[Tensor],
        *,
        names: Sequence[str] = (),
        is_last: bool = True,
        views_of: Callable[[Tensor], list[Tensor]] | None = None,
        note: Callable[[RoundRecord], None] | None = None,
    ) -> None:
        if views_of is None and not buffer.is_sparse:
            numel = sum(parameter.numel() for parameter in parameters)
            if buffer.shape != (numel,):
                raise ValueError(
                    f"GradBucket(buffer=...) is flat with one entry per parameter entry ({numel}), "
                    f"got shape {tuple(buffer.shape)}"
                )
        self._index, self._buffer, self._is_last = index, buffer, is_last
        self._parameters, self._names = list(parameters), list(names)
        self._views_of = views_of
        self.note = note

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # A subclass of torch's would have no C++ object behind it (torch's class has no
        # constructor), and C++ code that takes it would read memory that is not there. What looks
        # at the class alone gets the answer it asks for; C++ code refuses with a TypeError.
        return TorchGradBucket

    def index(self) -> int:
        """Returns the position in launch order; 0 holds the gradients that are ready first."""
        return self._index

    def buffer(self) -> Tensor:
        """Returns the flat gradient of all parameters of the bucket."""
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """Returns views of the buffer, one per parameter, in its shape; a sparse buffer itself."""
        if self._buffer.is_sparse:
            return [self._buffer]
        if self._views_of is not None:
            return self._views_of(self._buffer)
        sizes = [parameter.numel() for parameter in self._parameters]
        parts = self._buffer.split(sizes)
        return [
            part.view(parameter.shape)
            for part, parameter in zip(parts, self._parameters, strict=True)
        ]

    def parameters(self) -> list[Tensor]:
        """Returns the parameters, in the order of their gradients in the buffer."""
        return list(self._parameters)

    def names(self) -> list[str]:
        """Returns the parameters' names, in the same order."""
        return list(self._names)

    def is_last(self) -> bool:
        """Whether this is the last bucket of the step."""
        return self._is_last

    def set_buffer(self, tensor: Tensor) -> None:
        """Replaces the buffer; the new tensor has as many entries."""
        if tensor.numel() != self._buffer.numel():
            raise ValueError(
                f"GradBucket.set_buffer: the bucket has {self._buffer.numel()} entries, "
                f"got {tensor.numel()}"
            )
        self._buffer = tensor
