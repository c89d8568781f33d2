"""Hooks on pretended CUDA devices: streams, events, CUDA graphs, agreement of ranks."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import commhooks
from commhooks.core import Layout, Memory
from commhooks.errors import RegistrationError
from commhooks.hook import _running as meeting
from commhooks.hook._capture import check_cuda_graph
from commhooks.hook._engine import _verdicts
from commhooks.hook._ledger import Ledger
from commhooks.hook._target import HookTarget
from ddp_core import AllReduce, Drivers, GradBucket, Streams, Task
from ddp_core.exchange import _clocks as clocks
from ddp_core.exchange._streams import stream_module
from ddp_core.reducer import _unused as unused
from ddp_core.reducer._buckets import LARGE, FlatBucket
from ddp_core.reducer._launch import Outcome
from ddp_core.reducer._parameters import Trained
from ddp_core.reducer._unused import UsedMap
from tests.shelf import BUILT_IN
from tests.tools.fake_torch import pretend

GPU = torch.device("cuda", 1)


def on_gpu(*shape):
    """A tensor without memory."""
    with FakeTensorMode():
        return torch.empty(shape, device=GPU)


def two_ranks(monkeypatch):
    """Hooks take this process for the first of two ranks."""
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    monkeypatch.setattr(HookTarget, "group", lambda self: group)


# ---- whose device collectives of objects use


def test_ranks_meet_on_the_device_of_the_parameters(monkeypatch):
    device, met = pretend(monkeypatch), []
    model = nn.ParameterList([nn.Parameter(on_gpu(3))])
    hook = commhooks.HookState("fp16", model)
    two_ranks(monkeypatch)
    monkeypatch.setattr(
        meeting, "handshake", lambda *args, **_: met.append(device.devices[-1]) or ["run"]
    )
    hook.agree("a test")
    assert met == [GPU]
    assert device.devices == [GPU, None]


# ---- gradients into buckets, and which parameters are used


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_large_gradients_are_copied_one_by_one_on_the_cpu_only(place):
    bucket = FlatBucket([0], [Trained("weight", nn.Parameter(torch.empty(LARGE)), sparse=False)])
    bucket.buffer = bucket.buffer if place == "cpu" else on_gpu(LARGE)
    assert bucket.is_large(0) == (place == "cpu")


def test_used_parameters_go_to_a_gpu_through_pinned_memory(monkeypatch):
    calls = []

    def to(tensor, device, **options):
        calls.append((device, options, tensor.tolist()))
        return tensor

    monkeypatch.setattr(
        torch.Tensor,
        "pin_memory",
        lambda tensor: SimpleNamespace(to=lambda device, **options: to(tensor, device, **options)),
    )
    monkeypatch.setattr(unused.dist, "all_reduce", lambda *args, **options: None)
    used = UsedMap(3, None, GPU)
    used.mark(1)
    used.all_reduce(in_views=[0])
    assert calls == [(GPU, {"non_blocking": True}, [1 << 16, 1, 0])]
    # All used here: the sums are not read, for which the host would wait.
    assert used.globally_unused([1]) is None


# ---- steps that are captured in a CUDA graph


def test_a_captured_step_is_refused_where_replays_would_repeat_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    bucket = GradBucket(0, on_gpu(3), [on_gpu(3)])
    with pytest.raises(RegistrationError, match="replays would repeat what powersgd"):
        commhooks.HookState("powersgd").start(bucket)
    with pytest.raises(RegistrationError, match="replays would repeat what"):
        commhooks.HookState("bf16", start_step=3).start(bucket)
    with pytest.raises(RegistrationError, match="before the capture"):
        commhooks.HookState("bf16").start(bucket)


@pytest.mark.parametrize("name", BUILT_IN)
def test_only_what_is_the_same_in_every_step_is_captured(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    scheme = commhooks.make(name)
    if name in {"none", "allreduce", "fp16", "bf16", "noop"}:
        check_cuda_graph(GPU, scheme, agreed=True)
    else:
        with pytest.raises(RegistrationError):
            check_cuda_graph(GPU, scheme, agreed=True)
    check_cuda_graph(torch.device("cpu"), scheme, agreed=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    check_cuda_graph(GPU, scheme, agreed=False)


def test_a_call_is_not_captured_either(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    two_ranks(monkeypatch)
    with pytest.raises(RegistrationError, match="replays would repeat what int8"):
        commhooks.Collectives("int8").all_reduce(on_gpu(2048))


def test_calls_meet_on_the_device_of_their_tensors(monkeypatch):
    device, met = pretend(monkeypatch), []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    run = commhooks.Collectives("fp16")
    two_ranks(monkeypatch)

    def meet(*args, **_):
        met.append(device.devices[-1])
        raise InterruptedError

    monkeypatch.setattr(meeting, "handshake", meet)
    with pytest.raises(InterruptedError):
        run.all_reduce(on_gpu(2048))
    assert met == [GPU]


# ---- modules on several devices


def test_the_verdict_is_brought_together_on_every_device(monkeypatch):
    copies = []
    to = torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor, "to", lambda t, d, **k: copies.append(k.get("non_blocking")) or to(t, d, **k)
    )
    with FakeTensorMode():
        flags = [torch.ones((), dtype=torch.bool, device=f"cuda:{i}") for i in (1, 0, 1)]
        assert [good.device.index for good in _verdicts(flags)] == [0, 1]
        assert copies.count(True) == 4
        copies.clear()
        assert len(_verdicts(flags[:1])) == 1
        assert [good.device.index for good in _verdicts([flags[0], flags[2]])] == [1]
        assert True not in copies
    assert [good.item() for good in _verdicts([torch.tensor(True), torch.tensor(False)])] == [False]


def test_each_device_commits_its_own_writes():
    memory, a, b = Memory(), Layout(["a"], [(2,)]), Layout(["b"], [(2,)])
    step = memory.for_step()
    step.write("residual", a, torch.ones(2))
    step.write("residual", b, torch.ones(2, device="meta"))
    step.writes_on(torch.device("cpu")).commit(torch.tensor(True))
    assert memory.get("residual", "a").tolist() == [1, 1]
    assert memory.get("residual", "b") is None


# ---- times


def test_a_devices_times_are_of_its_work_and_known_when_it_has_done_it(monkeypatch):
    device = pretend(monkeypatch)
    clock = clocks._DeviceClock(GPU)
    first = clock.now()
    device.work(20)
    moments = [clock.now()]
    device.work(30)
    moments.append(clock.now())
    assert all(math.isnan(moment.seconds()) for moment in moments)
    device.done = 20
    begin = first.seconds()
    assert moments[0].seconds() - begin == pytest.approx(0.020)
    assert math.isnan(moments[1].seconds())
    device.synchronize()
    assert moments[1].seconds() - begin == pytest.approx(0.050)


def test_moments_far_apart_are_as_exact(monkeypatch):
    """Elapsed times are float32, so that long ones are added up."""
    device = pretend(monkeypatch)
    device.done = math.inf
    host = iter(range(1000))
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: 10.0 * next(host))
    clock = clocks._DeviceClock(GPU)
    begin = clock.now()
    for _ in range(100):
        device.work(10_000)
        last = clock.now()
    assert last._origin is not begin
    assert last.seconds() - begin.seconds() == pytest.approx(1000.0)
    assert clock._origin._origin is None  # the chain of origins does not grow


def rounds_on_gpu(device, ledger, timed):
    """Runs two rounds of 3 and 5 ms, with encoding of 1 ms and decoding of 2 ms."""

    class Takes(AllReduce):
        def issue(self, group):
            return SimpleNamespace(wait=lambda: device.work(self.milliseconds))

    def exchange():
        for milliseconds in (3, 5):
            device.work(1)
            request = Takes(torch.zeros(4), "sum")
            request.milliseconds = milliseconds
            yield request
        device.work(2)
        return torch.zeros(4)

    clock = clocks.clock_of(GPU, timed=timed)
    task = Task(exchange(), 0, 0, 16, 2, 2, record=ledger.add, clock=clock)
    Streams(None).run(task, torch.device("cpu")).wait()  # its future is none of a GPU
    ledger.record_last_launch(0, clock.now())


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(clocks, "_clocks", {})
    return pretend(monkeypatch)


def test_the_ledger_has_the_times_of_the_device(gpu):
    ledger = Ledger()
    rounds_on_gpu(gpu, ledger, True)
    columns = ["encode_s", "wire_s", "decode_s"]
    assert ledger.report()[[*columns, "exposed_s"]].isna().all(axis=None)
    assert "backward" not in ledger.summary("dense", 2)
    assert not {*columns, "exposed_s"} & ledger.last_step().keys()
    assert ledger.last_step()["wire_bytes"] == 32
    gpu.synchronize()
    times = ledger.report()[columns] * 1e3
    assert times.to_numpy().round(6).tolist() == [[1, 3, 0], [1, 5, 2]]
    assert ledger.report().exposed_s.tolist() == [0, 0]  # the last bucket was launched after it
    assert "Of 12 ms of communication per step, 0 ms are exposed" in ledger.summary("dense", 2)


def test_what_is_exposed_is_time_of_the_device(gpu):
    ledger = Ledger()
    clock = clocks.clock_of(GPU)
    before = clock.now()
    gpu.work(7)
    rounds_on_gpu(gpu, ledger, True)
    ledger._backward_end[0] = before
    gpu.synchronize()
    assert sum(ledger.report().exposed_s) == pytest.approx(0.012)


def test_steps_that_are_not_timed_record_no_events_and_have_no_times(gpu):
    ledger = Ledger()
    rounds_on_gpu(gpu, ledger, False)
    gpu.synchronize()
    assert gpu.events == 0
    assert ledger.report()[["encode_s", "wire_s", "exposed_s"]].isna().all(axis=None)
    assert [step for step in range(250) if ledger.times(step)] == [*range(10), 100, 200]


def test_a_step_that_is_captured_records_and_queries_no_events(gpu, monkeypatch):
    ledger = Ledger()
    rounds_on_gpu(gpu, ledger, True)
    recorded, gpu.capturing = gpu.events, True
    with monkeypatch.context() as patches:
        patches.setattr("tests.tools.fake_torch.Event.query", None)  # it would end the capture
        rounds_on_gpu(gpu, ledger, True)
    gpu.capturing = False
    gpu.synchronize()
    assert gpu.events == recorded
    assert ledger.report().wire_s.isna().tolist() == [False, True] * 2


def test_events_are_let_go_when_they_have_happened(gpu):
    ledger = Ledger()
    rounds_on_gpu(gpu, ledger, True)
    assert len(ledger._unsettled) == 2
    gpu.synchronize()
    ledger.record_last_launch(1, 0.0)
    assert not ledger._unsettled
    assert not any(row.moments for row in ledger._rows)


# ---- optimizers that step in backward


def test_a_bucket_is_done_when_the_device_has_exchanged_it(monkeypatch):
    device = pretend(monkeypatch)
    future = torch.futures.Future()
    outcome = Outcome(GPU, future=future)
    assert not outcome.is_done()
    device.work(5)
    future.set_result(torch.zeros(3))
    assert not outcome.is_done()
    device.synchronize()
    device.capturing = True
    assert not outcome.is_done()  # a query would end the capture
    device.capturing = False
    assert outcome.is_done()
    assert device.events == 1  # asked for once
    on_host = Outcome(torch.device("cpu"), future=future)
    assert on_host.is_done()


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
