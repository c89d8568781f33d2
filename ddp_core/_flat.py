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
        self._parameters = dict(zip(self.members, self.parameters, strict=True))
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
            self.views = self._views_of(self.buffer)
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

    def is_large(self, index: int) -> bool:
        """Whether the gradient of this member is copied as it arrives, see ``take_large``."""
        return not self.sparse and self._parameters[index].numel() >= LARGE

    def take_large(self, index: int, scale: float | None) -> None:
        """Copies one large gradient at once, scaled; ``scale`` None leaves it as it is."""
        slot = self.members.index(index)
        parameter, view = self.parameters[slot], self.views[slot]
        grad = parameter.grad
        if grad is None or grad.is_sparse or _same_memory(grad, view):
            return  # left to `fill`
        grad = _detached(grad)
        if scale is None or grad.dtype != view.dtype:
            view.copy_(grad)
            if scale is not None:
                view.mul_(scale)
        else:
            torch.mul(grad, scale, out=view)
        self._copied.add(slot)
        if self.as_view:
            parameter.grad = view

    def fill(self, gradients: Sequence[Tensor | None], divisor: float | None) -> None:
        """Puts all gradients that are not there yet into the buffer.

        Args:
            gradients: by slot; None is a zero.
            divisor: what they are divided by; None: nothing.
        """
        if self.sparse:
            self._fill_sparse(gradients[0], divisor)
            return
        copies: list[int] = []
        in_place: list[int] = []  # the gradient is the view already
        for slot, grad in enumerate(gradients):
            if slot in self._copied:
                continue
            if grad is None:
                self.views[slot].zero_()
            elif grad.is_sparse:
                self.views[slot].copy_(_detached(grad).to_dense())
                copies.append(slot)
            elif grad.data_ptr() == self._addresses[slot]:
                in_place.append(slot)
            else:
                copies.append(slot)
        if copies:
            self._copy(copies, gradients)
        if divisor is not None and divisor != 1:
            self._scale(copies, in_place, divisor)

    def _copy(self, slots: list[int], gradients: Sequence[Tensor | None]) -> None:
        pairs = [(self.views[slot], gradients[slot]) for slot in slots]
        dense = [(view, grad) for view, grad in pairs if grad is not None and not grad.is_sparse]
        if dense:
            views, values = zip(*dense, strict=True)
            if any(value.requires_grad for value in values):
                values = tuple(map(_detached, values))
            torch._foreach_copy_(views, values)
        if self.as_view:
            for slot in slots:
                self.parameters[slot].grad = self.views[slot]

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
