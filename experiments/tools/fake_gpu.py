"""Pretends a GPU: runs the host code of the CUDA path on tensors without data, and counts.

Tensors on PyTorch's "meta" device have shapes and dtypes, but no memory, so that they need no GPU.
They take the paths of a GPU, since they are not on the CPU; reading a value on the host, or copying
from the host to the device, for both of which a host waits for its GPU, raises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from commhooks.core import Layout, Scheme
from commhooks.hook._engine import Engine
from commhooks.kernels.runtime import cuda
from commhooks.kernels.runtime.op import Op
from commhooks.verify._equal import hashes_of
from commhooks.verify._measure import Measurement, Observer
from commhooks.verify._verification import _joined, _table
from ddp_core import AllGather, AllReduce, AllToAll, Collective
from ddp_core.exchange._collectives import nccl_scales

__all__ = ["Counts", "counts_of", "fake_gpu", "run_bucket", "tensor_by_copy", "verified_launches"]

# Operations that launch nothing: they allocate, or only describe memory.
_FREE = {"prim::device", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_WARM_UP = 3
_FREE |= {"detach", "alias", "_unsafe_view"}


@dataclass
class Counts:
    """Counts the host's calls to the pretended GPU.

    Attributes:
        kernels: launches of the project's own kernels, by name.
        instances: these kernels with their template arguments, by file.
        operations: PyTorch operations that are not views, by name; one launch each, at least.
        allocations: tensors that were created on the device.
        collectives: requests of the scheme.
        may_copy: lets tensors be copied between host and device, as in a first step.
    """

    kernels: Counter[str] = field(default_factory=Counter)
    instances: dict[str, set[str]] = field(default_factory=dict)
    operations: Counter[str] = field(default_factory=Counter)
    allocations: int = 0
    collectives: int = 0
    may_copy: bool = False

    @property
    def launches(self) -> int:
        """Returns the number of launches: own kernels and PyTorch's operations."""
        return self.kernels.total() + self.operations.total()

    def clear(self) -> None:
        """Resets the counts to zero."""
        self.kernels.clear()
        self.operations.clear()
        self.allocations = self.collectives = 0


class _Counting(TorchDispatchMode):
    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        outputs = [tensor for tensor in _flat(result) if isinstance(tensor, Tensor)]
        inputs = [tensor for tensor in _flat(args) if isinstance(tensor, Tensor)]
        if not any(tensor.is_meta for tensor in [*outputs, *inputs]):
            return result
        # A number may lie on the host: it travels with the launch.
        between = any(tensor.is_cpu and tensor.dim() for tensor in [*outputs, *inputs])
        if between and not self._counts.may_copy:
            raise RuntimeError(
                f"{name}: copies between host and device, which waits for the device"
            )
        # A view shares memory with an argument that it does not write to.
        aliases = [returned.alias_info for returned in func._schema.returns]
        is_view = bool(aliases) and all(
            alias is not None and not alias.is_write for alias in aliases
        )
        if not is_view and any(tensor.numel() for tensor in [*outputs, *inputs]):
            if any(alias is None for alias in aliases):
                self._counts.allocations += len(outputs)
            if name not in _FREE:
                self._counts.operations[name] += 1
        return result


def _flat(values: Any) -> Iterator[Any]:
    for value in values if isinstance(values, list | tuple) else [values]:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value


@contextmanager
def fake_gpu() -> Iterator[Counts]:
    """Runs ops on "meta" tensors by the host code of their CUDA kernels.

    Example:
        >>> with fake_gpu() as counts:
        ...     counts.may_copy = True  # the table of blocks, once
        ...     quantize(torch.empty(512, device="meta"), payload, "int8", 256)
        >>> counts.launches
        1
    """
    counts = Counts()

    def note(source: str, name: str, *rest: Any, **options: Any) -> None:
        counts.kernels[name.partition("<")[0]] += 1
        counts.instances.setdefault(source, set()).add(name)

    def run(op: Op, *args: Any) -> None:
        if args[0].is_meta:
            op.check_arguments(*args)
            op.kernels["cuda"](*args)
        else:
            op.definition(*args)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(cuda, "launch", note))
        stack.enter_context(mock.patch.object(Op, "__call__", run))
        # Without memory all addresses would be zero, and all tensors seem to share it.
        stack.enter_context(mock.patch.object(Tensor, "data_ptr", _address))
        stack.enter_context(mock.patch.object(torch.UntypedStorage, "data_ptr", _storage_address))
        stack.enter_context(
            mock.patch.object(torch, "tensor", partial(tensor_by_copy, torch.tensor))
        )
        stack.enter_context(_Counting(counts))
        yield counts


def tensor_by_copy(tensor: Callable[..., Tensor], data: Any, **options: Any) -> Tensor:
    """Stands for ``torch.tensor``, whose copy to a device no dispatch mode sees."""
    device = options.pop("device", None)
    # With a dimension also for a number: the copy waits as that of a list does.
    on_host = tensor([data], **options, device="cpu")
    return (on_host if device is None else on_host.to(device))[0]


def _storage_address(storage: torch.UntypedStorage) -> int:
    return int(storage._cdata) << 20


def _address(tensor: Tensor) -> int:
    offset = int(tensor.storage_offset()) * tensor.element_size()
    return _storage_address(tensor.untyped_storage()) + offset


def run_bucket(engine: Engine, gradient: Tensor, layout: Layout) -> Tensor:
    """Runs one step of one bucket; collectives return tensors of the right shape."""
    engine.begin_bucket(0, is_last=True)
    exchange = engine.exchange(gradient, layout)
    try:
        request = next(exchange)
        while True:
            request = exchange.send(_answer(request, engine.world_size))
    except StopIteration as stop:
        mean: Tensor = stop.value
        return mean


def _answer(request: Collective, world_size: int) -> Tensor:
    tensor = request.tensor
    if isinstance(request, AllReduce) and request.op == "mean" and not nccl_scales(tensor):
        tensor.mul_(1.0 / world_size)  # as ``AllReduce.issue`` does
    if isinstance(request, AllGather | AllToAll):
        size = world_size if request.ranks is None else len(request.ranks)
        shape = (size, *tensor.shape) if isinstance(request, AllGather) else tensor.shape
        return tensor.new_empty(shape)
    return tensor


def counts_of(
    scheme: Scheme,
    shapes: Sequence[tuple[int, ...]],
    *,
    world_size: int,
    rank: int = 0,
    observer: Observer | None = None,
) -> Counts:
    """Returns the counts of one bucket in the fourth step, when tables and buffers are there.

    Args:
        scheme: the scheme.
        shapes: of the bucket's parameters.
        world_size, rank: number of ranks, and of this one.
        observer: of every step.

    Raises:
        RuntimeError: the host would wait for the GPU in that step.
    """
    layout = Layout([f"p{i}" for i in range(len(shapes))], list(shapes))
    with fake_gpu() as counts:
        engine = Engine(scheme, rank=rank, world_size=world_size)
        engine.observer = observer
        for step in range(_WARM_UP + 1):
            counts.clear()
            counts.may_copy = step < _WARM_UP
            run_bucket(engine, torch.empty(layout.numel, device="meta"), layout)
    return counts


class _Verifying:
    """Verifies every step, and sends nothing."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], world_size: int) -> None:
        group: Any = SimpleNamespace(size=lambda: world_size, rank=lambda: 0)
        self.shapes, self.group = shapes, group
        self.hashes, self.message = False, False

    def wants(self, step: int, scheme: Scheme) -> bool:
        return True

    def on_step_end(self, step: int, scheme: Scheme, measured: list[Measurement]) -> None:
        parameters = [torch.empty(shape, device="meta") for shape in self.shapes]
        hashes = torch.empty(len(parameters), dtype=torch.int64, device="meta")
        if self.hashes:
            hashes = hashes_of(parameters)
        if self.message:
            _table(measured, hashes, self.group)
            _joined(measured)


def verified_launches(
    scheme: Scheme, shapes: Sequence[tuple[int, ...]], *, world_size: int
) -> dict[str, int]:
    """Returns what verification adds to the launches of a step of one bucket.

    ``bucket`` is added for each bucket, ``hashes`` for hashes of its parameters, and ``message``
    once a step.
    """
    observer = _Verifying(shapes, world_size)
    launches = [counts_of(scheme, shapes, world_size=world_size).launches]
    for hashes, message in ((False, False), (True, False), (True, True)):
        observer.hashes, observer.message = hashes, message
        counts = counts_of(scheme, shapes, world_size=world_size, observer=observer)
        launches.append(counts.launches)
    added = (after - before for before, after in pairwise(launches))
    return dict(zip(("bucket", "hashes", "message"), added, strict=True))
