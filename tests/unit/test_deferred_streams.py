"""Hooks on a device with streams: what is read after a wait has been written, in any order."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from commhooks.hook._exchanges import Step
from commhooks.hook._state import HookState
from commhooks.schemes.sparse import TopK
from commhooks.verify import Verification
from commhooks.wrappers._ef21 import EF21
from ddp_core.exchange._devices import Marks
from tests.device.deferred_device import LazyDevice, Order, lazy_device
from tests.device.loopback import loopback

STEPS, BUCKETS = 3, 5  # the first and the last have different ones of three side streams
KEEPING = {"onebit", "powersgd", "acpsgd", "dgc"}  # tensors, each in its way
SCHEMES: list[tuple[str, dict[str, Any]]] = [
    ("none", {}),
    ("fp16", {}),
    ("int8", {"block": 32}),
    ("onebit", {"block": 32}),
    ("powersgd", {"rank": 2}),
    ("powersgd", {"rank": 2, "coalesce": True}),
    ("topk", {"ratio": 0.1}),
    ("acpsgd", {"rank": 2}),
    ("eden", {}),
    ("dgc", {"ratio": 0.1}),
    ("sdp4bit", {"local_size": 1, "inside_block": 64, "between_block": 64}),
]


pytestmark = pytest.mark.usefixtures("one_rank")


class Bucket:
    """A bucket as DDP hands it to hooks."""

    def __init__(self, index: int, parameters: list[nn.Parameter], buffer: Any, last: bool):
        self._all = index, parameters, buffer, last

    def index(self) -> int:
        return self._all[0]

    def parameters(self) -> list[nn.Parameter]:
        return self._all[1]

    def buffer(self) -> Tensor:
        return self._all[2]

    def is_last(self) -> bool:
        return self._all[3]


def bucket_contents(
    machine: LazyDevice,
    name: str,
    options: dict[str, Any],
    *,
    bad: bool = False,
    notified: bool = False,
    last_first: bool = False,
    rebuilt: bool = False,
    cut: bool = False,
    ahead: bool = False,
    verified: bool = False,
) -> list[Tensor]:
    """The contents of a reducer's buckets after each step, and the memory in the end.

    Args:
        bad: one step has an infinity.
        notified: the reducer says when gradients are written, as ``ddp_core``'s does.
        last_first: the last bucket is waited for first: what one side stream does may be over
            before the other has begun.
        rebuilt: all parameters are in one bucket in the first step, as in DDP, and the second step
            has other buckets.
        cut: buckets are exchanged in parts, on several streams.
        ahead: buckets may pause after their first collective.
        verified: results have what ranks would send to verify each step.
    """
    middle = (nn.Linear(20, 16) for _ in range(BUCKETS - 2))
    model = nn.Sequential(nn.Linear(20, 32), *middle, nn.Linear(16, 8))
    several = [list(layer.parameters()) for layer in reversed(model)]
    results = []
    with loopback(machine):
        hook = HookState(name, model, **options)
        if cut:
            hook.engine.traits = hook.engine.traits._replace(max_bucket_numel=200)
        hook.target.launches_ahead = ahead
        if notified:
            hook.target.notifying_core = lambda hook: hook
        verification = _opened(hook) if verified else None
        for step in range(STEPS):
            if verification is not None:
                verification.on_first_bucket(step, hook.scheme)
            generator = torch.Generator().manual_seed(step)
            groups = [list(model.parameters())] if rebuilt and not step else several
            futures = []
            for index, parameters in enumerate(groups):
                gradient = torch.randn(sum(p.numel() for p in parameters), generator=generator)
                if bad and (step, index) == (1, 1):  # not the stream of the last bucket
                    gradient[3] = torch.inf
                # Copied behind what the caller's stream does: backward goes on while this runs.
                buffer = torch.empty_like(gradient, device="meta")
                buffer.copy_(gradient, non_blocking=True)
                last = index == len(groups) - 1
                futures.append((hook.start(Bucket(index, parameters, buffer, last)), buffer))
            written = []  # as a reducer writes gradients: before it waits for the next bucket
            for future, buffer in reversed(futures) if last_first else futures:
                mean = future.wait()
                if mean is not buffer:
                    buffer.copy_(mean)
                written.append(buffer.clone())
            if notified:
                hook.gradients_written()
            written = written[::-1] if last_first else written
            results += [machine.read(gradient) for gradient in written]
        results += [machine.read(value) for _, _, value in hook.engine.memory.items()]
        for compared in [] if verification is None else verification._pending:
            compared.wait()
            results += [machine.read(compared._table), machine.read(compared._sketches)]
        hook.close()
    return results


def _opened(hook: HookState) -> Verification:
    """A verification of every step, which judges none: the host would wait for its results."""
    verification, weight = Verification(1), torch.empty(20, device="meta").fill_(2.0)
    values, group = {"weight": weight, "narrow": weight.half()}, dist.group.WORLD
    assert group is not None
    join = hook.drivers.join
    verification.open(group, {"meta"}, join, values=lambda: values, owner=hook)
    verification._cancel_finalizer()
    hook.engine.observer = verification
    return verification


def found_in(order: Order, name: str, options: dict[str, Any], **case: bool) -> list[Tensor]:
    torch.manual_seed(0)
    with lazy_device(order) as machine:
        return bucket_contents(machine, name, options, **case)


def assert_same(left: list[Tensor], right: list[Tensor]) -> None:
    assert len(left) == len(right)
    for tensor, other in zip(left, right, strict=True):
        torch.testing.assert_close(tensor, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("order", ["late", "early"])
@pytest.mark.parametrize(("name", "options"), SCHEMES)
def test_a_hook_gives_the_same_in_every_order(
    name: str, options: dict[str, Any], order: Order
) -> None:
    expected = found_in("at once", name, options)
    for last_first in (False, True):
        assert_same(found_in(order, name, options, last_first=last_first), expected)


@pytest.mark.parametrize("order", ["late", "early"])
@pytest.mark.parametrize(("name", "options"), [case for case in SCHEMES if case[0] in KEEPING])
def test_a_step_that_is_not_finite_or_ends_later_is_the_same_in_every_order(
    name: str, options: dict[str, Any], order: Order
) -> None:
    for case in (
        {"bad": True, "last_first": True},
        {"notified": True},
        {"bad": True, "notified": True},
    ):
        expected = found_in("at once", name, options, **case)
        assert all(tensor.isfinite().all() for tensor in expected[STEPS * BUCKETS :])  # the memory
        assert_same(found_in(order, name, options, **case), expected)


@pytest.mark.parametrize("order", ["late", "early"])
@pytest.mark.parametrize(("name", "options"), [case for case in SCHEMES if case[0] in KEEPING])
def test_what_is_kept_moves_to_other_buckets_in_every_order(
    name: str, options: dict[str, Any], order: Order
) -> None:
    for case in ({"rebuilt": True}, {"rebuilt": True, "notified": True, "last_first": True}):
        expected = found_in("at once", name, options, **case)
        assert_same(found_in(order, name, options, **case), expected)


@pytest.mark.parametrize("order", ["late", "early"])
@pytest.mark.parametrize(("name", "options"), SCHEMES)
def test_exchanges_that_pause_give_the_same_in_every_order(
    name: str, options: dict[str, Any], order: Order
) -> None:
    for case in (
        {"last_first": True},
        {"notified": True},
        {"bad": True, "last_first": True},
        {"bad": True, "rebuilt": True},
    ):
        expected = found_in("at once", name, options, **case)
        assert_same(found_in(order, name, options, ahead=True, **case), expected)


@pytest.mark.parametrize("order", ["late", "early"])
@pytest.mark.parametrize("name", ["int8", "onebit", "topk"])
def test_parts_of_a_bucket_are_all_waited_for(name: str, order: Order) -> None:
    for case in ({"cut": True}, {"cut": True, "notified": True, "last_first": True}):
        expected = found_in("at once", name, {}, **case)
        assert_same(found_in(order, name, {}, **case), expected)


@pytest.mark.parametrize("order", ["late", "early"])
@pytest.mark.parametrize(
    ("name", "options"), [SCHEMES[2], ("int4", {"block": 64, "error_feedback": True}), SCHEMES[4]]
)
def test_what_verification_sends_is_the_same_in_every_order(
    name: str, options: dict[str, Any], order: Order
) -> None:
    for case in ({"verified": True}, {"verified": True, "cut": True, "last_first": True}):
        expected = found_in("at once", name, options, **case)
        assert expected[-2].any()
        assert_same(found_in(order, name, options, **case), expected)


def after_an_aborted_step_in(order: Order) -> list[Tensor]:
    """Two steps around one that is aborted after its first buckets, in other buckets than before.

    The buckets' memory is the same in every step, and nobody waits for aborted exchanges, as in
    torch's class.
    """
    torch.manual_seed(0)
    with lazy_device(order) as machine, loopback(machine):
        model = nn.Sequential(*(nn.Linear(20, 16) for _ in range(4)))
        hook = HookState("onebit", model, block=32)
        layers = [list(layer.parameters()) for layer in model]
        buffers = [torch.empty(672, device="meta") for _ in range(2)]
        results = []
        for step, launched in enumerate((2, 1, 2)):
            pairs = [layers[0] + layers[1], layers[2] + layers[3]]
            if step:
                pairs = [layers[0] + layers[2], layers[1] + layers[3]]
            hook.forward_begins()
            futures = []
            for place in range(launched):
                gradient = torch.randn(672, generator=torch.Generator().manual_seed(step))
                buffers[place].copy_(gradient, non_blocking=True)
                bucket = Bucket(place, pairs[place], buffers[place], place == 1)
                futures.append(hook.start(bucket))
            if launched == 2:
                results += [future.wait().clone() for future in futures]
            else:
                open_step = hook.runner._step
                assert open_step is not None
                open_step.backward_ids.add(1)  # of a backward pass, which is over
        results = [machine.read(mean) for mean in results]
        results += [machine.read(value) for _, _, value in hook.engine.memory.items()]
        hook.close()
    return results


@pytest.mark.parametrize("order", ["late", "early"])
def test_a_step_after_an_aborted_one_is_the_same_in_every_order(order: Order) -> None:
    assert_same(after_an_aborted_step_in(order), after_an_aborted_step_in("at once"))


def test_only_the_next_forward_pass_waits_for_an_aborted_step() -> None:
    hook = HookState("int8", nn.Linear(4, 4))
    with mock.patch.object(hook.drivers, "join") as join:
        hook.forward_begins()
        for of_core in (True, False):
            step = Step(0, hook.target.group(), core_notifies=of_core)
            hook.runner._step = step
            step.backward_ids.add(1)  # of a backward pass, which is over
            if of_core:
                hook.step_aborted()
            assert not hook.runner.under_way  # as a change of the group and a checkpoint ask
        assert not join.called  # a peer may be gone
        for _ in range(2):
            hook.forward_begins()
            join.assert_called_once_with()
    hook.close()


def fragments_in(order: Order) -> list[Tensor]:
    """Averages of parts of a model by turns, as DiLoCo with a delay: each is waited for later."""
    torch.manual_seed(0)
    with lazy_device(order) as machine, loopback(machine):
        model = nn.Sequential(*(nn.Linear(20, 16) for _ in range(16)))
        layers = [list(layer.parameters()) for layer in model]
        hook = HookState(EF21(TopK(0.1)), model)
        results, pending = [], []
        for step in range(9):
            if step > 2:
                results += [pending.pop(0).wait().clone() for _ in range(4)]
            for place in range(4):  # a layer meets another one of three streams each time
                gradient = torch.randn(336, generator=torch.Generator().manual_seed(step))
                buffer = torch.empty_like(gradient, device="meta")
                buffer.copy_(gradient, non_blocking=True)
                bucket = Bucket(place, layers[step % 4 * 4 + place], buffer, place == 3)
                pending.append(hook.start(bucket))
        results += [future.wait().clone() for future in reversed(pending)]
        result = [machine.read(mean) for mean in results]
        hook.close()
    return result


@pytest.mark.parametrize("order", ["late", "early"])
def test_steps_that_are_under_way_together_share_no_memory(order: Order) -> None:
    assert_same(fragments_in(order), fragments_in("at once"))


# ---- the device itself; planted bugs show that it sees streams that do not wait


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: x.sum().item(), "_local_scalar_dense"),
        (lambda x: x.cpu(), "_to_copy"),
        (lambda x: torch.empty(3).copy_(x), "copy_"),
        (lambda x: torch.tensor(1.0, device="meta"), "_to_copy"),
    ],
)
def test_what_makes_the_host_wait_is_refused(call: Any, words: str) -> None:
    with lazy_device("late") as machine:
        machine.may_copy = False
        x = torch.empty(3, device="meta").fill_(1.0)
        with pytest.raises(RuntimeError, match=f"{words}: the host would wait"):
            call(x)


def test_work_is_done_when_somebody_waits_for_it_and_memory_is_given_back_in_order() -> None:
    with lazy_device("late") as machine:
        x = torch.zeros(3, device="meta")
        side = machine.Stream()
        side.wait_stream(machine.current)
        with machine.stream(side):
            y = x + 1
            again = y.view(3)[1:]
        assert machine.read(y).isnan().all()  # this stream does not wait for the other one
        machine.current.wait_stream(side)
        assert machine.read(again).tolist() == [1.0, 1.0]
        memory = again.host
        del y
        assert memory.tolist() == [1.0, 1.0]  # a view is left
        del again
        assert memory.tolist() == [1.0, 1.0]
        with machine.stream(side):
            torch.zeros(3, device="meta")  # in its place
        machine.current.wait_stream(side)
        machine.read(x)
        assert memory.isnan().all()


def test_marks_show_how_far_a_device_has_come_without_a_call_to_it() -> None:
    with lazy_device("late") as machine:
        marks = Marks(torch.device("meta"))
        assert [marks.enqueue(), marks.enqueue()] == [1, 2]
        queue, machine.Event = machine.current, None  # type: ignore[assignment]
    assert marks.latest() == 0
    queue.run(len(queue.queue) - 1)
    assert marks.latest() == 1
    queue.run(len(queue.queue))
    assert marks.latest() == 2
