"""A bucket in flat memory: the buffer, the views of it, and the way of gradients in and out."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_core._torch import foreach_copy, foreach_divide, foreach_multiply, foreach_zero
from ddp_core.reducer.held import HeldBucket
from ddp_core.reducer.parameters import Trained
from ddp_core.reducer.views import flat_buffer, same_memory, views_of

__all__ = ["FlatBucket"]

logger = logging.getLogger("ddp_core")

# From this many entries on, a gradient is copied as it arrives, while it is in the CPU's cache.
# Smaller ones wait for the bucket to be full: one call for all of them is several times cheaper
# than one each. On a GPU, where memory is as fast later, they all wait.
LARGE = 1 << 14


class FlatBucket(HeldBucket):
    """Holds gradients of several parameters in one flat tensor.

    Args:
        members: indices of its parameters.
        parameters: of the whole model.
        number: position in launch order.
        dtype: of the buffer; that of the parameters by default.
        as_view: gradients become views of the buffer.
    """

    sparse = False

    def __init__(
        self,
        members: Sequence[int],
        parameters: Sequence[Trained],
        *,
        number: int = 0,
        dtype: torch.dtype | None = None,
        as_view: bool = False,
    ) -> None:
        super().__init__(members, parameters, number=number)
        self.as_view = as_view
        self.buffer = flat_buffer(self.parameters, dtype)
        self._slot_of = {index: slot for slot, index in enumerate(self.members)}
        self._views_of = functools.partial(views_of, parameters=self.parameters)
        self.views = views_of(self.buffer, self.parameters)
        # Whether a gradient is its view already is asked per parameter and step: an address is
        # compared, the view's is looked up once.
        self._addresses = [view.data_ptr() for view in self.views]
        self._copied: set[int] = set()  # slots that are in the buffer, scaled

    def reset(self) -> None:
        super().reset()
        self._copied.clear()

    def clear(self) -> None:
        self.buffer.zero_()

    # ---- gradients in

    def is_large(self, index: int) -> bool:
        """Whether the gradient of this member is copied as it arrives, see ``take_large``."""
        on_host = self.buffer.device.type == "cpu"
        return on_host and self.parameters[self._slot_of[index]].numel() >= LARGE

    def take_large(self, index: int, scale: float | None) -> None:
        """Copies one large gradient at once, scaled; ``scale`` None leaves it as it is."""
        slot = self._slot_of[index]
        parameter, view = self.parameters[slot], self.views[slot]
        grad = parameter.grad
        if grad is None or grad.is_sparse or grad.data_ptr() == self._addresses[slot]:
            return  # left to `fill`
        with torch.no_grad():
            if scale is None or scale == 1 or grad.dtype != view.dtype:
                view.copy_(grad)
                if scale is not None:
                    view.mul_(scale)
            else:
                torch.mul(grad, scale, out=view)
        self._copied.add(slot)
        if self.as_view:
            parameter.grad = view

    @torch.no_grad()
    def fill(self, gradients: Sequence[Tensor | None], divisor: float | None) -> None:
        fresh: list[int] = []
        absent: list[Tensor] = []
        in_place: list[int] = []  # the gradient is the view already
        values: list[Tensor] = []
        for slot, grad in enumerate(gradients):
            if slot in self._copied:
                continue
            if grad is None:
                absent.append(self.views[slot])
            elif grad.is_sparse:
                fresh.append(slot)
                values.append(grad.to_dense())
            elif grad.data_ptr() == self._addresses[slot]:
                in_place.append(slot)
            else:
                fresh.append(slot)
                values.append(grad)
        if absent:
            foreach_zero(absent)
        if fresh:
            views = self.views
            if len(fresh) < len(views):
                views = [views[slot] for slot in fresh]
            foreach_copy(views, values)  # one call for all: see docs/design/reducer.md
            if self.as_view:
                for slot, view in zip(fresh, views, strict=True):
                    self.parameters[slot].grad = view
            if values[0].requires_grad:
                _warn_of_create_graph()
        if divisor is not None and divisor != 1:
            self._scale(fresh, in_place, divisor)

    def _scale(self, copies: list[int], in_place: list[int], divisor: float) -> None:
        """As torch does it: a copy is multiplied by 1/n, a view is divided by n."""
        if len(copies) == len(self.members):
            self.buffer.mul_(1.0 / divisor)
            return
        if len(in_place) == len(self.members):
            self.buffer.div_(divisor)
            return
        if copies:
            foreach_multiply([self.views[slot] for slot in copies], 1.0 / divisor)
        if in_place:
            foreach_divide([self.views[slot] for slot in in_place], divisor)

    # ---- results out

    @torch.no_grad()
    def scatter(self, result: Tensor, unused: Sequence[bool] | None = None) -> None:
        if result.numel() != self.buffer.numel():
            raise RuntimeError(
                f"the hook's result for a bucket of {self.buffer.numel()} entries has "
                f"{result.numel()}; a hook returns a tensor like bucket.buffer()"
            )
        if self.as_view:
            self._scatter_views(result, unused)
        else:
            self._scatter_copies(result, unused)

    def _scatter_views(self, result: Tensor, unused: Sequence[bool] | None) -> None:
        if not same_memory(result, self.buffer):
            self.buffer.copy_(result.reshape(-1))
        for slot, parameter in enumerate(self.parameters):
            if unused is not None and unused[slot]:
                continue
            grad, view = parameter.grad, self.views[slot]
            if grad is None:
                parameter.grad = view
            elif grad is not view and not same_memory(grad, view):
                raise RuntimeError(
                    f"gradient_as_bucket_view: the gradient of {self.names[slot]!r} is not the "
                    f"view of its bucket any more; something replaced it during backward"
                )

    def _scatter_copies(self, result: Tensor, unused: Sequence[bool] | None) -> None:
        views = self.views
        if not same_memory(result, self.buffer):
            views = views_of(result.reshape(-1), self.parameters)
        grads, values = [], []
        for slot, parameter in enumerate(self.parameters):
            if unused is not None and unused[slot]:
                continue
            grad = parameter.grad
            if grad is None or grad.is_sparse:
                parameter.grad = views[slot].to(parameter.dtype, copy=True)
            else:
                grads.append(grad)
                values.append(views[slot])
        if grads:
            foreach_copy(grads, values)

    def is_in_view(self, slot: int) -> bool:
        grad = self.parameters[slot].grad
        return self.as_view and grad is not None and same_memory(grad, self.views[slot])

    def adopt_gradients(self) -> None:
        if not self.as_view:
            return
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is not None:
                view.copy_(parameter.grad)
                parameter.grad = view


@functools.cache
def _warn_of_create_graph() -> None:
    logger.warning(
        "DistributedDataParallel with create_graph=True averages gradients, not the graph of "
        "gradients: higher-order gradients are those of this rank"
    )
