"""Hooks and the reducer on a pretended GPU, in every mode that it meets."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.optim import _apply_optimizer_in_backward

import commhooks
import ddp_core
from ddp_core import PeerError
from ddp_core.reducer import _failures as watch
from ddp_core.reducer._failures import DeviceWatchdog, WaitPoint
from tests.tools.cuda_emulation import GPU, as_gpu
from tests.tools.fake_torch import Device, Marks
from tests.tools.harness import on_ranks, run_ranks
from tests.tools.training import batch, equal_bits, gradients, mlp, parameters

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "view": {"gradient_as_bucket_view": True},
    "mixed": {"mixed_precision": ddp_core.MixedPrecision(param_dtype=torch.bfloat16)},
}
SCHEMES: dict[str | None, dict[str, Any]] = {
    None: {},
    "none": {},
    "topk": {"ratio": 0.1},
    "powersgd": {"rank": 2, "coalesce": True},
}


def _trained_model(scheme: str | None, options: Any, in_backward: bool, rank: int) -> Any:
    module = mlp(depth=6)
    if in_backward:
        _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    model = ddp_core.DistributedDataParallel(module, bucket_cap_mb=2e-3, **options)
    if scheme is not None:
        commhooks.register(model, scheme, **SCHEMES[scheme])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        model(batch(step, rank, 4, 16)).float().square().mean().backward()
        if not in_backward:
            optimizer.step()
    return model


def _as_on_the_cpu(
    rank: int, scheme: str | None, mode: str, in_backward: bool, behind: float
) -> list[bool]:
    expected = parameters(_trained_model(scheme, MODES[mode], in_backward, rank))
    with as_gpu(behind) as gpu:
        model = _trained_model(scheme, MODES[mode], in_backward, rank)
        assert equal_bits([expected, parameters(model)])
        frame = model.timeline.frame()
        assert frame.round_ended.isna().any() == (behind > 0)
        gpu.behind = 0
        gpu.synchronize()
        frame = model.timeline.frame()
        if mode == "static":  # its first step learns in which order gradients come
            frame = frame[frame.step > 0]
        assert not frame.drop(columns=["collective"]).isna().any(axis=None)
        assert (frame.first_ready <= frame.last_ready).all()
        assert (frame.launched <= frame.round_began).all()
        assert (frame.round_began < frame.round_ended).all()
        assert (frame.round_ended <= frame.decoded).all()
        return gpu.answers


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_training_gives_what_it_gives_on_the_cpu(rank: int, scheme: str | None, mode: str) -> None:
    _as_on_the_cpu(rank, scheme, mode, False, 1e6)


@pytest.mark.parametrize("scheme", ["none", "topk", "powersgd"])
@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_an_optimizer_in_backward_steps_what_the_gpu_has_averaged(
    rank: int, scheme: str, mode: str
) -> None:
    late = _as_on_the_cpu(rank, scheme, mode, True, 1e6)
    early = _as_on_the_cpu(rank, scheme, mode, True, 0.0)
    assert not any(late)
    # In mixed precision, coalesced, and where the map of used parameters is needed it never asks.
    if scheme != "powersgd" and mode == "plain":
        assert early
        assert all(early)


@on_ranks(2)
def test_a_second_collective_comes_after_the_first_of_the_next_bucket(rank: int) -> None:
    with as_gpu() as gpu:
        module = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(5)))
        model = ddp_core.DistributedDataParallel(module, bucket_cap_mb=1e-3)
        hook = commhooks.register(model, "int8", error_feedback=True)
        for step in range(3):
            model(batch(step, rank, 4, 16)).square().mean().backward()
        gpu.synchronize()
        frame = model.timeline.frame()
        frame = frame[frame.step == 2].sort_values("round_began")
        pairs = zip(frame.bucket, frame["round"], strict=True)
        order = [f"{bucket}{'ab'[round]}" for bucket, round in pairs]
        assert order == ["0a", "1a", "0b", "2a", "1b", "3a", "2b", "3b", "4a", "4b"]
        hook.close()


def _order_in_join(rank: int, world_size: int) -> list[str]:
    order: list[str] = []
    issue = ddp_core.Streams._issue

    def noted(streams: Any, task: Any, request: Any) -> Any:
        order.extend([f"{task.bucket}{'ab'[task.round]}"] if request is not None else [])
        return issue(streams, task, request)

    with as_gpu(), mock.patch.object(ddp_core.Streams, "_issue", noted):
        layers = ((16, 64), (64, 4), (4, 64))  # the last bucket is larger than the one before
        module = torch.nn.Sequential(*(torch.nn.Linear(*size, bias=False) for size in layers))
        model = torch.nn.parallel.DistributedDataParallel(module, bucket_cap_mb=1e-4)
        hook = commhooks.register(model, "int8", error_feedback=True)
        with model.join():
            for step in range(3 + rank):
                order.clear()
                model(batch(step, rank, 4, 16)).square().mean().backward()
            if rank == 0:
                order.clear()
        hook.close()
    return order


def test_a_rank_without_input_has_the_order_of_those_that_train() -> None:
    assert run_ranks(_order_in_join, 2) == [["0a", "1a", "0b", "1b", "2a", "2b"]] * 2


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError


@pytest.mark.parametrize(
    "kind", [ddp_core.DistributedDataParallel, torch.nn.parallel.DistributedDataParallel]
)
@on_ranks(2)
def test_a_paused_exchange_of_a_step_that_raised_goes_on_on_no_rank_alone(
    rank: int, kind: Any
) -> None:
    with as_gpu():
        module = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(8)))
        model = kind(module, bucket_cap_mb=1e-3)
        hook = commhooks.register(model, "int8", error_feedback=True)
        for step in range(3):
            model(batch(step, rank, 4, 16)).square().mean().backward()
        handle = module[3].register_forward_hook(lambda layer, x, y: _Fails.apply(y))
        with pytest.raises(ArithmeticError):
            model(batch(3, rank, 4, 16)).square().mean().backward()
        handle.remove()
        streams = hook.drivers._streams
        assert streams is not None
        assert streams._paused is not None
        with mock.patch.object(streams, "_issue", side_effect=AssertionError):
            if rank == 0:
                hook.state_dict()
            hook.change_group(torch.distributed.group.WORLD)
        hook.close()


def _held(rank: int) -> torch.Tensor:
    model = ddp_core.DistributedDataParallel(mlp(depth=6), bucket_cap_mb=2e-3)
    for step in range(3):
        model.zero_grad(set_to_none=step != 1)
        with model.hold():
            model(batch(step, rank, 4, 16)).square().sum().backward()
        model.reduce()
    return gradients(model)


@on_ranks(2)
def test_messages_at_a_named_point_wait_for_nothing_else(rank: int) -> None:
    expected = _held(rank)
    with as_gpu(1e6) as gpu:
        streams = mock.Mock(wraps=gpu.stream)
        with mock.patch.object(gpu, "stream", streams):
            assert equal_bits([expected, _held(rank)])
        # Messages that the host reads are on a stream that waits for nothing else.
        assert streams.call_count >= 3


# ---- a rank that fails


class Board:
    """Has a report of the fourth step."""

    def poll(self, place: WaitPoint) -> str | None:
        return "rank 1: step 3, bucket 0: ValueError: no" if place.backward_count == 4 else None


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A watch on a pretended GPU, which the abort of the group lets go on."""
    monkeypatch.setattr(watch, "POLL_INTERVAL", timedelta(seconds=0.02))
    device = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda name: device)
    monkeypatch.setattr(watch, "Marks", Marks)
    monkeypatch.setattr(
        watch, "backend_for", lambda group, of: SimpleNamespace(abort=device.synchronize)
    )
    return SimpleNamespace(watch=DeviceWatchdog(None, GPU, Board()), device=device)  # type: ignore[arg-type]


def _enqueue(watched: Any, backward_count: int) -> None:
    watched.watch.record_launch(
        WaitPoint(backward_count, backward_count - 1, 0), threading.get_ident()
    )
    watched.device.work(5)
    watched.watch.record_enqueued()


def _synchronise(device: Device) -> None:
    """Waits for the device without a line of Python in between, as torch does."""
    end = time.monotonic() + 10
    while device.done < device.enqueued and time.monotonic() < end:
        time.sleep(0.01)


def _use_gradients(device: Device) -> None:
    _synchronise(device)
    time.sleep(1)


def test_whoever_waits_for_the_gpu_is_notified_of_a_rank_that_has_failed(watched: Any) -> None:
    _enqueue(watched, 4)
    with pytest.raises(PeerError, match=r"rank 1: step 3, bucket 0.*resume from the last"):
        _use_gradients(watched.device)
    with pytest.raises(PeerError, match="rank 1"):
        watched.watch.record_launch(WaitPoint(5, 4, 0), 0)


def test_the_error_comes_once_where_the_reducer_raises_it(watched: Any) -> None:
    with mock.patch.object(watch, "_raise_in") as raise_in:
        _enqueue(watched, 4)
        end = time.monotonic() + 10
        while watched.device.done == 0 and time.monotonic() < end:
            time.sleep(0.01)
        with pytest.raises(PeerError):
            watched.watch.record_enqueued()
        assert [call.args[1] is None for call in raise_in.call_args_list] == [False, True]


@pytest.mark.parametrize("how", ["done", "other step", "raised here"])
def test_a_step_that_nobody_waits_for_is_left_alone(
    watched: Any, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "POLL_INTERVAL", timedelta(minutes=1))  # the thread does not look
    _enqueue(watched, 3 if how == "other step" else 4)
    if how == "done":
        watched.device.synchronize()
    if how == "raised here":
        watched.watch.forget()
    for _ in range(3):
        watched.watch.poll()
    watched.watch.check()


def test_the_thread_ends_with_the_watch(watched: Any) -> None:
    _enqueue(watched, 3)
    thread = watched.watch._thread
    watched.watch = None
    thread.join(5)
    assert not thread.is_alive()


def run_steps(model: Any, gpu: Any, rank: int) -> None:
    for step in range(3):
        model(batch(step, rank, 4, 16)).float().square().mean().backward()
        if rank == 1 or step == 0:
            gpu.synchronize()
        else:
            _use_gradients(gpu)


def _peer_fails(rank: int, world_size: int, mode: str) -> str:
    aborted = mock.MagicMock()
    with as_gpu(1e6) as gpu:
        backend = SimpleNamespace(abort=lambda: (aborted(), gpu.synchronize()))
        model = ddp_core.DistributedDataParallel(mlp(), bucket_cap_mb=2e-3, **MODES[mode])

        def hook(state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            if model.reducer.launcher.step == 1 and rank == 1:
                raise ValueError("this hook cannot go on")
            future.set_result(bucket.buffer())  # it is enqueued
            return future

        model.register_comm_hook(None, hook)
        with mock.patch.object(watch, "backend_for", return_value=backend):
            with pytest.raises((RuntimeError, ValueError)) as caught:
                run_steps(model, gpu, rank)
            assert aborted.called == (rank == 0), str(caught.value)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("mode", ["plain", "static", "view"])
def test_a_hook_that_raises_ends_the_step_on_all_ranks(mode: str) -> None:
    waits, fails = run_ranks(_peer_fails, 2, mode)
    assert waits.startswith("PeerError: another rank failed in this step")
    assert "ValueError: this hook cannot go on" in waits
    assert "this hook cannot go on" in fails


def _enqueued(state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _raise(grad: torch.Tensor) -> None:
    raise ArithmeticError("on purpose")


def _peer_goes_on(rank: int, world_size: int) -> str:
    with as_gpu(1e6) as gpu:
        backend = SimpleNamespace(abort=gpu.synchronize)
        model = ddp_core.DistributedDataParallel(mlp(), bucket_cap_mb=2e-3)
        model.register_comm_hook(None, _enqueued)
        with mock.patch.object(watch, "backend_for", return_value=backend):
            model(batch(0, rank, 4, 16)).float().square().mean().backward()
            gpu.synchronize()
            if rank == 1:
                loss = model(batch(1, rank, 4, 16)).float().square().mean()
                next(model.parameters()).register_hook(_raise)
                with pytest.raises(ArithmeticError):
                    loss.backward()
            with pytest.raises(RuntimeError) as caught:
                run_steps(model, gpu, rank)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_rank_that_goes_on_after_a_raise_ends_the_step_on_all_ranks() -> None:
    waits, goes_on = run_ranks(_peer_goes_on, 2)
    assert waits.startswith("PeerError: another rank failed in this step")
    assert goes_on.startswith("MismatchError: ")
    for text in (waits, goes_on):
        assert "rank 1 aborted step 1 after" in text
