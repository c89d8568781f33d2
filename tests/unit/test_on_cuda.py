"""What hosts do for a GPU: pretended devices and tensors, as there is none here."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import commhooks
from commhooks.core import Layout, Memory
from commhooks.errors import RegistrationError
from commhooks.hook import running
from commhooks.hook.binding import Binding
from commhooks.hook.capture import need_no_capture
from commhooks.hook.engine import _verdicts
from ddp_core import GradBucket
from ddp_core.reducer import unused
from ddp_core.reducer.flat import LARGE, FlatBucket
from ddp_core.reducer.parameters import Trained
from ddp_core.reducer.unused import UsedMap
from tests.unit.pretended import pretend

GPU = torch.device("cuda", 1)


def on_gpu(*shape):
    """A tensor without memory."""
    with FakeTensorMode():
        return torch.empty(shape, device=GPU)


# ---- whose device collectives of objects use


def test_ranks_meet_on_the_device_of_the_parameters(monkeypatch):
    device, met = pretend(monkeypatch), []
    model = nn.ParameterList([nn.Parameter(on_gpu(3))])
    hook = commhooks.HookState("fp16", model)
    monkeypatch.setattr(
        Binding, "group", lambda self: SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    )
    monkeypatch.setattr(running, "handshake", lambda *args: met.append(device.devices[-1]))
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


@pytest.mark.parametrize("name", commhooks.scheme_names())
def test_only_what_is_the_same_in_every_step_is_captured(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    scheme = commhooks.make(name)
    if name in {"none", "allreduce", "fp16", "bf16", "noop"}:
        need_no_capture(GPU, scheme, agreed=True)
    else:
        with pytest.raises(RegistrationError):
            need_no_capture(GPU, scheme, agreed=True)
    need_no_capture(torch.device("cpu"), scheme, agreed=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    need_no_capture(GPU, scheme, agreed=False)


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
