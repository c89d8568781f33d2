"""Collectives with a scheme between real processes: as functions, and with memory by name."""

from __future__ import annotations

import copy
import pickle
import re
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.collectives import _functions as functions
from commhooks.collectives._calls import CollectiveCall
from commhooks.core import Bucket, SchemeExchange
from commhooks.errors import MismatchError, RegistrationError
from commhooks.schemes.sparse import TopK
from commhooks.wrappers import ErrorFeedback
from tests.hosts import every_host
from tests.hosts.test_every_host import SHAPE as GIVEN
from tests.hosts.test_every_host import called, reduced
from tests.shelf import BUILT_IN
from tests.tools.harness import on_ranks
from tests.tools.training import equal_on_all_ranks, outcome

AVG, SUM = dist.ReduceOp.AVG, dist.ReduceOp.SUM
SHAPE = (24, 40)


def numbers(step: int, rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(*shape, generator=generator).to(dtype)


# ---- in compiled functions


def _by_functions(inputs: Tensor) -> Tensor:
    y, part, whole = 2 * inputs, torch.empty(4), torch.empty(8)
    commhooks.all_reduce(y, "bf16")
    commhooks.reduce_scatter(part, y, "bf16")
    commhooks.all_gather(whole, part, "bf16")
    return whole + 1


def _later(inputs: Tensor) -> Tensor:
    y = 2 * inputs
    handle = commhooks.all_reduce(y, "bf16", async_op=True)
    assert handle is not None
    handle.wait()
    return y + 1


@on_ranks(2)
def test_graphs_of_compiled_functions_break_at_calls(rank: int) -> None:
    def by_name() -> Any:
        collectives = commhooks.Collectives("topk", ratio=0.4)

        def function(inputs: Tensor) -> Tensor:
            y = 2 * inputs
            collectives.all_reduce(y, "weight")
            return y + 1

        return function

    for plain, compiled in ((_by_functions,) * 2, (_later,) * 2, (by_name(), by_name())):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="all_reduce"):
            torch.compile(compiled, backend="eager", fullgraph=True)(torch.ones(8))
        split = torch.compile(compiled, backend="eager")
        for step in range(2):  # also by what was compiled
            tensor = numbers(step, rank, 8)
            assert torch.equal(split(tensor), plain(tensor))


# ---- every scheme against a hook


@on_ranks(2, 3, timeout=110)
def test_an_all_reduce_of_every_scheme_is_what_its_hook_gives(rank: int, world_size: int) -> None:
    def by_call(name: str, op: Any) -> list[Tensor]:
        return called(every_host.collectives(commhooks.make(name), op), rank, shards=1)

    for name in BUILT_IN:
        layer = nn.Linear(*GIVEN[::-1], bias=False)
        hook = reduced(every_host.registered("torch's DDP")(commhooks.make(name), layer), rank)
        means = by_call(name, AVG)
        assert all(map(torch.equal, hook, means)), name
        traits = commhooks.make(name).traits
        if traits.returns != "mean":
            with pytest.raises(RegistrationError, match="returns no mean"):
                by_call(name, SUM)
        elif name not in ("none", "allreduce"):  # their sum is torch's own
            sums = by_call(name, SUM)
            assert all(map(torch.equal, sums, [mean * world_size for mean in means])), name
        if traits.agrees and traits.averages:
            assert equal_on_all_ranks(*means), name


# ---- tensors of all kinds


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.requires_grad_()


KINDS: dict[str, Any] = {
    **{
        str(dtype).split(".")[1]: lambda rank, dtype=dtype: numbers(0, rank, 50, 30, dtype=dtype)
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    },
    "transposed": lambda rank: numbers(0, rank, 50, 30).t(),
    "strided": lambda rank: numbers(0, rank, 50, 30)[::2, 1::3],
    "a row with gaps": lambda rank: numbers(0, rank, 3000)[::2],
    "a column": lambda rank: numbers(0, rank, 1500, 2)[:, :1],
    "a number": lambda rank: numbers(0, rank, 1)[0],
    "empty": lambda rank: numbers(0, rank, 0, 3),
    "a leaf": lambda rank: _leaf(numbers(0, rank, 50, 30)),
    "complex": lambda rank: torch.complex(numbers(0, rank, 700), numbers(1, rank, 700)),
    "whole numbers": lambda rank: torch.arange(3000).view(30, 100) * (rank + 1),
    "bytes": lambda rank: torch.full((2000,), rank + 1, dtype=torch.uint8),
}


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2, 3)
def test_tensors_of_any_kind_are_reduced_in_place(rank: int, world_size: int, kind: str) -> None:
    ours, coded, mean = (KINDS[kind](rank) for _ in range(3))
    # Gloo takes the memory of a tensor with gaps for one without.
    plain = KINDS[kind](rank).detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(plain)
    commhooks.all_reduce(ours)
    assert torch.equal(ours, plain)
    commhooks.all_reduce(coded, "int8")
    assert equal_on_all_ranks(coded)
    if not plain.is_floating_point() or not plain.numel():
        assert torch.equal(coded, plain)
    else:
        assert float((coded.detach() - plain).norm() / plain.norm()) < 0.03
    if plain.is_floating_point() or plain.is_complex():
        commhooks.all_reduce(mean, op=AVG)
        torch.testing.assert_close(mean, plain / world_size, atol=0.02, rtol=0.01)


def _in_all_calls(rank: int, world_size: int, made: Any) -> list[Tensor]:
    """Returns the results of calls on tensors that ``made`` gives."""
    nearest = {"rounding": "nearest", "error_feedback": False}
    schemes: dict[str, dict[str, Any]] = {"none": {}, "int8": nearest, "topk": {}, "powersgd": {}}
    whole, row = numbers(0, rank, world_size * 30, 17), numbers(1, rank, 30, 17)
    results = []
    for name, options in schemes.items():
        calls = commhooks.Collectives(name, **options)
        reduced, part, gathered = made(whole), made(row), made(whole)
        for op in (AVG, SUM):
            calls.all_reduce(reduced, "reduced", op=op)
        if calls.scheme.traits.shards:
            calls.reduce_scatter(part, made(whole), "scattered")
            calls.all_gather(gathered, made(row), "gathered", async_op=True)
            calls.wait()
        results += [reduced, part, gathered]
    group = commhooks.process_group("int8", least=1, **nearest)
    dist.all_reduce(through := made(whole), group=group)
    commhooks.all_reduce(by_function := made(whole), "int8", **nearest)
    return [*results, through, by_function]


@on_ranks(2)
def test_tensors_of_inference_mode_are_written_in_and_outside_of_it(
    rank: int, world_size: int
) -> None:
    def inference(tensor: Tensor) -> Tensor:
        with torch.inference_mode():
            return tensor.clone()

    wanted = _in_all_calls(rank, world_size, torch.clone)
    results = [_in_all_calls(rank, world_size, inference)]
    with torch.inference_mode():
        results.append(_in_all_calls(rank, world_size, torch.clone))
        assert all(value.is_inference() for value in results[-1])
    assert all(all(map(torch.equal, value, wanted)) for value in results)


# ---- reduce-scatter and all-gather


@on_ranks(2, 3, ignore_warnings=(".*is deprecated.*",))
def test_reduce_scatter_and_all_gather_are_near_torchs_and_the_same_without_a_scheme(
    rank: int, world_size: int
) -> None:
    given = numbers(0, rank, world_size * 30, 17)
    kept, part, ours = given.clone(), torch.empty(30, 17), torch.empty(30, 17)
    dist.reduce_scatter_tensor(part, given)
    commhooks.reduce_scatter(ours, given)
    assert torch.equal(part, ours)
    for name in ("int8", "fp8", "eden", "fp16", "bf16"):
        options = {"bits": 4} if name == "eden" else {}
        commhooks.reduce_scatter(ours, given, name, **options)
        assert float((ours - part).norm() / part.norm()) < 0.25, name
    handle = commhooks.reduce_scatter(ours.t(), given, "int8", op=AVG, async_op=True)
    assert handle is not None
    handle.wait()
    assert float((ours.t().reshape(30, 17) * world_size - part).norm()) < 3  # into strides
    assert torch.equal(given, kept)

    local = numbers(1, rank, 30, 17)
    whole, of_rank = torch.empty(world_size, 30, 17), torch.empty(world_size * 30, 17)
    dist.all_gather_into_tensor(whole.view(-1, 17), local)
    commhooks.all_gather(of_rank, local)
    assert torch.equal(whole.view_as(of_rank), of_rank)
    for name in ("int8", "fp8", "bf16"):
        commhooks.all_gather(of_rank, local, name)
        assert float((of_rank - whole.view_as(of_rank)).norm()) < 0.1 * float(whole.norm()), name
        assert equal_on_all_ranks(of_rank), name
    row = local.flatten()[::2]
    for name in ("none", "int8"):
        commhooks.all_gather(gaps := torch.empty(world_size, row.numel()), row, name)
        error = gaps - whole.view(world_size, -1)[:, ::2]
        assert float(error.norm()) < 0.1 * float(whole.norm()), name
    number = torch.empty(world_size, dtype=torch.int64)
    commhooks.all_gather(number, torch.tensor([rank]), "int8")
    assert number.tolist() == list(range(world_size))
    counts = torch.empty((), dtype=torch.int64)
    commhooks.reduce_scatter(counts, torch.arange(world_size), "int8")
    assert counts.item() == rank * world_size


# ---- memory by name


def _calls(collectives: commhooks.Collectives, rank: int, steps: range) -> list[Tensor]:
    """Some rounds; the tensor "rare" takes part in every other one."""
    results = []
    for step in steps:
        for number, name in enumerate(["first", "second", "rare"]):
            if name == "rare" and step % 2:
                continue
            tensor = numbers(step, rank + 10 * number, *SHAPE)
            collectives.all_reduce(tensor, name)
            results.append(tensor)
        if collectives.scheme.traits.shards:
            part = torch.empty(SHAPE)
            given = numbers(step, rank + 50, collectives.world_size, *SHAPE)
            collectives.reduce_scatter(part, given, "scattered")
            results.append(part)
        if collectives.scheme.gathers:
            whole = torch.empty(collectives.world_size, *SHAPE)
            collectives.all_gather(whole, numbers(step, rank + 70, *SHAPE), "gathered")
            results.append(whole)
    return results


STATEFUL: dict[str, dict[str, Any]] = {
    "topk": {"ratio": 0.1},
    "powersgd": {"rank": 2, "start_step": 1},
    "int4": {},
    "onebit": {},
    "fp16": {"error_feedback": True},
    "onebit_adam": {"freeze_step": 2},
}


@pytest.mark.parametrize("gather", [False, True])
@on_ranks(2, timeout=100)
def test_saved_and_loaded_calls_go_on_bit_for_bit(rank: int, gather: bool) -> None:
    for name, options in STATEFUL.items():
        scheme = commhooks.make(name, **options)
        going, other = (commhooks.Collectives(scheme, seed=seed) for seed in (3, 4))
        if scheme.traits.returns != "mean":
            for collectives in (going, other):
                collectives.all_reduce = _averaging(collectives)  # type: ignore[method-assign]
        _calls(going, rank, range(3))
        saved = pickle.loads(pickle.dumps(going.state_dict(gather=gather)))
        expected = _calls(going, rank, range(3, 6))
        other.load_state_dict(saved)
        assert all(map(torch.equal, expected, _calls(other, rank, range(3, 6)))), name
        assert going.state_dict()["plan"] == other.state_dict()["plan"], name
        going.close()
        other.close()


def _averaging(collectives: commhooks.Collectives) -> Any:
    run = commhooks.Collectives.all_reduce
    return lambda tensor, name: run(collectives, tensor, name, op=AVG)


@on_ranks(2)
def test_a_hooks_state_goes_on_in_calls_and_back(rank: int) -> None:
    """Saves in a hook on a model, goes on in calls, and back."""
    layer = nn.Linear(SHAPE[1], SHAPE[0], bias=False)
    model = DistributedDataParallel(layer)
    hook = commhooks.register(model, "topk", ratio=0.1)

    def step(at: int) -> Tensor:
        model.zero_grad()
        (model(torch.eye(SHAPE[1])).t() * numbers(at, rank, *SHAPE)).sum().backward()
        assert layer.weight.grad is not None
        return layer.weight.grad.clone()

    for at in range(3):
        step(at)
    collectives = commhooks.Collectives("topk", ratio=0.1)
    unknown = outcome(collectives.load_state_dict, hook.state_dict())
    collectives.declare("weight", layer.weight)
    collectives.declare("wave", torch.zeros(3, dtype=torch.complex64))  # travels exactly
    collectives.load_state_dict(hook.state_dict())
    tensor = numbers(3, rank, *SHAPE)
    collectives.all_reduce(tensor, "weight", op=AVG)
    expected = step(3)
    hook.load_state_dict(collectives.state_dict())
    back = step(4)
    tensor4 = numbers(4, rank, *SHAPE)
    collectives.all_reduce(tensor4, "weight", op=AVG)
    assert unknown is not None
    assert unknown[0] == "CheckpointError"
    assert torch.equal(tensor, expected)
    assert torch.equal(back, tensor4)
    assert collectives.step == hook.step == 5


@on_ranks(2)
def test_calls_that_overlap_give_what_they_give_one_after_the_other(rank: int) -> None:
    for name, options in {"int8": {}, "topk": {"ratio": 0.1}, "powersgd": {"rank": 1}}.items():
        results = []
        for async_op in (False, True):
            collectives = commhooks.Collectives(name, **options)
            tensors = [
                numbers(step, rank + 7 * number, *SHAPE) for step in range(4) for number in range(5)
            ]
            handles: list[Any] = [
                collectives.all_reduce(tensor, f"t{place % 5}", async_op=async_op)
                for place, tensor in enumerate(tensors)
            ]
            collectives.wait()
            if async_op:
                assert all(handle.wait() and handle.is_completed() for handle in handles)
                assert handles[0].get_future().value() is tensors[0]
            assert async_op or handles == [None] * 20
            assert (collectives.step, collectives.calls) == (4, 20)
            results.append(tensors)
            collectives.close()
        assert all(map(torch.equal, *results)), name


class _Raises(commhooks.schemes.Dense):
    def exchange(self, bucket: Bucket) -> SchemeExchange:
        if bucket.layout.names == ("bad",):
            raise RuntimeError("this exchange fails")
        return (yield from super().exchange(bucket))


@on_ranks(2)
def test_a_call_that_failed_is_reported_where_nobody_kept_its_handle() -> None:
    collectives = commhooks.Collectives(_Raises())
    good, bad = torch.ones(600), torch.ones(600)
    collectives.all_reduce(bad, "bad", async_op=True)
    # Later calls, of the same name as well, do not make it forgotten.
    handles = [collectives.all_reduce(good, "good", async_op=True) for _ in range(3)]
    for handle in handles:
        handle.wait()
    first, second = outcome(collectives.wait), outcome(collectives.wait)
    assert first is not None
    assert "this exchange fails" in first[1]
    assert second is None


class _SlowTopK(TopK):
    """Keeps its residual some time after its mean has come."""

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        mean = yield from super().exchange(bucket)
        time.sleep(0.5)
        return mean


@on_ranks(2)
def test_a_switch_waits_for_calls_that_are_under_way(rank: int) -> None:
    """Calls are under way with a scheme that keeps what the next one does not."""
    collectives = commhooks.Collectives(ErrorFeedback(_SlowTopK(0.1)))
    shape, calls = SHAPE, 2
    tensors = [numbers(0, rank + 2 * number, *shape) for number in range(calls)]
    total = sum(tensors, torch.zeros(shape))
    dist.all_reduce(total)
    for number, tensor in enumerate(tensors):
        collectives.all_reduce(tensor, str(number), async_op=True)
    collectives.switch("none")
    applied = sum(tensors, torch.zeros(shape))
    for number in range(calls):
        tensor = torch.zeros(shape)
        collectives.all_reduce(tensor, str(number))
        applied += tensor
    assert float((total - applied).abs().max()) < 1e-4


@on_ranks(2, ignore_warnings=(".*is deprecated.*",))
def test_a_switch_sends_what_was_held_of_parts_and_leaves_the_input_alone(
    rank: int, world_size: int
) -> None:
    """As before, in parts; the input, which a scheme may use as memory, is the caller's."""
    collectives = commhooks.Collectives("int4", block=64)
    total, applied = torch.zeros(SHAPE), torch.zeros(SHAPE)
    for step in range(4):
        if step == 3:
            collectives.switch("none")
        given = numbers(step, rank, world_size * SHAPE[0], SHAPE[1])
        wanted, part = torch.zeros(2, *SHAPE)
        kept = given.clone()
        dist.reduce_scatter_tensor(wanted, given)
        collectives.reduce_scatter(part, given, "w")
        total, applied = total + wanted, applied + part
        assert torch.equal(given, kept)
    assert float((total - applied).abs().max()) < 1e-4


# ---- what is refused


@on_ranks(2)
def test_what_cannot_be_done_is_refused_with_what_to_do(rank: int) -> None:
    inputs, larger, half = torch.ones(600), torch.ones(1200), torch.ones(300)
    stateful = commhooks.Collectives("topk")
    stateful.all_reduce(inputs.clone(), "x")
    closed = commhooks.Collectives("int8")
    closed.all_reduce(inputs.clone())
    closed.close()
    halves = commhooks.Collectives("int4")
    halves.all_reduce(inputs.clone(), "x")
    sums, parts, wholes = commhooks.all_reduce, commhooks.reduce_scatter, commhooks.all_gather
    no_memory = partial(commhooks.make, error_feedback=False)
    other_call = partial(sums, inputs) if rank else partial(wholes, larger, inputs)
    for kind, text, call, *arguments in (
        (ValueError, "state of this name for all_reduce", halves.all_gather, larger, inputs, "x"),
        (RegistrationError, "commhooks.Collectives", sums, inputs, "topk"),
        (ValueError, "SUM or ReduceOp.AVG", partial(sums, op=dist.ReduceOp.MAX), inputs, "int8"),
        (ValueError, "give every tensor a name", stateful.all_reduce, inputs),
        (ValueError, "a name of its own", stateful.all_reduce, torch.ones(5), "x"),
        (ValueError, "torch.float64", stateful.all_reduce, inputs.double(), "x"),
        (TypeError, "a text", stateful.all_reduce, inputs, 3),
        (RegistrationError, "make another", closed.all_reduce, inputs),
        (ValueError, "input needs 2 times the entries", parts, torch.ones(5), inputs, "int8"),
        (ValueError, "both of one dtype", wholes, larger.double(), inputs, "int8"),
        (TypeError, "takes tensors, got list", sums, [1.0], "int8"),
        (TypeError, "dense tensors", sums, torch.ones(5).to_sparse(), "int8"),
        (ValueError, "is not whole; use SUM", partial(sums, op=AVG), torch.ones(5).int()),
        (RegistrationError, "use all_reduce, or int8", parts, half, inputs, no_memory("random_k")),
        (RegistrationError, "use all_reduce, or int8", parts, half, inputs, "powersgd"),
        (RegistrationError, "has no payload", wholes, larger, inputs, no_memory("random_k")),
        (TypeError, "state_dict", pickle.dumps, stateful),
        (TypeError, "state_dict", copy.deepcopy, stateful),
        (TypeError, "ProcessGroup", partial(sums, group=[0]), inputs),
        (MismatchError, "commhooks.all_reduce, the first call",
         partial(sums, block=64 + 64 * rank), inputs, "int8"),
        (MismatchError, "all_gather", other_call, "fp8"),
    ):  # fmt: skip
        with pytest.raises(kind, match=re.escape(text)):
            call(*arguments)
    assert torch.equal(inputs, torch.ones(600)), "a refused call changed its tensor"


# ---- what the functions keep


@on_ranks(2)
def test_functions_use_what_they_made_until_its_group_is_destroyed() -> None:
    def threads() -> int:
        return sum(thread.name == "commhooks-lanes" for thread in threading.enumerate())

    counts = []
    group = dist.new_group([0, 1])
    for _ in range(5):
        commhooks.all_reduce(torch.ones(600), "int8", group=group)
        commhooks.all_reduce(torch.ones(600), "int8")
        commhooks.all_reduce(torch.ones(600), commhooks.make("int8"))
        counts.append((threads(), sum(map(len, functions._made.values()))))
    dist.destroy_process_group(group)
    commhooks.all_reduce(torch.ones(600), "int8")
    counts.append((threads(), sum(map(len, functions._made.values()))))
    call = CollectiveCall("all_reduce", torch.ones(600), torch.ones(600))
    first = functions.collectives_of("int8", None, call)
    schemes = [
        functions.collectives_of("int8", None, call, block=block).scheme for block in (64, 128)
    ]
    assert counts == [(3, 3)] * 5 + [(2, 2)]
    assert first.ledger.payload_bytes > 0
    assert schemes[0] != schemes[1]
    assert first.calls == 6


@on_ranks(2)
def test_each_call_draws_other_bits(rank: int) -> None:
    """Two calls round at random, and in different ways."""
    results = []
    for _ in range(2):
        tensor = numbers(0, rank, 4000)
        commhooks.all_reduce(tensor, "int8")
        results.append(tensor)
    assert not torch.equal(*results)


@on_ranks(2)
def test_numbers_of_8_bits_travel_as_they_are(rank: int, world_size: int) -> None:
    part = numbers(0, rank, 2048).to(torch.float8_e4m3fn)
    whole = torch.empty(2048 * world_size, dtype=torch.float8_e4m3fn)
    handle = commhooks.all_gather(whole, part, "int8", async_op=True)
    assert isinstance(handle, dist.Work)  # what hosts wait for
    handle.wait()
    parts = [numbers(0, value, 2048).to(torch.float8_e4m3fn) for value in range(world_size)]
    assert torch.equal(whole.view(torch.uint8), torch.cat(parts).view(torch.uint8))


@on_ranks(4)
def test_means_of_means_are_unbiased(rank: int) -> None:
    """The bias of a mean within rows of ranks and then within columns, and its deviation."""
    local = dist.new_group([0, 2]), dist.new_group([1, 3])
    same, ranks = numbers(0, rank // 2, 1000), [torch.empty(1000) for _ in range(4)]
    commhooks.all_reduce(same, "int4", op=AVG, group=local[rank % 2], error_feedback=False)
    dist.all_gather(ranks, same)
    assert all(torch.equal(mean, same) for mean in ranks)  # equal inputs give equal means
    rows, columns = (
        [dist.new_group(list(ranks)) for ranks in groups]
        for groups in (((0, 1), (2, 3)), ((0, 2), (1, 3)))
    )
    # In steps of a dither; where both means had the same draws, small entries were off by 0.03.
    inputs = torch.linspace(0.0, 3.2, 256)
    inputs[0] = 126.5
    scales, steps = (1.0, 0.7, 1.3, 2.1), 60
    mean, total = inputs * sum(scales) / 4, torch.zeros(256, 256)
    for _ in range(steps):
        ours = (inputs * scales[rank]).repeat(256, 1)
        commhooks.all_reduce(ours, "int8", op=AVG, group=rows[rank // 2])
        commhooks.all_reduce(ours, "int8", op=AVG, group=columns[rank % 2])
        total += ours
    bias = (total / steps - mean)[:, 1:].mean(0) / (sum(scales) / 4)
    assert float(bias.square().mean().sqrt()) < 1.5 * (0.2 / (steps * 256)) ** 0.5
