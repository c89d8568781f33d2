"""What hosts do for a GPU: pretended devices and tensors, as there is none here."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import commhooks
from commhooks.hook import running
from commhooks.hook.binding import Binding
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
