"""A backward pass that raises and is caught: all ranks go on from the same place, or none does."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import commhooks
from commhooks import ZeroOptimizer
from ddp_core import DistributedDataParallel
from tests.tools.harness import on_ranks, run_ranks
from tests.tools.models import Breaks, loss_of
from tests.tools.training import averaged, batch, equal_on_all_ranks, everyone, gradients, outcome

LAYERS = 6
STEPS = 7
AT = 3  # the step in which some ranks raise
NOWHERE = -1


class Equal(nn.Module):
    """Layers of one size, each a bucket; backward raises below a layer, after those above it."""

    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(LAYERS))
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()

    def forward(self, x: Tensor, breaks: int = NOWHERE) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(Breaks.apply(x, breaks == number)).tanh()
        return self.norm(x)


def wrapped(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(Equal(), bucket_cap_mb=0.001, **options)


def backward(model: nn.Module, step: int, rank: int, breaks: int = NOWHERE) -> None:
    model.zero_grad()
    loss_of(model(batch(step, rank, 8, 16).requires_grad_(), breaks)).backward()


class Training(NamedTuple):
    """Gradients and errors of training that went on, on one rank."""

    landed: dict[int, Tensor]  # gradients by step
    error: Any = None
    again: Any = None  # the error of the next forward pass


def careless(model: nn.Module, rank: int, breaks: int, at: int = AT) -> Training:
    """Trains; catches what backward raises on purpose, and goes on."""
    landed = {}
    for step in range(STEPS):
        try:
            backward(model, step, rank, breaks if step == at else NOWHERE)
        except ArithmeticError:
            continue
        except RuntimeError as error:
            again = outcome(model, batch(step, rank, 8, 16))
            return Training(landed, (type(error).__name__, str(error)), again)
        landed[step] = gradients(model)
    return Training(landed)


def means(ranks: int) -> list[Tensor]:
    """The averaged gradients of each step, computed here."""
    expected = []
    for step in range(STEPS):
        each = []
        for rank in range(ranks):
            model = Equal()
            backward(model, step, rank)
            each.append(gradients(model))
        expected.append(torch.stack(each).mean(0))
    return expected


HOOKS: dict[str, Any] = {
    "none": None,
    "powersgd": "powersgd",
    "topk": commhooks.make("topk", ratio=0.1),
}


def check_errors(rank: int, places: tuple[int, ...], at: int, **options: Any) -> str:
    """All ranks raise in time; until then nothing but means was in ``.grad``. Returns the error."""
    ranks = len(places)
    landed, error, again = careless(wrapped(**options), rank, places[rank], at)
    expected = means(ranks)
    for step, gradient in landed.items():
        torch.testing.assert_close(gradient, expected[step])
    # All buckets were sent by a rank that raised after the last: the others land the step.
    raised, late = places[rank] != NOWHERE, 0 in places
    assert list(landed) == [*range(at + (late and not raised))]
    assert error[0] == ("MismatchError" if raised else "CollectiveError"), error
    assert again[0] == "MismatchError", again  # until the process ends
    assert f"aborted step {at} after" in error[1]
    assert "resume from the last" in error[1]
    assert "did not within" not in error[1]
    text: str = error[1]
    return text


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
    ],
    ids=["plain", "unused", "static", "view"],
)
@pytest.mark.parametrize("breaks", [LAYERS - 2, 1, 0], ids=["early", "late", "after"])
@on_ranks(2, ignore_warnings=("find_unused",))
def test_a_rank_that_goes_on_alone_is_an_error_on_all(rank, options, breaks):
    check_errors(rank, (NOWHERE, breaks), AT, **options)


@pytest.mark.parametrize("at", [0, 1])
@on_ranks(2)
def test_the_same_before_and_after_buckets_are_rebuilt(rank, at):
    check_errors(rank, (2, NOWHERE), at)


@pytest.mark.parametrize(
    "places",
    [(2, NOWHERE, 2), (NOWHERE, 2, NOWHERE), (2, 4, NOWHERE), (1, 4, 4), (4, 1, 3)],
)
@on_ranks(3)
def test_three_ranks_that_raise_not_alike(rank, places):
    check_errors(rank, places, AT)


@on_ranks(2)
def test_different_places_are_an_error_on_both_in_the_same_words(rank):
    texts = everyone(check_errors(rank, (2, 4), AT), dist.new_group())
    assert texts[0] == texts[1]


@pytest.mark.parametrize("hook", ["powersgd", "topk"])
@on_ranks(2)
def test_hooks_with_memory(rank, hook):
    for places in ((NOWHERE, 2), (2, 4)):
        model = wrapped(process_group=dist.new_group())
        commhooks.register(model, HOOKS[hook])
        name, text = careless(model, rank, places[rank]).error
        assert name in ("CollectiveError", "MismatchError")
        assert f"aborted step {AT} after" in text
        assert "did not within" not in text


@pytest.mark.parametrize("hook", HOOKS)
@on_ranks(3)
def test_ranks_that_raise_alike_go_on_again_and_again(rank, hook):
    options = {"static_graph": True} if hook == "topk" else {}
    model, plain = wrapped(**options), wrapped(**options)
    if HOOKS[hook] is not None:
        for replica in (model, plain):
            commhooks.register(replica, HOOKS[hook])
    keys = []
    store = dist.distributed_c10d._get_default_store()
    for step in range(12):
        for place in (step % LAYERS, LAYERS - 1):
            with pytest.raises(ArithmeticError):
                backward(model, 90 + step, rank, place)
        backward(model, step, rank)
        backward(plain, step, rank)
        assert torch.equal(gradients(model), gradients(plain)), step
        keys.append(store.num_keys())
    # Lanes and lent groups may come and go; two drops per step would be dozens of keys.
    assert max(keys[6:]) - max(keys[:6]) <= 2


@on_ranks(2)
def test_passes_in_which_nothing_travels_may_raise_on_one_rank(rank: int) -> None:
    model, local = wrapped(), Equal()
    for step in range(3):
        # Nothing travels in these passes, so each rank may drop its own.
        with model.no_sync():
            breaks = 2 if rank == step % 2 else NOWHERE
            with contextlib.suppress(ArithmeticError):
                backward(model, step, rank, breaks)
        with model.hold(), contextlib.suppress(ArithmeticError):
            backward(model, step, rank, 2 - 3 * rank)
        with torch.no_grad():
            model(batch(step, rank, 8, 16))
        backward(model, step, rank)
        backward(local, step, rank)
        torch.testing.assert_close(gradients(model), averaged(gradients(local)))


@on_ranks(1)
def test_a_single_rank_asks_nobody(rank: int) -> None:
    model, local = wrapped(), Equal()
    for step in range(3):
        with pytest.raises(ArithmeticError):
            backward(model, step, rank, 2)
        backward(model, step, rank)
        backward(local, step, rank)
        assert torch.equal(gradients(model), gradients(local))


def _otherwise(rank: int, world_size: int, how: str) -> Any:
    """Rank 1 raises, catches it, and does something else than a training step."""
    model = DistributedDataParallel(Equal(norm=how == "buffers"), bucket_cap_mb=0.001)
    second = wrapped()
    if rank == 1:
        with pytest.raises(ArithmeticError):
            backward(model, 1, rank, 2)
        model.zero_grad()
        if how == "buffers":
            with torch.no_grad():
                return outcome(model, batch(0, rank, 8, 16))
        if how == "reduce":
            with model.hold():  # asks nobody yet
                backward(model, 2, rank)
            return outcome(model.reduce)
        if how == "another model":
            return outcome(backward, second, 2, rank)
        if how == "replaced":
            model.register_comm_hook(None, _zeros)
        return outcome(backward, model, 2, rank)
    return outcome(backward, model, 1, rank)


def _zeros(state: None, bucket: Any) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(torch.zeros_like(bucket.buffer()))
    return future


@pytest.mark.parametrize("how", ["buffers", "reduce", "replaced", "another model"])
def test_whatever_comes_first_where_ranks_meet_is_an_error(how):
    other, alone = run_ranks(_otherwise, 2, how)
    assert other[0] == "CollectiveError"
    assert alone[0] == "MismatchError"
    assert "rank 1 aborted step 0 after" in other[1]


@on_ranks(2, ignore_warnings=("Detected uneven inputs",))
def test_a_rank_without_inputs_does_not_raise_with_the_others(rank):
    model = wrapped()

    def train_joined() -> None:
        with model.join():
            for step in range(1 + 3 * rank):
                with contextlib.suppress(ArithmeticError):
                    backward(model, step, rank, 2 if step == 2 else NOWHERE)

    assert outcome(train_joined)[0] == ("MismatchError" if rank else "CollectiveError")


@pytest.mark.parametrize("in_backward", [False, True])
@on_ranks(2)
def test_a_sharded_optimizer(rank, in_backward):
    for alike in (True, False):
        model = wrapped(process_group=dist.new_group())
        zero = ZeroOptimizer(model, torch.optim.Adam, lr=1e-2, in_backward=in_backward)
        error = None
        for step in range(6):
            try:
                backward(model, step, rank, 2 if step == 3 and (alike or rank) else NOWHERE)
            except ArithmeticError:
                zero.zero_grad()
            except RuntimeError as raised:
                error = type(raised).__name__, str(raised)
                break
            zero.step()
            zero.zero_grad()
        if alike:
            assert error is None
            assert equal_on_all_ranks(*model.parameters())
        else:
            assert error[0] == ("MismatchError" if rank else "CollectiveError")
            assert "rank 1 aborted step 3 after" in error[1]


def _missing(rank: int, world_size: int) -> Any:
    model = wrapped()
    for step in range(2):
        backward(model, step, rank)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:  # done with training, and alive
        store.wait(["over"])
        return None
    with pytest.raises(ArithmeticError):
        backward(model, 2, rank, LAYERS - 1)
    error = outcome(backward, model, 3, rank)
    store.set("over", "")
    return error


def test_a_rank_that_never_comes_is_named_after_the_groups_timeout():
    (name, text), _ = run_ranks(_missing, 2, pg_timeout=3)
    assert name == "MismatchError"
    assert "rank 0 aborted step 2 after" in text
    assert "rank 1 did not within 3 s" in text


@on_ranks(2)
def test_another_process_group_is_a_new_beginning(rank, world_size):
    model, group = wrapped(), dist.new_group()
    assert careless(model, rank, 2 if rank else NOWHERE).error is not None
    if rank == 1:  # it came later, and counts its steps from 0
        model = wrapped(process_group=dist.new_group([1], use_local_synchronization=True))
    model.change_group(group)
    for step, mean in enumerate(means(world_size)):
        with pytest.raises(ArithmeticError):
            backward(model, step, rank, 3)
        backward(model, step, rank)
        torch.testing.assert_close(gradients(model), mean)
