"""A run that was killed and resumed equals one that was not; checkpoint formats keep each rank's.

torch's DDP forms its buckets anew after a process's first step (a static graph's second one), by
the order in which gradients came. Until then a resumed run exchanges its parameters in the saved
run's buckets, see docs/design/steps.md. Two things remain: on torch's class a state of the first
steps cannot know the buckets to come; and a run that asks for buckets of another size gets them,
which matters to sums over three ranks or more (Gloo adds them up in an order that depends on the
place) and to schemes that compress a bucket as a whole.
"""

from __future__ import annotations

import copy
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import commhooks
from commhooks.checkpoint._format import checksum
from ddp_core import DistributedDataParallel as CoreDDP
from tests.tools.harness import Died, run_ranks
from tests.tools.models import loss_of
from tests.tools.training import (
    BY_BUCKET,
    STATEFUL,
    averaged,
    batch,
    ddp,
    equal_bits,
    gradients,
    mlp,
    outcome,
    parameters,
    residuals,
)

SMALL, LARGE = 2.0, 4.0  # KiB a bucket: one or three of the weights below
KILLED, END = 8, 16  # after so many steps
CONFIGS = {**STATEFUL, "powersgd-late": ("powersgd", {"rank": 2, "start_step": 12})}
CONFIGS["powersgd-started"] = ("powersgd", {"rank": 2, "start_step": 4})


class _Run:
    """A model, its momentum optimizer and its hook, that can be saved and loaded."""

    def __init__(
        self, rank: int, config: str, bucket_kb: float = SMALL, fixed: bool = False, seed: int = 5
    ):
        scheme, options = CONFIGS[config]
        self.rank = rank
        self.model = ddp(mlp(), bucket_kb, find_unused_parameters=fixed)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.hook = commhooks.register(self.model, scheme, seed=seed, **options)

    def steps(self, start: int, stop: int) -> None:
        for step in range(start, stop):
            self.optimizer.zero_grad()
            x = batch(step, self.rank, 8, 16)
            (self.model(x) - x.roll(1, 1)).square().mean().backward()
            self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "hook": self.hook.state_dict(),
        }

    def load(self, state: dict[str, Any], hook_state: Any = None) -> None:
        self.model.module.load_state_dict(state["model"])
        # A copy: the optimizer would update the tensors that it is given.
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self.hook.load_state_dict(state["hook"] if hook_state is None else hook_state)

    def everything(self) -> tuple[Tensor, Tensor, Tensor]:
        """Weights, momentum and residuals."""
        momentum = [state["momentum_buffer"] for state in self.optimizer.state.values()]
        flat = torch.cat([buffer.reshape(-1) for buffer in momentum])
        return parameters(self.model), flat, residuals(self.hook, self.model)


def _path(directory: str, rank: int) -> Path:
    return Path(directory, f"rank{rank}.pt")


def _uninterrupted(rank: int, world_size: int, config: str, *buckets: Any) -> Any:
    run = _Run(rank, config, *buckets)
    run.steps(0, END)
    return run.everything()


def _until_killed(rank: int, world_size: int, directory: str, config: str, *buckets: Any) -> None:
    run = _Run(rank, config, *buckets)
    run.steps(0, KILLED)
    torch.save(run.state(), _path(directory, rank))
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def _resumed(rank: int, world_size: int, directory: str, config: str, *buckets: Any) -> Any:
    run = _Run(rank, config, *buckets, seed=6)  # draws go on with the seed that was saved
    run.load(torch.load(_path(directory, rank)))
    run.steps(KILLED, END)
    return run.everything()


FIXED = (SMALL, True)
QUIET = ("find_unused",)  # DDP remarks that all parameters are used


def _killed_and_resumed(
    world_size: int, config: str, directory: Path, before: Any, after: Any
) -> Any:
    everyone = range(world_size)
    place = str(directory)
    died = run_ranks(
        _until_killed, world_size, place, config, *before, may_die=everyone, ignore_warnings=QUIET
    )
    assert died == [Died(-signal.SIGKILL)] * world_size
    return run_ranks(_resumed, world_size, place, config, *after, ignore_warnings=QUIET)


@pytest.mark.parametrize(
    ("world_size", "config", "buckets"),
    [
        *[(2, config, (SMALL,)) for config in CONFIGS if config not in BY_BUCKET],
        (2, "sdp4bit", FIXED),  # two ranks are a node
        *[(3, config, FIXED) for config in CONFIGS],
    ],
)
def test_kill_and_resume_is_no_interruption_bit_for_bit(world_size, config, buckets, tmp_path):
    want = run_ranks(_uninterrupted, world_size, config, *buckets, ignore_warnings=QUIET)
    got = _killed_and_resumed(world_size, config, tmp_path, buckets, buckets)
    for rank in range(world_size):
        for mine, theirs in zip(got[rank], want[rank], strict=True):
            assert torch.equal(mine, theirs)


# On 2 ranks a sum does not depend on where its entry lies in a message, so the bucket size is no
# part of the arithmetic of schemes that treat each parameter by itself.
@pytest.mark.parametrize("config", sorted(set(CONFIGS) - BY_BUCKET))
def test_resume_with_other_bucket_sizes_is_bit_equal(config, tmp_path):
    want = run_ranks(_uninterrupted, 2, config, SMALL)
    got = _killed_and_resumed(2, config, tmp_path, (SMALL,), (LARGE,))
    for rank in range(2):
        assert torch.equal(got[rank][0], want[rank][0])
        assert torch.equal(got[rank][1], want[rank][1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "config", "bucket_kb"),
    [(2, "batched", SMALL), (2, "batched", LARGE), (3, "powersgd", SMALL), (3, "powersgd", LARGE)],
)
def test_resume_with_buckets_that_matter_goes_on_alike(world_size, config, bucket_kb, tmp_path):
    want = run_ranks(_uninterrupted, world_size, config, SMALL)[0][0]
    got = _killed_and_resumed(world_size, config, tmp_path, (SMALL,), (bucket_kb,))
    assert equal_bits([weights for weights, _, _ in got])
    # Lossy in another way for eight steps, but along the same path.
    way = torch.linalg.vector_norm(want - parameters(mlp()))
    assert torch.linalg.vector_norm(got[0][0] - want) < 0.5 * way


def _loaded_in_training(rank: int, world_size: int, static_graph: bool) -> Tensor:
    found = []
    for _ in range(36):  # by chance an address comes again
        model = TorchDDP(mlp(), static_graph=static_graph)
        hook = commhooks.register(model, "fp16")
        for step in range(5):
            if step == 4:
                hook.load_state_dict(hook.state_dict())
            model.zero_grad()
            loss_of(model(batch(step, rank, 4, 16))).backward()
        found.append(gradients(model))
        hook.close()
    return torch.cat(found)


# torch rebuilds its buckets after one step or two, and their memory may lie where the old lay.
@pytest.mark.parametrize("static_graph", [False, True])
def test_the_saved_layout_is_that_of_the_buckets_that_were_rebuilt(static_graph):
    assert equal_bits(run_ranks(_loaded_in_training, 2, static_graph))


def _saved_at_once(rank: int, world_size: int, loads_at: int) -> None:
    """Loaded and saved again, before any step; saved by a run that was itself loaded once."""
    models = [TorchDDP(mlp(), bucket_cap_mb=0.001) for _ in range(2)]
    first, second = (commhooks.register(model, "random_k", seed=3) for model in models)
    for step in range(loads_at + 2):
        if step == 1:
            first.load_state_dict(first.state_dict())
        if step == loads_at:
            second.load_state_dict(first.state_dict())
            second.load_state_dict(second.state_dict())
        for model in models[: 2 if step >= loads_at else 1]:
            model.zero_grad()
            loss_of(model(batch(step, rank, 4, 16))).backward()
    assert torch.equal(*map(gradients, models))


# Until the step 3 the first run travels in the buckets that it was loaded with.
@pytest.mark.parametrize("loads_at", [3, 4, 6])
def test_a_state_that_is_loaded_and_saved_keeps_the_layout(loads_at):
    run_ranks(_saved_at_once, 2, loads_at)


def _saved_as_it_regroups(rank: int, world_size: int, static_graph: bool) -> None:
    """A run that goes on is saved and loaded while torch's buckets may not be its own yet."""
    for saved_after in range(4):
        options: dict[str, Any] = {"bucket_cap_mb": 0.001, "static_graph": static_graph}
        first, second = (TorchDDP(mlp(), **options) for _ in range(2))
        hook, again = (commhooks.register(model, "random_k") for model in (first, second))
        for step in range(8):
            if step == 3:
                again.load_state_dict(hook.state_dict())
            if step == 3 + saved_after:
                again.load_state_dict(again.state_dict())
            for model in [first, second][: 2 if step >= 3 else 1]:
                model.zero_grad()
                loss_of(model(batch(step, rank, 4, 16))).backward()
            if step >= 3:
                assert torch.equal(gradients(first), gradients(second)), (saved_after, step)
        for one in (hook, again):
            one.close()


@pytest.mark.parametrize("static_graph", [False, True])
def test_a_state_saved_as_regrouping_ends_has_the_next_steps_layout(static_graph):
    run_ranks(_saved_as_it_regroups, 2, static_graph)


def _laid_out_by_switch(rank: int, world_size: int) -> None:
    """Buckets that no other run would have by itself: a switch has laid them out anew."""

    def model() -> CoreDDP:
        return CoreDDP(mlp(), find_unused_parameters=True, bucket_cap_mb=0.003)

    first, second = model(), model()
    hook = commhooks.register(first, "powersgd", rank=1, layout="shape")
    for step in range(8):
        if step == 2:
            hook.switch("int8")
        if step == 4:
            again = commhooks.register(second, "powersgd", rank=1, layout="shape")
            again.switch("int8")
            again.load_state_dict(hook.state_dict())
        for one in [first, second][: 2 if step >= 4 else 1]:
            one.zero_grad()
            loss_of(one(batch(step, rank, 4, 16))).backward()
        if step >= 4:
            assert torch.equal(gradients(first), gradients(second)), step


def test_our_class_goes_on_with_the_saved_buckets():
    run_ranks(_laid_out_by_switch, 2)


def _laid_out_by_registration(rank: int, world_size: int) -> None:
    """Buckets that no order of arrival gives: one that is not full comes first."""

    def model() -> CoreDDP:
        torch.manual_seed(0)
        net = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
        return CoreDDP(net, find_unused_parameters=True, bucket_cap_mb=0.0015)

    first, second = model(), model()
    hook, again = (commhooks.register(one, "fp16", layout="shape") for one in (first, second))
    for step in range(3):
        loss_of(first(batch(step, rank, 4, 16))).backward()
    again.load_state_dict(hook.state_dict())
    loss_of(second(batch(3, rank, 4, 16))).backward()
    buckets = [[bucket.members for bucket in one.reducer.buckets] for one in (first, second)]
    assert buckets[0] == buckets[1] == [[4], [1, 3, 5], [0, 2]]


def test_our_class_goes_on_with_buckets_by_registration():
    run_ranks(_laid_out_by_registration, 2)


class _Reordered(torch.nn.Module):
    """Registered last first; every other step uses two layers in another order."""

    def __init__(self, *, skips: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.c, self.b, self.a = (torch.nn.Linear(16, 16) for _ in range(3))
        self.skips = skips

    def forward(self, x: Tensor, step: int) -> Tensor:
        if step % 2 == 0:
            return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))
        x = torch.tanh(self.b(x))
        return self.c(x) if self.skips else self.c(torch.tanh(self.a(x)))


SKIPS = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}


def _goes_on_laid_out(rank: int, world_size: int, options: dict[str, Any], how: str) -> None:
    first, second, other = (
        CoreDDP(_Reordered(skips="find_unused_parameters" in options), **options) for _ in range(3)
    )
    hook = commhooks.register(first, "random_k", ratio=0.2)
    elsewhere = commhooks.register(other, "random_k", ratio=0.2, layout="shape")
    for step in range(9):
        if step == 5:  # the first step of the run that goes on has the other order
            again = commhooks.register(second, "random_k", ratio=0.2)
            if how == "twice":
                again.load_state_dict(elsewhere.state_dict())
            state = hook.state_dict()
            if how == "old":  # as before the order of gradients was in the state
                part = state[f"rank{rank}"]
                del part["arrival"]
                part["checksum"] = checksum(state, part)
            again.load_state_dict(state)
        for one in (first, second if step >= 5 else other):
            one.zero_grad()
            loss_of(one(batch(step, rank, 4, 16), step)).backward()
        if step >= 5:
            assert torch.equal(gradients(first), gradients(second)), step


# The only bucket is the first step's, too; the last step before saving skipped a bucket; a second
# load takes the first one back.
@pytest.mark.parametrize(
    ("options", "how"),
    [
        ({}, "once"),
        ({**SKIPS, "bucket_cap_mb": 0.001}, "once"),
        ({"bucket_cap_mb": 0.0015}, "twice"),
        ({"bucket_cap_mb": 0.0015}, "old"),
    ],
)
def test_our_class_goes_on_in_the_saved_buckets(options, how):
    run_ranks(_goes_on_laid_out, 2, options, how)


def _switched_and_saved(rank: int, world_size: int, options: dict[str, Any]) -> None:
    """Asked for, but not laid out yet: PowerSGD asks for larger buckets than random_k."""
    first, second = (CoreDDP(_Reordered(skips=False), **options) for _ in range(2))
    hook = commhooks.register(first, "powersgd", rank=1)
    again = commhooks.register(second, "random_k", ratio=0.2)
    for step in range(6):
        if step == 3:
            hook.switch("random_k", ratio=0.2, error_feedback=True)
            again.switch("random_k", ratio=0.2, error_feedback=True)
            again.load_state_dict(hook.state_dict())
        for one in [first, second][: 2 if step >= 3 else 1]:
            one.zero_grad()
            loss_of(one(batch(step, rank, 4, 16), step)).backward()
        if step >= 3:
            pair = [[bucket.members for bucket in one.reducer.buckets] for one in (first, second)]
            assert pair[0] == pair[1], step
            assert torch.equal(gradients(first), gradients(second)), step


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}])
def test_buckets_that_a_switch_asked_for_come_after_loading_too(options):
    run_ranks(_switched_and_saved, 2, options, ignore_warnings=QUIET)


def _loaded_twice(rank: int, world_size: int, options: dict[str, Any], saved_at: int) -> None:
    """The first state's order of gradients is not the second's."""
    models = [CoreDDP(_Reordered(skips=False), bucket_cap_mb=0.0015, **options) for _ in range(3)]
    hooks = [commhooks.register(one, "random_k", ratio=0.2) for one in models]
    straight, other, late = models
    for step in range(4):
        loss_of(other(batch(step, rank, 4, 16), 1)).backward()
    for step in range(saved_at + 4):
        if step == saved_at:
            hooks[2].load_state_dict(hooks[1].state_dict())
            hooks[2].load_state_dict(hooks[0].state_dict())
        for one in [straight, late][: 2 if step >= saved_at else 1]:
            one.zero_grad()
            loss_of(one(batch(step, rank, 4, 16), 0)).backward()
        if step >= saved_at:
            assert torch.equal(gradients(straight), gradients(late)), step


@pytest.mark.parametrize("options", [{}, {"static_graph": True}])
@pytest.mark.parametrize("saved_at", [0, 1])
def test_the_last_state_that_is_loaded_decides(options, saved_at):
    run_ranks(_loaded_twice, 2, options, saved_at)


def _from_torchs_class(rank: int, world_size: int) -> None:
    models = [kind(mlp(), bucket_cap_mb=0.001) for kind in (TorchDDP, CoreDDP)]
    hooks = [commhooks.register(model, "random_k", ratio=0.2) for model in models]
    for step in range(7):
        if step == 4:
            hooks[1].load_state_dict(hooks[0].state_dict())
        for model in models[: 2 if step >= 4 else 1]:
            model.zero_grad()
            loss_of(model(batch(step, rank, 4, 16))).backward()
        if step >= 4:
            assert torch.equal(*map(gradients, models)), step


def test_our_class_goes_on_from_a_state_of_torchs():
    run_ranks(_from_torchs_class, 2)


def _pickled_and_saved(rank: int, world_size: int) -> None:
    model = TorchDDP(mlp(), bucket_cap_mb=0.001)
    hook = commhooks.register(model, "random_k")
    for step in range(3):
        loss_of(model(batch(step, rank, 4, 16))).backward()
    copied = pickle.loads(pickle.dumps(hook))
    layout = hook.state_dict()["layout"]
    assert len(layout) > 1
    assert copied.state_dict()["layout"] == layout


def test_a_pickled_state_that_is_saved_again_keeps_the_layout():
    run_ranks(_pickled_and_saved, 2)


def _laid_out_after_load(
    rank: int, world_size: int, options: dict[str, Any], loads_at: int, asks_at: int, apart: bool
) -> None:
    first, second = (
        CoreDDP(_Reordered(skips=False), bucket_cap_mb=0.0015, **options) for _ in range(2)
    )
    hook, again = (commhooks.register(one, "random_k", ratio=0.2) for one in (first, second))
    for step in range(loads_at + 3):
        if step == loads_at:
            again.load_state_dict(hook.state_dict(gather=True))
        for one in [first, second][: 2 if step >= loads_at else 1]:
            if step == asks_at:
                one.request_layout(lambda _, parameter: apart and parameter.dim())
            one.zero_grad()
            loss_of(one(batch(step, rank, 4, 16), step + rank)).backward()  # rank 0's decides
        if step >= loads_at:
            pair = [[bucket.members for bucket in one.reducer.buckets] for one in (first, second)]
            assert pair[0] == pair[1], step
            assert torch.equal(gradients(first), gradients(second)), step


# States of the first step; of a run whose buckets are not rebuilt by themselves; of one whose last
# order is not that by which they were rebuilt.
@pytest.mark.parametrize(
    ("options", "loads_at", "asks_at", "apart"),
    [
        ({}, 1, 2, True),
        ({"static_graph": True}, 1, 9, True),
        ({"find_unused_parameters": True}, 2, 2, True),
        ({}, 4, 5, True),
        ({}, 4, 4, False),  # the saved buckets would do, but are not what was asked for
    ],
)
def test_our_class_lays_out_by_the_saved_order_of_gradients(options, loads_at, asks_at, apart):
    job = (options, loads_at, asks_at, apart)
    run_ranks(_laid_out_after_load, 2, *job, ignore_warnings=QUIET)


class _Twice(torch.nn.Module):
    """Its last gradient is of the layer that has given the first part of one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.twice, self.between = (torch.nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad_()  # a recomputation without inputs that need a gradient has none itself
        for layer in (self.twice, self.between, self.twice):
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True))
        return x


def _static_graph_goes_on(rank: int, world_size: int) -> None:
    first, second = (CoreDDP(_Twice(), static_graph=True, bucket_cap_mb=0.0005) for _ in range(2))
    hook, again = (commhooks.register(one, "random_k", ratio=0.2) for one in (first, second))
    for step in range(4):
        if step == 1:
            again.load_state_dict(hook.state_dict())
        for one in [first, second][: 2 if step else 1]:
            one.zero_grad()
            loss_of(one(batch(step, rank, 4, 16))).backward()
    layouts = [hook.state_dict()["layout"], again.state_dict()["layout"]]
    assert layouts[0] == layouts[1]
    assert layouts[0][0][0].startswith("between")


def test_a_static_graph_that_goes_on_takes_gradients_when_they_are_complete():
    run_ranks(_static_graph_goes_on, 2)


def _loaded_then_switched(rank: int, world_size: int, coalesce: tuple[bool, bool]) -> None:
    """Entries of random_k follow the place in what travels, so a layout taken wrongly shows."""
    before, after = ({"ratio": 0.1, "coalesce": whether} for whether in coalesce)
    first, second = ddp(mlp(), SMALL), ddp(mlp(), SMALL)
    hook = commhooks.register(first, "random_k", **before)
    for step in range(6):
        if step == 3:
            again = commhooks.register(second, "random_k", **before)
            again.load_state_dict(hook.state_dict())
        if step == 4:
            hook.switch("random_k", **after)
            again.switch("random_k", **after)
        for one in [first, second][: 2 if step >= 3 else 1]:
            one.zero_grad()
            loss_of(one(batch(step, rank, 4, 16))).backward()
        if step >= 3:
            assert torch.equal(gradients(first), gradients(second)), step


@pytest.mark.parametrize("coalesce", [(False, True), (True, False)])
def test_a_loaded_state_switches_to_what_travels_together(coalesce):
    run_ranks(_loaded_then_switched, 2, coalesce)


def _loaded_before_it_is_set(rank: int, world_size: int, how: str) -> None:
    first, second = (CoreDDP(mlp(), bucket_cap_mb=0.0015) for _ in range(2))
    hook = commhooks.register(first, "random_k", ratio=0.3)
    for step in range(4):
        loss_of(first(batch(step, rank, 4, 16))).backward()
    if how == "pickled":
        again = pickle.loads(pickle.dumps(hook))
    else:
        again = commhooks.HookState("random_k", second, ratio=0.3)
        again.load_state_dict(hook.state_dict())
    second.register_comm_hook(again, commhooks.comm_hook)
    for step in range(4, 7):
        for one in (first, second):
            one.zero_grad()
            loss_of(one(batch(step, rank, 4, 16))).backward()
        assert torch.equal(gradients(first), gradients(second)), step
        pair = [[bucket.members for bucket in one.reducer.buckets] for one in (first, second)]
        assert pair[0] == pair[1], step


@pytest.mark.parametrize("how", ["loaded", "pickled"])
def test_a_state_that_is_loaded_before_its_hook_is_set_has_its_buckets(how):
    run_ranks(_loaded_before_it_is_set, 2, how)


def _set_on_another_model(rank: int, world_size: int, loses: bool) -> None:
    """The model that a hook was set on first is given up before any step."""
    first, second, third = (CoreDDP(mlp(), bucket_cap_mb=0.0015) for _ in range(3))
    hook = commhooks.register(first, "random_k")
    for step in range(3):
        loss_of(first(batch(step, rank, 4, 16))).backward()
    again = pickle.loads(pickle.dumps(hook))
    second.register_comm_hook(again, commhooks.comm_hook)
    if loses:
        del second
    else:
        second.remove_comm_hook()
    third.register_comm_hook(again, commhooks.comm_hook)
    first.zero_grad()
    for one in (first, third):
        loss_of(one(batch(3, rank, 4, 16))).backward()
    assert torch.equal(gradients(first), gradients(third))
    assert hook.state_dict()["layout"] == again.state_dict()["layout"]
    assert again.state_dict()["bucket_bytes"]


@pytest.mark.parametrize("loses", [True, False])
def test_a_hook_that_is_set_on_another_model_goes_on_there(loses):
    run_ranks(_set_on_another_model, 2, loses)


def _pickled_to_be_laid_out(rank: int, world_size: int) -> None:
    first, second = (CoreDDP(_Reordered(skips=False), bucket_cap_mb=0.0015) for _ in range(2))
    hook = commhooks.register(first, "random_k", ratio=0.2)
    for step in range(3):
        loss_of(first(batch(step, rank, 4, 16), step)).backward()
    first.request_layout(lambda _, parameter: parameter.dim())
    again = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(hook))))
    second.register_comm_hook(again, commhooks.comm_hook)
    second.request_layout(lambda _, parameter: parameter.dim())
    for step in range(3, 6):
        for one in (first, second):
            one.zero_grad()
            loss_of(one(batch(step, rank, 4, 16), step)).backward()
        assert torch.equal(gradients(first), gradients(second)), step


def test_a_pickled_state_whose_buckets_are_to_be_laid_out_has_the_order():
    run_ranks(_pickled_to_be_laid_out, 2)


def _loaded_within_a_step(rank: int, world_size: int) -> None:
    model = CoreDDP(mlp(), bucket_cap_mb=0.0015)
    hook = commhooks.register(model, "random_k")
    state = None
    for step in range(3):
        loss_of(model(batch(step, rank, 4, 16))).backward()
        state = hook.state_dict() if step == 1 else state
    loss = loss_of(model(batch(3, rank, 4, 16)))
    assert state is not None
    hook.load_state_dict(state)
    with pytest.raises(RuntimeError, match="between the forward pass and backward of step 3"):
        loss.backward()
    loss_of(model(batch(2, rank, 4, 16))).backward()
    assert hook.step == 3


def test_a_state_that_is_loaded_between_forward_and_backward_is_an_error():
    run_ranks(_loaded_within_a_step, 2)


class _Looked(_Reordered):
    """With an embedding of sparse gradients, which has a bucket of its own."""

    def __init__(self) -> None:
        super().__init__(skips=False)
        self.table = torch.nn.Embedding(8, 16, sparse=True)

    def forward(self, x: Tensor, step: int) -> Tensor:
        return super().forward(x + self.table(torch.arange(len(x))), step)


def _sparse_goes_on(rank: int, world_size: int) -> None:
    first, second = (CoreDDP(_Looked(), bucket_cap_mb=0.0015) for _ in range(2))
    hook, again = (commhooks.register(one, "random_k", ratio=0.2) for one in (first, second))
    for step in range(6):
        if step == 3:
            again.load_state_dict(hook.state_dict())
        for one in [first, second][: 2 if step >= 3 else 1]:
            one.zero_grad()
            loss_of(one(batch(step, rank, 4, 16), step)).backward()
    layouts = [one.state_dict()["layout"] for one in (hook, again)]
    assert len(layouts[0]) > 1
    assert layouts[0] == layouts[1]


def test_buckets_are_taken_up_beside_sparse_gradients():
    run_ranks(_sparse_goes_on, 2)


def _loaded_with_other_buckets(rank: int, world_size: int, kind: type[TorchDDP]) -> str:
    states = []
    for cap in (SMALL, LARGE):
        model = kind(mlp(), bucket_cap_mb=cap / 1024)
        hook = commhooks.register(model, "random_k")
        for step in range(3):
            loss_of(model(batch(step, rank, 4, 16))).backward()
        states.append(hook.state_dict())
    hook.load_state_dict(states[rank])
    with pytest.raises(commhooks.errors.MismatchError) as raised:
        loss_of(model(batch(3, rank, 4, 16))).backward()
    return str(raised.value)


@pytest.mark.parametrize("kind", [TorchDDP, CoreDDP])
def test_states_of_a_step_with_other_buckets_are_told_apart(kind):
    for text in run_ranks(_loaded_with_other_buckets, 2, kind):
        assert "order of the saved buckets differs between ranks" in text


def _renamed(rank: int, world_size: int) -> None:
    class Inside(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._orig_mod = _Reordered(skips=False)  # as torch.compile names it

        def forward(self, x: Tensor, step: int) -> Tensor:
            return self._orig_mod(x, step)

    first = CoreDDP(Inside(), bucket_cap_mb=0.0015)
    second = CoreDDP(_Reordered(skips=False), bucket_cap_mb=0.0015)
    hook, again = (commhooks.register(one, "random_k", ratio=0.2) for one in (first, second))
    for step in range(3):
        if step == 1:  # the order is known, buckets are not laid out by it yet
            again.load_state_dict(hook.state_dict())
        for one in [first, second][: 2 if step else 1]:
            one.zero_grad()
            loss_of(one(batch(step, rank, 4, 16), step)).backward()
    assert hook.state_dict()["layout"] == again.state_dict()["layout"]


def test_the_saved_order_of_gradients_is_by_plain_names():
    run_ranks(_renamed, 2)


def _differently_loaded(rank: int, world_size: int, kind: type[TorchDDP]) -> str:
    module = mlp()
    module.register_buffer("count", torch.zeros(300))  # synchronised before the gradients are
    model = kind(module, bucket_cap_mb=0.001)
    hook = commhooks.register(model, "random_k")
    states = []
    for step in range(2):
        loss_of(model(batch(step, rank, 4, 16))).backward()
        states.append(hook.state_dict())
    hook.load_state_dict(states[rank])
    with pytest.raises(commhooks.errors.MismatchError) as raised:
        loss_of(model(batch(2, rank, 4, 16))).backward()
    return str(raised.value)


@pytest.mark.parametrize("kind", [TorchDDP, CoreDDP])
def test_states_of_different_steps_are_told_apart_at_the_next_step(kind):
    for text in run_ranks(_differently_loaded, 2, kind):
        assert "step differs between ranks: rank 0 has 1, rank 1 has 2" in text


def _loaded_on_one_rank(rank: int, world_size: int) -> str:
    model = CoreDDP(mlp())
    hook = commhooks.register(model, "random_k")
    for step in range(3):
        loss_of(model(batch(step, rank, 4, 16))).backward()
    if rank == 1:
        hook.load_state_dict(hook.state_dict())
    with pytest.raises(
        (commhooks.errors.MissingRankError, commhooks.errors.CollectiveError)
    ) as raised:
        loss_of(model(batch(3, rank, 4, 16))).backward()
    return f"{raised.type.__name__}: {raised.value}"


def test_a_state_that_one_rank_has_loaded_names_the_others():
    text = run_ranks(_loaded_on_one_rank, 2, pg_timeout=2)[1]
    assert text.startswith("MissingRankError")
    assert "rank 0" in text


# ---- another number of ranks


def _save_all(rank: int, world_size: int, config: str, directory: str) -> Tensor:
    run = _Run(rank, config)
    run.steps(0, 20)
    torch.save(run.state(), _path(directory, rank))
    return residuals(run.hook, run.model)


def _load_all(
    rank: int, world_size: int, config: str, directory: str, saved_ranks: int
) -> tuple[Tensor, Tensor, int]:
    states = [torch.load(_path(directory, saved)) for saved in range(saved_ranks)]
    run = _Run(rank, config)
    run.load(states[0], [state["hook"] for state in states])
    held, step = residuals(run.hook, run.model), run.hook.step
    run.steps(20, 25)
    return held, parameters(run.model), step


@pytest.mark.parametrize(
    ("config", "saved_ranks", "ranks"),
    [("powersgd", 4, 2), ("powersgd", 2, 3), ("batched", 3, 2), ("fp16-feedback", 2, 4)],
)
def test_other_world_size_keeps_the_mean_of_residuals(config, saved_ranks, ranks, tmp_path):
    before = torch.stack(run_ranks(_save_all, saved_ranks, config, str(tmp_path)))
    loaded = run_ranks(_load_all, ranks, config, str(tmp_path), saved_ranks)
    after = torch.stack([held for held, _, _ in loaded])
    assert before.abs().max() > 0
    # Scaled, and added up in float32 in another order: at most two roundings per rank.
    bound = 2 * saved_ranks * 2.0**-24 * float(before.abs().max())
    torch.testing.assert_close(after.mean(0), before.mean(0), rtol=0, atol=bound)
    assert [step for _, _, step in loaded] == [20] * ranks
    assert equal_bits([weights for _, weights, _ in loaded])


def _switched_states(rank: int, world_size: int) -> Any:
    model = ddp(mlp(), SMALL)
    hook = commhooks.register(model, "topk", ratio=0.1)
    loss_of(model(batch(0, rank, 4, 16))).backward()
    hook.switch("none")
    return hook.state_dict()


def _goes_on_with_more(rank: int, world_size: int, states: list[Any]) -> None:
    model = ddp(mlp(), SMALL)
    hook = commhooks.register(model, "none")
    hook.load_state_dict(states)
    loss_of(model(batch(1, rank, 4, 16))).backward()
    assert hook.step == 2
    assert hook.state_dict(gather=True)["scheme"] == "Dense()"


def test_a_rank_that_has_nothing_to_flush_is_no_mismatch():
    states = run_ranks(_switched_states, 2)
    run_ranks(_goes_on_with_more, 3, states)


def _load_own_on_fewer(rank: int, world_size: int, directory: str) -> Any:
    run = _Run(rank, "powersgd")
    run.steps(0, 2)
    before = run.everything()
    error = outcome(run.hook.load_state_dict, torch.load(_path(directory, rank))["hook"])
    return error, all(map(torch.equal, before, run.everything())), run.hook.step


def test_one_state_of_four_on_two_ranks_is_an_error_that_changes_nothing(tmp_path):
    run_ranks(_save_all, 4, "powersgd", str(tmp_path))
    for error, unchanged, step in run_ranks(_load_own_on_fewer, 2, str(tmp_path)):
        assert error[0] == "CheckpointError"
        assert "saved on 4 ranks, loaded on 2" in error[1]
        assert unchanged
        assert step == 2


def _load_rank_zeros(rank: int, world_size: int, directory: str) -> Any:
    run = _Run(rank, "powersgd")
    return outcome(run.hook.load_state_dict, torch.load(_path(directory, 0))["hook"])


def test_rank_zeros_state_on_every_rank_is_an_error(tmp_path):
    run_ranks(_save_all, 2, "powersgd", str(tmp_path))
    mine, other = run_ranks(_load_rank_zeros, 2, str(tmp_path))
    assert mine is None
    assert other[0] == "CheckpointError"
    assert "this is rank 1, the state given is of rank 0" in other[1]


# ---- formats


def _through_safetensors(run: _Run, directory: str) -> dict[str, Any]:
    import safetensors
    import safetensors.torch

    path = Path(directory, f"rank{run.rank}.safetensors")
    tensors, metadata = commhooks.checkpoint.flatten_state(run.hook.state_dict())
    safetensors.torch.save_file(tensors, path, metadata)
    with safetensors.safe_open(path, "pt") as file:
        loaded = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        return commhooks.checkpoint.unflatten_state(loaded, file.metadata())


def _through_torch(run: _Run, directory: str) -> dict[str, Any]:
    torch.save({"hook": run.hook.state_dict()}, _path(directory, run.rank))
    state: dict[str, Any] = torch.load(_path(directory, run.rank), weights_only=True)["hook"]
    return state


def _through_dcp(run: _Run, directory: str) -> dict[str, Any]:
    dcp.save({"hook": run.hook.state_dict()}, checkpoint_id=directory)
    fresh = _Run(run.rank, "powersgd")
    state = {"hook": fresh.hook.state_dict()}
    dcp.load(state, checkpoint_id=directory)
    return state["hook"]


def _between_classes(rank: int, world_size: int, directory: str) -> list[int]:
    steps = []
    for number, kinds in enumerate([(TorchDDP, CoreDDP), (CoreDDP, TorchDDP)]):
        models = [kind(mlp()) for kind in kinds]
        hooks = [commhooks.register(model, "powersgd") for model in models]
        loss_of(models[0](batch(0, rank, 4, 16))).backward()
        dcp.save({"hook": hooks[0]}, checkpoint_id=f"{directory}/{number}")
        dcp.load({"hook": hooks[1]}, checkpoint_id=f"{directory}/{number}")
        steps.append(hooks[1].step)
    return steps


def test_either_class_loads_what_the_other_has_saved(tmp_path):
    steps = run_ranks(_between_classes, 2, str(tmp_path), ignore_warnings=(".*",))
    assert steps == [[1, 1], [1, 1]]


FORMATS = {"torch": _through_torch, "safetensors": _through_safetensors, "dcp": _through_dcp}


def _through_format(rank: int, world_size: int, name: str, directory: str) -> Any:
    run = _Run(rank, "powersgd")
    run.steps(0, 5)
    loaded = FORMATS[name](run, directory)
    resumed = _Run(rank, "powersgd")
    resumed.load({**run.state(), "hook": loaded})
    held = residuals(resumed.hook, resumed.model)
    same = torch.equal(held, residuals(run.hook, run.model))
    for one in (run, resumed):
        one.steps(5, 10)
    return held, same, torch.equal(parameters(run.model), parameters(resumed.model))


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_keeps_each_ranks_own_residuals(name, tmp_path):
    # dcp's own remarks about its planner and process group.
    results = run_ranks(_through_format, 2, name, str(tmp_path), ignore_warnings=(".*",))
    assert [(same, continued) for _, same, continued in results] == [(True, True)] * 2
    assert not torch.equal(results[0][0], results[1][0])


# ---- memory formats


def _conv_residual(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    held = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        conv = torch.nn.Conv2d(8, 16, 3).to(memory_format=memory_format)
        model = ddp(conv)
        # Rounding of each entry by itself: the same in either order.
        hook = commhooks.register(model, "fp16", error_feedback=True)
        model(batch(0, rank, 2, 8, 6, 6)).square().mean().backward()
        (state,) = (part for key, part in hook.state_dict().items() if key == f"rank{rank}")
        saved = state["memory"]["residual"]["weight"]
        assert torch.equal(saved, hook.residual("weight"))
        held.append(saved)
    return held[0], held[1]


def test_a_channels_last_residual_is_saved_in_the_order_of_the_parameters_dimensions():
    for plain, channels_last in run_ranks(_conv_residual, 2, ignore_warnings=("Grad strides",)):
        assert plain.shape == channels_last.shape
        # The two convolutions may round differently, and then so does the cast; not permuted.
        agree = (plain - channels_last).abs() <= 1e-6
        assert agree.double().mean() > 0.9


def _channels_last_resume(rank: int, world_size: int) -> bool:
    def build():
        torch.manual_seed(0)
        conv = torch.nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last)
        model = ddp(conv)
        return model, commhooks.register(model, "powersgd", rank=2)

    def step(model, number):
        model.zero_grad()
        model(batch(number, rank, 2, 8, 6, 6)).square().mean().backward()

    (model, hook), (other, resumed) = build(), build()
    step(model, 0)
    resumed.load_state_dict(hook.state_dict())
    for number in range(1, 4):
        step(model, number)
        step(other, number)
    return torch.equal(model.module.weight.grad, other.module.weight.grad)


def test_a_channels_last_model_resumes_bit_for_bit():
    assert run_ranks(_channels_last_resume, 2, ignore_warnings=("Grad strides",)) == [True, True]


def _sum_after_load(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """Applied plus residual over a save and load, and the true sum."""
    run = _Run(rank, "powersgd")
    run.optimizer.param_groups[0]["lr"] = 0.0
    total = torch.zeros(())
    for step in range(3):
        run.steps(step, step + 1)
        total = total + torch.cat([p.grad.reshape(-1) for p in run.model.parameters()]).double()
    saved = run.hook.state_dict()
    run.hook.load_state_dict(saved)
    local = mlp()
    for step in range(3):
        x = batch(step, rank, 8, 16)
        (local(x) - x.roll(1, 1)).square().mean().backward()
    wanted = torch.cat([p.grad.reshape(-1) for p in local.parameters()]).double()
    return total + averaged(residuals(run.hook, run.model)), averaged(wanted)


def test_loading_in_place_loses_nothing():
    got, want = run_ranks(_sum_after_load, 2)[0]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * float(want.abs().max()))


# ---- layers frozen between saving and loading


def _frozen_for_a_while(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    first = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    module = torch.nn.Sequential(first, torch.nn.Tanh(), torch.nn.Conv2d(8, 4, 3))

    def trained_on(state):
        model = ddp(module)
        hook = commhooks.register(model, "powersgd")
        if state is not None:
            hook.load_state_dict(state)
            assert torch.equal(hook.residual("0.weight"), left)
        model(batch(0, rank, 2, 3, 9, 9)).square().mean().backward()
        return hook

    hook = trained_on(None)
    left = hook.residual("0.weight")
    assert left.shape == first.weight.shape
    assert left.any()
    first.requires_grad_(False)
    hook = trained_on(hook.state_dict(gather=True))
    assert torch.equal(hook.residual("0.weight"), left)
    first.requires_grad_(True)
    hook = trained_on(hook.state_dict(gather=True))
    assert not torch.equal(hook.residual("0.weight"), left)


def test_a_layer_that_is_frozen_for_a_while_keeps_its_memory():
    run_ranks(_frozen_for_a_while, 2, ignore_warnings=("Grad strides",))
