"""One bucket's memory: the flat buffer, the views of it, and the way of gradients in and out."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_core._bucket import GradBucket
from ddp_core._parameters import Trained

__all__ = ["FlatBucket", "empty_sparse"]

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
        self.pending = len(self.members)
        self.large = [one.numel() >= LARGE for one in self.parameters]
        self._cast = dtype is not None and dtype != self.parameters[0].dtype
        first = self.parameters[0]
        if self.sparse:
            self.buffer = torch.empty(0, dtype=first.dtype, device=first.device)
            self.views: list[Tensor] = []
        else:
            # Complex parameters lie in the buffer as pairs of reals, as every collective and every
            # scheme understands them; their views are complex again.
            numel = sum(one.numel() for one in self.parameters)
            kind = dtype or first.dtype
            self.buffer = torch.empty(
                numel * (2 if first.is_complex() else 1),
                dtype=kind.to_real() if kind.is_complex else kind,
                device=first.device,
            )
            self.views = self._views_of(self.buffer)
        self.reset()

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.buffer.numel() * self.buffer.element_size()

    def reset(self) -> None:
        """Forgets what has arrived; the step starts anew."""
        self.pending = len(self.members)
        self._copied: list[int] = []  # slots that are in the buffer, scaled
        self._in_place: list[int] = []  # slots whose gradient is the view, not yet scaled

    def _views_of(self, flat: Tensor) -> list[Tensor]:
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

    def take_large(self, slot: int, grad: Tensor | None, scale: float | None) -> None:
        """Copies one large gradient at once, scaled; ``scale`` None leaves it as it is."""
        view = self.views[slot]
        if grad is None or _same_memory(grad, view):
            return  # left to `fill`
        grad = _detached(grad)
        if scale is None or self._cast or grad.is_sparse or grad.dtype != view.dtype:
            view.copy_(grad.to_dense() if grad.is_sparse else grad)
            if scale is not None:
                view.mul_(scale)
        else:
            torch.mul(grad, scale, out=view)
        self._copied.append(slot)
        if self.as_view:
            self.parameters[slot].grad = view

    def fill(self, gradients: Sequence[Tensor | None], divisor: float | None) -> None:
        """Puts all gradients that are not there yet into the buffer.

        Args:
            gradients: by slot; None is a zero.
            divisor: what they are divided by; None: nothing.
        """
        if self.sparse:
            self._fill_sparse(gradients[0], divisor)
            return
        slots: list[int] = []
        done = set(self._copied)
        for slot, grad in enumerate(gradients):
            if slot in done:
                continue
            view = self.views[slot]
            if grad is None:
                view.zero_()
                done.add(slot)
            elif grad is view or _same_memory(grad, view):
                self._in_place.append(slot)
            elif grad.is_sparse:
                view.copy_(_detached(grad).to_dense())
                slots.append(slot)
            else:
                slots.append(slot)
        if slots:
            self._copy(slots, gradients)
        if divisor is not None and divisor != 1:
            self._scale(slots, divisor)

    def _copy(self, slots: list[int], gradients: Sequence[Tensor | None]) -> None:
        views, values = [], []
        for slot in slots:
            grad = gradients[slot]
            assert grad is not None
            if not grad.is_sparse:
                views.append(self.views[slot])
                values.append(_detached(grad))
        torch._foreach_copy_(views, values)
        if self.as_view:
            for slot in slots:
                self.parameters[slot].grad = self.views[slot]

    def _scale(self, slots: list[int], divisor: float) -> None:
        """As torch does it: a copy is multiplied by 1/n, a view is divided by n."""
        total = len(self.members)
        if len(slots) == total:
            self.buffer.mul_(1.0 / divisor)
        elif len(self._in_place) == total:
            self.buffer.div_(divisor)
        else:
            if slots:
                torch._foreach_mul_([self.views[slot] for slot in slots], 1.0 / divisor)
            if self._in_place:
                torch._foreach_div_([self.views[slot] for slot in self._in_place], divisor)

    def _fill_sparse(self, grad: Tensor | None, divisor: float | None) -> None:
        parameter = self.parameters[0]
        if grad is None:
            grad = empty_sparse(parameter)
            parameter.grad = grad
        self.buffer = _detached(grad)
        if divisor is not None:
            self.buffer.div_(divisor)

    # ---- results out

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
            views = self._views_of(result.reshape(-1))
        grads, values = [], []
        for slot, parameter in enumerate(self.parameters):
            if unused is not None and unused[slot]:
                continue
            grad = parameter.grad
            if grad is None or grad.is_sparse:
                parameter.grad = views[slot].to(parameter.dtype, copy=True)
            else:
                grads.append(grad if not grad.requires_grad else grad.detach())
                values.append(views[slot])
        if grads:
            torch._foreach_copy_(grads, values)

    def adopt_gradients(self) -> None:
        """Moves existing gradients into this bucket's views (buckets were rebuilt)."""
        if self.sparse or not self.as_view:
            return
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is not None:
                view.copy_(parameter.grad)
                parameter.grad = view

    def as_grad_bucket(self, *, is_last: bool) -> GradBucket:
        """What a hook is given."""
        buffer = self.buffer
        views = None if self.sparse else self._views_of
        return GradBucket(
            self.number, buffer, self.parameters, names=self.names, is_last=is_last, views_of=views
        )


def empty_sparse(like: Tensor) -> Tensor:
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


def _detached(grad: Tensor) -> Tensor:
    if not grad.requires_grad:
        return grad
    logger.warning(
        "DistributedDataParallel with create_graph=True averages gradients, not the graph of "
        "gradients: higher-order gradients are those of this rank"
    )
    return grad.detach()
