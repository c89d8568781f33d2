"""Drivers of buckets by device; with pretended devices, as there is none here."""

from types import SimpleNamespace

import pytest
import torch

from ddp_core import Drivers, Streams, Task
from ddp_core.exchange._streams import stream_module


class _Stream:
    """Notes what is asked of it."""

    def __init__(self, device=None, priority=0):
        self.device, self.priority, self.waited = device, priority, []

    def wait_stream(self, other):
        self.waited.append(other)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


def _task(*, joins=False):
    def nothing():
        return torch.zeros(1)
        yield

    return Task(nothing(), 0, 0, 4, 1, 1, joins=joins)


@pytest.mark.parametrize("name", ["mps", "meta", "hpu", "privateuseone"])
def test_a_device_without_streams_is_refused(name, monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    drivers = Drivers(2)
    drivers.check({"cpu"})
    with pytest.raises(RuntimeError, match=f"has no Stream.*on {name!r}"):
        drivers.check({"cpu", name})
    with pytest.raises(RuntimeError, match="before it is computed"):
        drivers.run(_task(), torch.device(name), None)
    assert drivers._lanes is None


def test_a_device_that_torch_does_not_know_is_refused():
    with pytest.raises(RuntimeError, match="no Stream"):
        stream_module("meta")


@pytest.mark.parametrize("name", ["cuda", "xpu", "privateuseone"])
def test_buckets_take_turns_on_side_streams_that_wait_for_the_callers(name, monkeypatch):
    current = _Stream()
    module = SimpleNamespace(
        Stream=_Stream, current_stream=lambda device: current, stream=lambda stream: stream
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    streams, device = Streams(None), torch.device(name, 0)
    with (
        streams._side_stream(device, _task()) as first,
        streams._side_stream(device, _task()) as other,
        streams._side_stream(device, _task()) as third,
    ):
        assert (first.device, first.priority) == (device, -1)
        # A bucket is encoded while one is on the line, and one before it has paused.
        assert len({id(first), id(other), id(third)}) == 3
        assert first.waited == other.waited == [current]
    with streams._side_stream(device, _task(joins=True)) as last:
        assert last is first
        assert last.waited == [current, current, other, third]
    streams.join()
    assert current.waited == [first, other, third]


def test_only_the_cpu_goes_to_lanes(monkeypatch):
    went = []
    drivers = Drivers(1)
    monkeypatch.setattr(
        drivers, "open_lanes", lambda group: SimpleNamespace(run=lambda task: went.append("lanes"))
    )
    monkeypatch.setattr(Streams, "run", lambda self, task, device, **_: went.append(device.type))
    for name in ("cpu", "cuda", "xpu", "mtia"):
        drivers.run(_task(), torch.device(name), None)
    assert went == ["lanes", "cuda", "xpu", "mtia"]
