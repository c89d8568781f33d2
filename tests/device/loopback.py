"""Collectives answered in one process, late, on a stream of their own.

A real back end makes a stream wait for the network. Here the link is a stream that waits, writes
garbage over the result, sleeps, and then writes the result: whoever reads without waiting for the
link, or for a stream that has waited, reads garbage. Every rank sends what this one sends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ddp_core import AllGather, AllReduce, AllToAll, Broadcast, Collective, ReduceScatter

__all__ = ["Loopback", "loopback"]

KINDS = (AllReduce, AllGather, AllToAll, Broadcast, ReduceScatter)


class _Work:
    """Orders the stream that waits behind the link, as NCCL's work does; the host goes on."""

    def __init__(self, link: Loopback, device: torch.device, event: Any) -> None:
        self._link, self._device, self._event = link, device, event

    def wait(self) -> bool:
        if self._event is not None:
            self._link.module.current_stream(self._device).wait_event(self._event)
        return True


class Loopback:
    """Answers collectives as if ``world_size`` ranks had sent the same.

    Args:
        module: torch's module of the device, such as ``torch.cuda``; None: answers at once.
        sleep: clock cycles of the device before a result is there.
    """

    def __init__(self, module: Any, world_size: int = 1, sleep: int = 0) -> None:
        self.module, self.world_size, self.sleep = module, world_size, sleep
        self.issued = 0
        self._stream: Any = None

    def issue(self, request: Collective) -> _Work:
        """Takes the place of ``Collective.issue``."""
        self.issued += 1
        tensor, size = request.tensor, self._size(request)
        if isinstance(request, AllReduce) and request.op == "mean":
            tensor.mul_(1.0 / size)
        # By the caller's stream, as the real collectives do: the allocator reuses memory in the
        # order of the stream that asked for it.
        result = self._room(request)
        if self.module is None:
            result.copy_(self._answer(request))
            return _Work(self, tensor.device, None)
        if self._stream is None:
            self._stream = self.module.Stream(device=tensor.device)
        self._stream.wait_stream(self.module.current_stream(tensor.device))
        with self.module.stream(self._stream):
            answer = self._answer(request)
            result.fill_(torch.nan if result.is_floating_point() else 77)
            if self.sleep:
                self.module._sleep(self.sleep)
            result.copy_(answer)
            event = self.module.Event()
            event.record(self._stream)
        return _Work(self, tensor.device, event)

    def _size(self, request: Collective) -> int:
        ranks = getattr(request, "ranks", None)
        return self.world_size if ranks is None else len(ranks)

    def _room(self, request: Collective) -> Tensor:
        tensor, size = request.tensor, self._size(request)
        if isinstance(request, AllReduce | Broadcast):
            return tensor
        shape = {
            AllGather: (size, *tensor.shape),
            AllToAll: tuple(tensor.shape),
            ReduceScatter: tuple(tensor.shape[1:]),
        }[type(request)]
        request._result = tensor.new_empty(shape)  # type: ignore[attr-defined]
        return request.result()

    def _answer(self, request: Collective) -> Tensor:
        """Returns what ranks would get that send the same as this one, the first."""
        tensor, size = request.tensor, self._size(request)
        if isinstance(request, AllReduce):
            return tensor.clone() if request.op == "max" else tensor * size
        if isinstance(request, AllGather):
            return tensor.expand(size, *tensor.shape).contiguous()
        if isinstance(request, AllToAll):
            return tensor[:1].expand(tensor.shape).contiguous()
        if isinstance(request, ReduceScatter):
            return tensor[0] * size
        return tensor.clone()


@contextmanager
def loopback(module: Any, world_size: int = 1, sleep: int = 0) -> Iterator[Loopback]:
    """Within it, collectives are answered by a ``Loopback``."""
    link = Loopback(module, world_size, sleep)
    with ExitStack() as stack:
        for kind in KINDS:
            stack.enter_context(
                mock.patch.object(kind, "issue", lambda request, group: link.issue(request))
            )
        yield link
