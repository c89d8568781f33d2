"""Holds the buckets of a reducer: memory of gradients, flat or sparse, and where each one goes."""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from ddp_core._torch import foreach_copy, foreach_divide, foreach_multiply, foreach_zero
from ddp_core.reducer._grad_bucket import GradBucket
from ddp_core.reducer._parameters import Trained

__all__ = [
    "BucketBase",
    "BucketSet",
    "FlatBucket",
    "SparseBucket",
    "as_numbers",
    "flat_buffer",
    "same_memory",
    "views_of",
]


class BucketBase(ABC):
    """Holds a bucket of a reducer; hooks receive a :class:`ddp_core.GradBucket` of it.

    Args:
        members: indices of its parameters.
        parameters: of the whole model.
        number: position in launch order.

    Attributes:
        buffer: the tensor that is averaged.
        pending: number of gradients that have not arrived in this step.
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
        """Resets the count of gradients for the next step."""
        self.pending = len(self.members)

    @abstractmethod
    def clear(self) -> None:
        """Sets the gradients to zero, for a rank without inputs."""

    @abstractmethod
    def fill(self, gradients: Sequence[Tensor | None], divisor: float | None) -> None:
        """Copies all gradients that are not in the buffer yet into it.

        Args:
            gradients: by slot; None is a zero.
            divisor: divides the gradients; None: they are not divided.
        """

    @abstractmethod
    def scatter(self, result: Tensor, unused: Sequence[bool] | None = None) -> None:
        """Writes the averaged gradient of every parameter to its ``grad``.

        Args:
            result: as large as the buffer, possibly the buffer itself.
            unused: by slot; where true, ``grad`` is left as it is.
        """

    def is_in_view(self, slot: int) -> bool:
        """Whether the parameter's gradient is its view of the buffer."""
        return False

    def adopt_gradients(self) -> None:
        """Moves existing gradients into the views of this bucket, which is new, if it has views."""
        return

    def as_grad_bucket(self, *, is_last: bool, buffer: Tensor | None = None) -> GradBucket:
        """Returns the bucket that a hook receives, with another buffer on request."""
        return GradBucket(
            self.number,
            self.buffer if buffer is None else buffer,
            self.parameters,
            names=self.names,
            is_last=is_last,
            views_of=self._views_of,
        )


# ---- flat memory


def flat_buffer(parameters: Sequence[Tensor], dtype: torch.dtype | None) -> Tensor:
    """Returns an uninitialised flat tensor for the gradients of parameters of one kind.

    Args:
        dtype: of the tensor, if parameters are real; their own by default.
    """
    first = parameters[0]
    numel = sum(parameter.numel() for parameter in parameters)
    kind = dtype if dtype is not None and first.is_floating_point() else first.dtype
    # Complex parameters lie in the buffer as pairs of reals, as every collective and every scheme
    # understands them; their views are complex again.
    return torch.empty(
        numel * (2 if first.is_complex() else 1),
        dtype=kind.to_real() if kind.is_complex else kind,
        device=first.device,
    )


def as_numbers(buffer: Tensor, parameter: Tensor) -> Tensor:
    """Returns a buffer as complex numbers where its parameters are complex, else unchanged."""
    if parameter.is_complex() and not buffer.is_complex():
        return torch.view_as_complex(buffer.view(-1, 2))
    return buffer


def views_of(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Returns a view per parameter, with its shape and, where it has no gaps, its strides."""
    views = []
    offset = 0
    for parameter in parameters:
        source = torch.view_as_complex(flat.view(-1, 2)) if parameter.is_complex() else flat
        numel = parameter.numel()
        if _is_dense(parameter):
            # Strides of the parameter: autograd keeps a gradient with these as it is, and would
            # copy another one (channels last).
            start = source.storage_offset() + offset
            view = source.as_strided(parameter.shape, parameter.stride(), start)
        else:
            view = source.narrow(0, offset, numel).view(parameter.shape)
        views.append(view)
        offset += numel
    return views


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's entries fill a block of memory without gaps or overlaps."""
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


def same_memory(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are one object, or begin at one address and have one dtype."""
    return left is right or (
        not left.is_sparse  # has no address
        and not right.is_sparse
        and left.data_ptr() == right.data_ptr()
        and left.dtype == right.dtype
    )


logger = logging.getLogger("ddp_core")

# From this many entries on, a gradient is copied as it arrives, while it is in the CPU's cache.
# Smaller ones wait for the bucket to be full: one call for all of them is several times cheaper
# than one each. On a GPU, where memory is as fast later, they all wait.
LARGE = 1 << 14


class FlatBucket(BucketBase):
    """Holds the gradients of several parameters in one flat tensor.

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
        """Whether a member's gradient is copied when it arrives, see ``fill_large``."""
        on_host = self.buffer.device.type == "cpu"
        return on_host and self.parameters[self._slot_of[index]].numel() >= LARGE

    def fill_large(self, index: int, scale: float | None) -> None:
        """Copies one large gradient when it arrives, scaled unless ``scale`` is None."""
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
        """Scales as torch does: a copy is multiplied by 1/n, a view is divided by n."""
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


# ---- sparse gradients


class SparseBucket(BucketBase):
    """Holds the gradient of an embedding; the buffer becomes the gradient.

    Args:
        members: the index of its parameter.
        parameters: of the whole model.
        number: position in launch order.
    """

    sparse = True

    def __init__(
        self, members: Sequence[int], parameters: Sequence[Trained], *, number: int = 0
    ) -> None:
        super().__init__(members, parameters, number=number)
        (self._parameter,) = self.parameters
        # How many entries there will be is not known before a gradient has come.
        self.buffer = self._parameter.detach().new_empty(0)

    def clear(self) -> None:
        self.buffer = _no_entries(self._parameter)

    @torch.no_grad()
    def fill(self, gradients: Sequence[Tensor | None], divisor: float | None) -> None:
        (grad,) = gradients
        if grad is None:
            grad = self._parameter.grad = _no_entries(self._parameter)
        # A copy: the sum of two embeddings hands both the same tensor of values, and collectives
        # work in place.
        values = grad.detach()
        self.buffer = values.clone() if divisor is None else values / divisor

    @torch.no_grad()
    def scatter(self, result: Tensor, unused: Sequence[bool] | None = None) -> None:
        if unused is not None and unused[0]:
            return
        if result is not self.buffer:
            self.buffer.copy_(result)
        self._parameter.grad = self.buffer


def _no_entries(like: Tensor) -> Tensor:
    """Returns a sparse tensor of zeros."""
    indices = torch.empty((1, 0), dtype=torch.int64, device=like.device)
    values = like.detach().new_empty((0, *like.shape[1:]))
    return torch.sparse_coo_tensor(indices, values, like.shape, check_invariants=False)


# ---- all buckets


class BucketSet:
    """Holds a model's buckets, which the bucket plan replaces.

    Args:
        parameters: of the model.
        dtype: of the buckets; the parameters' own by default.
        as_view: gradients become views of the buckets.
        copies_at_once: whether large gradients are copied when they arrive.

    Attributes:
        list: in the order in which they are launched; the same object for good.
        location: by parameter, its bucket, and the bucket again if its gradient is copied at
            once; the same object for good.
    """

    def __init__(
        self,
        parameters: Sequence[Trained],
        *,
        dtype: torch.dtype | None,
        as_view: bool,
        copies_at_once: bool,
    ) -> None:
        self._parameters, self._dtype, self._as_view = parameters, dtype, as_view
        self._copies_at_once = copies_at_once
        self.list: list[BucketBase] = []
        self.location: dict[int, tuple[BucketBase, FlatBucket | None]] = {}

    @property
    def members(self) -> list[list[int]]:
        """Returns the indices of the parameters of each bucket."""
        return [bucket.members for bucket in self.list]

    def install(self, members: Sequence[Sequence[int]]) -> None:
        """Installs other buckets, and moves the present gradients to them."""
        self.list.clear()  # the old ones go first: not both at a time
        self.location.clear()
        for number, indices in enumerate(members):
            bucket = self._bucket(number, indices)
            bucket.adopt_gradients()
            self.list.append(bucket)
            for index in indices:
                self.location[index] = bucket, self._at_once(bucket, index)

    def _bucket(self, number: int, members: Sequence[int]) -> BucketBase:
        if self._parameters[members[0]].sparse:
            return SparseBucket(members, self._parameters, number=number)
        return FlatBucket(
            members, self._parameters, number=number, dtype=self._dtype, as_view=self._as_view
        )

    def _at_once(self, bucket: BucketBase, index: int) -> FlatBucket | None:
        if self._copies_at_once and isinstance(bucket, FlatBucket) and bucket.is_large(index):
            return bucket
        return None
