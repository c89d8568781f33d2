"""A device of the CPU whose work waits in streams: a missing wait gives wrong numbers, every time.

Tensors on PyTorch's "meta" device get memory on the host here. An operation on them is put into the
queue of the current stream, and its result is garbage until that queue runs. Queues run as late as
they may (only where somebody waits for them), or all but the caller's run as early as they may; a
GPU's order lies between these. Memory that is given back is overwritten in the order of the stream
that asked for it, as the next tensor in its place would do it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from commhooks.core import _slot as slot
from commhooks.kernels.runtime.op import Op
from ddp_core.exchange import _clocks as clocks
from ddp_core.exchange import _devices as devices
from experiments.tools.fake_gpu import tensor_by_copy

__all__ = ["LazyDevice", "Order", "Stream", "lazy_device"]

Order = Literal["at once", "late", "early"]
_READS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "unique", "_unique2"}


class Event:
    """Marks a place in a stream."""

    def __init__(self, **_: Any) -> None:
        self.stream: Stream | None = None
        self.place = 0

    def record(self, stream: Stream) -> None:
        self.stream, self.place = stream, len(stream.queue)

    def query(self) -> bool:
        return self.stream is None or self.stream.done >= self.place

    def elapsed_time(self, end: Event) -> float:
        return float(end.place - self.place)

    def happen(self) -> None:
        if self.stream is not None:
            self.stream.run(self.place)


class Stream:
    """Holds work in order."""

    def __init__(self, machine: LazyDevice) -> None:
        self.machine, self.done = machine, 0
        self.queue: list[Callable[[], None]] = []
        self.free: list[Tensor] = []

    def take_memory(self) -> None:
        """Overwrites what was given back, as a new tensor in its place would."""
        taken, self.free = self.free, []
        for real in taken:
            self.enqueue(partial(_spoil, real))

    def enqueue(self, work: Callable[[], None]) -> None:
        self.queue.append(work)
        order = self.machine.order
        if order == "at once" or (order == "early" and self is not self.machine.main):
            self.run(len(self.queue))

    def run(self, place: int) -> None:
        """Does what was enqueued before that place."""
        while self.done < place:
            self.done += 1
            self.queue[self.done - 1]()

    def wait_event(self, event: Event) -> None:
        self.enqueue(event.happen)

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)


class Memory:
    """Owns the memory of a tensor and its views; given back, it is another tensor's."""

    def __init__(self, real: Tensor, stream: Stream) -> None:
        self._real, self._stream = real, stream
        self._recorded = False

    def record(self, stream: Stream) -> None:
        self._recorded |= stream is not self._stream

    def __del__(self) -> None:
        if self._recorded or self._stream.machine.order == "at once":
            # An allocator keeps it until the other streams are done; no stream waits for that.
            return
        self._stream.free.append(self._real)


def _spoil(real: Tensor) -> None:
    real.fill_(torch.nan if real.is_floating_point() or real.is_complex() else 77)


class LazyTensor(Tensor):
    """A tensor of the lazy device; ``host`` has its numbers as far as its stream has run."""

    host: Tensor
    memory: Memory

    @staticmethod
    def __new__(cls: Any, real: Tensor, memory: Memory) -> LazyTensor:
        made: LazyTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            real.size(),
            strides=real.stride(),
            storage_offset=real.storage_offset(),
            dtype=real.dtype,
            device="meta",
        )
        made.host, made.memory = real, memory
        return made

    # A wrapper's own storage has no address; code asks whether tensors share theirs.
    def untyped_storage(self) -> torch.UntypedStorage:
        return self.host.untyped_storage()

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def record_stream(self, stream: Any) -> None:
        self.memory.record(stream)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func}: outside of the lazy device's context, or in another thread")


class LazyFuture:
    """Has the semantics of torch's future for tensors of a device with streams."""

    def __init__(self, *, devices: Any = None) -> None:
        self._devices, self._done = devices, False
        self._value: Any = None
        self._error: BaseException | None = None
        self._events: list[Event] = []
        self._children: list[tuple[Callable[[Any], Any], LazyFuture]] = []

    machine: LazyDevice

    def set_result(self, value: Any) -> None:
        tensors = [element for element in _leaves(value) if isinstance(element, LazyTensor)]
        if tensors and not self._devices:
            raise RuntimeError("the result is on a device that the future was not made for")
        if tensors:  # events for the devices of the value, and only for these
            event = Event()
            event.record(self.machine.current)
            self._events.append(event)
        self._value = value
        self._complete()

    def _complete(self) -> None:
        self._done = True
        for callback, child in self._children:
            self._call(callback, child)

    def then(self, callback: Callable[[Any], Any]) -> LazyFuture:
        child = type(self)(devices=self._devices)
        if self._done:
            self._call(callback, child)
        else:
            self._children.append((callback, child))
        return child

    def _call(self, callback: Callable[[Any], Any], child: LazyFuture) -> None:
        # On a stream of the pool, which waits for the value, and for nothing else.
        with self.machine.stream(self.machine.Stream()):
            self._synchronise()
            try:
                child.set_result(callback(self))
            except Exception as error:  # as torch's: whoever waits for the child gets it
                child._error = error
                child._complete()

    def _synchronise(self) -> None:
        here = self.machine.current
        for event in self._events:
            here.wait_event(event)
        for element in _leaves(self._value):
            if isinstance(element, LazyTensor):
                element.memory.record(here)

    def wait(self) -> Any:
        assert self._done, "nobody completes this future: a deadlock"
        self._synchronise()
        return self.value()

    def value(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value

    def done(self) -> bool:
        return self._done

    def __class_getitem__(cls, element: Any) -> Any:
        return cls


class LazyDevice:
    """Stands for torch's module of a device, such as ``torch.cuda``, and keeps its streams."""

    Event = Event

    def __init__(self, order: Order) -> None:
        self.order = order
        self.main = self.current = Stream(self)
        self.may_copy = True

    def Stream(self, device: Any = None, priority: int = 0) -> Stream:
        return Stream(self)

    def current_stream(self, device: Any = None) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def _sleep(self, cycles: int) -> None:
        self.current.enqueue(lambda: None)

    def read(self, tensor: Tensor) -> Tensor:
        """Returns the numbers that the current stream finds in a tensor; the host waits for it."""
        assert isinstance(tensor, LazyTensor)
        self.current.run(len(self.current.queue))
        return tensor.host.clone()

    def made(self, real: Tensor) -> LazyTensor:
        self.current.take_memory()
        return LazyTensor(real, Memory(real, self.current))

    # ---- operations

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        flat = _leaves((args, kwargs))
        lazy = [value for value in flat if isinstance(value, LazyTensor)]
        on_meta = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta"
        if not lazy and not on_meta:
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        self._refuse_waits(name, flat, args, kwargs, on_meta=on_meta)
        # A copy from the host waits until it is over, unless it is asked not to.
        waits = any(_is_host(value) and value.dim() for value in flat) and _blocks(args, kwargs)
        alias = [value.alias_info for value in func._schema.returns]
        if alias and all(entry is not None and not entry.is_write for entry in alias):
            return self._view(func, args, kwargs, lazy[0])
        reals = self._real_call(func, args, kwargs)
        if any(entry is not None and entry.is_write for entry in alias) or not alias:
            self.current.enqueue(reals)
            if waits:
                self.current.run(len(self.current.queue))
            return kwargs.get("out", args[0]) if alias else None
        like = func(*_on_meta(args), **(_on_meta(kwargs) | ({"device": "meta"} if on_meta else {})))
        outs = _map(self._garbage_like, like)

        def run() -> None:
            for out, result in zip(_leaves(outs), _leaves(reals()), strict=True):
                out.copy_(result)

        made = _map(lambda out: self.made(out) if isinstance(out, Tensor) else out, outs)
        outs = _map(lambda out: out.view(out.shape) if isinstance(out, Tensor) else out, outs)
        self.current.enqueue(run)
        if waits:
            self.current.run(len(self.current.queue))
        return made

    def _refuse_waits(self, name: str, flat: Any, args: Any, kwargs: Any, *, on_meta: bool) -> None:
        tensors = [value for value in flat if isinstance(value, Tensor)]
        to_host = name == "_to_copy" and kwargs.get("device") is not None and not on_meta
        to_host |= name == "copy_" and _is_host(args[0]) and _blocks(args, kwargs)
        from_host = any(tensor.dim() for tensor in tensors if _is_host(tensor))
        if name in _READS or to_host or (from_host and not self.may_copy):
            raise RuntimeError(f"{name}: the host would wait for the device")

    def _view(self, func: Any, args: Any, kwargs: Any, base: LazyTensor) -> Any:
        result = func(*_real(args), **_real(kwargs))
        return _map(
            lambda value: LazyTensor(value, base.memory) if isinstance(value, Tensor) else value,
            result,
        )

    def _real_call(self, func: Any, args: Any, kwargs: Any) -> Callable[[], Any]:
        positional, named = _real(args), _real(kwargs)
        if func._schema.name == "aten::copy_" and _is_host(args[0]):
            positional = (args[0], *positional[1:])  # written, not read
        if "device" in named:
            named["device"] = torch.device("cpu")
        return lambda: func(*positional, **named)

    def _garbage_like(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        real = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        _spoil(real)
        return real


# Arguments of operations nest in little; torch's trees, which take any class, took a quarter of the
# time of the tests on this device.


def _map(function: Callable[[Any], Any], values: Any) -> Any:
    if isinstance(values, (tuple, list)):
        return type(values)([_map(function, value) for value in values])
    if isinstance(values, dict):
        return {name: _map(function, value) for name, value in values.items()}
    return function(values)


def _leaves(values: Any) -> list[Any]:
    if isinstance(values, dict):
        values = tuple(values.values())
    if isinstance(values, (tuple, list)):
        return [leaf for value in values for leaf in _leaves(value)]
    return [values]


def _is_host(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, LazyTensor)


def _blocks(args: Any, kwargs: Any) -> bool:
    """Returns whether a copy between host and device blocks the host (not ``non_blocking``)."""
    return not any(value is True for value in (kwargs.get("non_blocking"), *args[2:3]))


def _real(values: Any) -> Any:
    def convert(value: Any) -> Any:
        # What lies on the host now is what travels.
        return value.clone() if _is_host(value) else value

    return _map(
        lambda value: value.host if isinstance(value, LazyTensor) else convert(value), values
    )


def _on_meta(values: Any) -> Any:
    def convert(value: Any) -> Any:
        if not isinstance(value, Tensor) or (_is_host(value) and not value.dim()):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    return _map(convert, values)


class _Queueing(TorchDispatchMode):
    def __init__(self, machine: LazyDevice) -> None:
        super().__init__()
        self._machine = machine

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._machine.dispatch(func, args, kwargs or {})


@contextmanager
def lazy_device(order: Order) -> Iterator[LazyDevice]:
    """Within it, "meta" is a device with streams.

    Args:
        order: "at once" runs every operation where it is called, as if there were one stream.
    """
    machine = LazyDevice(order)
    future = type("Future", (LazyFuture,), {"machine": machine})
    call = Op.__call__

    def run(op: Op, *args: Any) -> None:
        if any(isinstance(arg, LazyTensor) for arg in args):
            reals = _real(args)
            machine.current.enqueue(lambda: call(op, *reals))
        else:
            call(op, *args)

    module_of = torch.get_device_module

    def stream_of(device: torch.device) -> Stream | None:
        return machine.current if device.type == "meta" else None

    with ExitStack() as stack:
        for target, name, value in (
            (torch.futures, "Future", future),
            (Op, "__call__", run),
            (torch, "tensor", partial(tensor_by_copy, torch.tensor)),
            (torch, "get_device_module", lambda d=None: machine if d == "meta" else module_of(d)),
            (clocks, "_clocks", {}),  # each is of one machine
            (slot, "stream_of", stream_of),
            (devices, "stream_of", stream_of),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        stack.enter_context(_Queueing(machine))
        _forget_tables()
        stack.callback(_forget_tables)
        yield machine


def _forget_tables() -> None:
    """Empties caches: some hold tensors by device, and every lazy device has the same name."""
    for name, module in list(sys.modules.copy().items()):
        if name.startswith("commhooks.") and "runtime" not in name:
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
