"""One bucket's memory: the flat buffer, the views of it, and the way of gradients in and out."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_core.reducer.bucket import GradBucket
from ddp_core.reducer.parameters import Trained

__all__ = ["FlatBucket"]

logger = logging.getLogger("ddp_core")

# From this many entries on, a gradient is copied as it arrives, while it is in cache. Smaller ones
# wait for the bucket to be full: one call for all of them is several times cheaper than one each.
LARGE = 1 << 14


class FlatBucket:
    """Gradients of several parameters in one flat tensor.

    Args:
        members: indices of its parameters.
        parameters: of the whole model.
        number: position in launch order.
        dtype: of the buffer; that of the parameters by default.
        as_view: gradients become views of the buffer.
    """

    def __init__(
        self,
        members: Sequence[int],
        parameters: Sequence[Trained],
        *,
        number: int = 0,
        dtype: torch.dtype | None = None,
        as_view: bool = False,
    ) -> None:
        self.members = list(members)
        self.number = number
        self.names = [parameters[index].name for index in members]
        self.parameters = [parameters[index].parameter for index in members]
        self.sparse = parameters[members[0]].sparse
        self.as_view = as_view
        self._slot_of = {index: slot for slot, index in enumerate(self.members)}
        first = self.parameters[0]
        if self.sparse:
            self.buffer = torch.empty(0, dtype=first.dtype, device=first.device)
            self.views: list[Tensor] = []
        else:
            # Complex parameters lie in the buffer as pairs of reals, as every collective and every
            # scheme understands them; their views are complex again.
            numel = sum(one.numel() for one in self.parameters)
            kind = dtype if dtype is not None and first.is_floating_point() else first.dtype
            self.buffer = torch.empty(
                numel * (2 if first.is_complex() else 1),
                dtype=kind.to_real() if kind.is_complex else kind,
                device=first.device,
            )
            self.views = self.views_of(self.buffer)
        self._addresses = [view.data_ptr() for view in self.views]
        self.reset()

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.buffer.numel() * self.buffer.element_size()

    def reset(self) -> None:
        """Forgets what has arrived; the step starts anew."""
        self.pending = len(self.members)
        self._copied: set[int] = set()  # slots that are in the buffer, scaled

    def clear(self) -> None:
        """The gradients of a rank without inputs are zeros."""
        if self.sparse:
            self.buffer = _empty_sparse(self.parameters[0])
        else:
            self.buffer.zero_()

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """A view per parameter, with its shape and, where it has no gaps, its strides."""
        views = []
        offset = 0
        for parameter in self.parameters:
            source = torch.view_as_complex(flat.view(-1, 2)) if parameter.is_complex() else flat
            numel = parameter.numel()
            if _is_dense(parameter):
                start = source.storage_offset() + offset
                view = source.as_strided(parameter.shape, parameter.stride(), start)
            else:
                view = source.narrow(0, offset, numel).view(parameter.shape)
            views.append(view)
            offset += numel
        return views

    # ---- gradients in

    def is_large(self, index: int) -> bool:
        """Whether the gradient of this member is copied as it arrives, see ``take_large``."""
        return not self.sparse and self.parameters[self._slot_of[index]].numel() >= LARGE

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
        """Puts all gradients that are not there yet into the buffer.

        Args:
            gradients: by slot; None is a zero.
            divisor: what they are divided by; None: nothing.
        """
        if self.sparse:
            self._fill_sparse(gradients[0], divisor)
            return
        fresh: list[int] = []
        in_place: list[int] = []  # the gradient is the view already
        values: list[Tensor] = []
        for slot, grad in enumerate(gradients):
            if slot in self._copied:
                continue
            if grad is None:
                self.views[slot].zero_()
            elif grad.is_sparse:
                fresh.append(slot)
                values.append(grad.to_dense())
            elif grad.data_ptr() == self._addresses[slot]:
                in_place.append(slot)
            else:
                fresh.append(slot)
                values.append(grad)
        if fresh:
            views = self.views
            if len(fresh) < len(views):
                views = [views[slot] for slot in fresh]
            torch._foreach_copy_(views, values)
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
            torch._foreach_mul_([self.views[slot] for slot in copies], 1.0 / divisor)
        if in_place:
            torch._foreach_div_([self.views[slot] for slot in in_place], divisor)

    def _fill_sparse(self, grad: Tensor | None, divisor: float | None) -> None:
        parameter = self.parameters[0]
        if grad is None:
            grad = _empty_sparse(parameter)
            parameter.grad = grad
        self.buffer = grad.detach()
        if divisor is not None:
            self.buffer.div_(divisor)

    # ---- results out

    @torch.no_grad()
    def scatter(self, result: Tensor, unused: Sequence[bool] | None = None) -> None:
        """Puts the averaged gradient of every parameter in its ``grad``.

        Args:
            result: flat, as large as the buffer, possibly the buffer itself.
            unused: by slot; where true, ``grad`` is left as it is.
        """
        if self.sparse:
            if unused is None or not unused[0]:
                if result is not self.buffer:
                    self.buffer.copy_(result)
                self.parameters[0].grad = self.buffer
            return
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
        if not _same_memory(result, self.buffer):
            self.buffer.copy_(result.reshape(-1))
        for slot, parameter in enumerate(self.parameters):
            if unused is not None and unused[slot]:
                continue
            grad, view = parameter.grad, self.views[slot]
            if grad is None:
                parameter.grad = view
            elif grad is not view and not _same_memory(grad, view):
                raise RuntimeError(
                    f"gradient_as_bucket_view: the gradient of {self.names[slot]!r} is not the "
                    f"view of its bucket any more; something replaced it during backward"
                )

    def _scatter_copies(self, result: Tensor, unused: Sequence[bool] | None) -> None:
        views = self.views
        if not _same_memory(result, self.buffer):
            views = self.views_of(result.reshape(-1))
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
            torch._foreach_copy_(grads, values)

    def is_in_view(self, slot: int) -> bool:
        """Whether the parameter's gradient is its view of the buffer."""
        grad = self.parameters[slot].grad
        return (
            self.as_view
            and not self.sparse
            and grad is not None
            and _same_memory(grad, self.views[slot])
        )

    def adopt_gradients(self) -> None:
        """Moves existing gradients into this bucket's views (buckets were rebuilt)."""
        if self.sparse or not self.as_view:
            return
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is not None:
                view.copy_(parameter.grad)
                parameter.grad = view

    def as_grad_bucket(self, *, is_last: bool, buffer: Tensor | None = None) -> GradBucket:
        """What a hook is given, with another buffer than its own on request."""
        buffer = self.buffer if buffer is None else buffer
        views = None if self.sparse else self.views_of
        return GradBucket(
            self.number, buffer, self.parameters, names=self.names, is_last=is_last, views_of=views
        )


def _empty_sparse(like: Tensor) -> Tensor:
    """A sparse tensor of zeros."""
    indices = torch.empty((1, 0), dtype=torch.int64, device=like.device)
    values = like.detach().new_empty((0, *like.shape[1:]))
    return torch.sparse_coo_tensor(indices, values, like.shape, check_invariants=False)


def _is_dense(tensor: Tensor) -> bool:
    """Whether its entries fill a block of memory without gaps or overlaps."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _same_memory(left: Tensor, right: Tensor) -> bool:
    return left is right or (
        not left.is_sparse
        and not right.is_sparse
        and left.data_ptr() == right.data_ptr()
        and left.dtype == right.dtype
    )


@functools.cache
def _warn_of_create_graph() -> None:
    logger.warning(
        "DistributedDataParallel with create_graph=True averages gradients, not the graph of "
        "gradients: higher-order gradients are those of this rank"
    )
