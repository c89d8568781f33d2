"""Buckets of a saved run are those of a run that goes on: until torch forms its own, or for good.

torch's DDP forms its buckets anew after a process's first step (a static graph's second one), by
the order in which gradients came. Until then a resumed run exchanges its parameters in the saved
run's buckets, see docs/design/steps.md. Entries that random_k sends follow their place in a bucket,
so that a layout taken wrongly shows in the gradients.
"""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import commhooks
from ddp_core import DistributedDataParallel as CoreDDP
from tests.tools.harness import on_ranks, run_ranks
from tests.tools.models import loss_of
from tests.tools.training import batch, equal_bits, gradients, mlp, sealed

SMALL, SEVERAL = 0.001, 0.0015  # MiB a bucket: one or two of the matrices below
QUIET = ("find_unused",)  # DDP remarks that all parameters are used


class Reordered(nn.Module):
    """Registered last first; every other step uses two layers in another order."""

    def __init__(self, *, skips: bool = False, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.c, self.b, self.a = (nn.Linear(16, 16) for _ in range(3))
        # Sparse gradients have a bucket of their own.
        self.table = nn.Embedding(8, 16, sparse=True) if sparse else None
        self.skips = skips

    def forward(self, inputs: Tensor, step: int) -> Tensor:
        if self.table is not None:
            inputs = inputs + self.table(torch.arange(len(inputs)))
        if step % 2 == 0:
            return self.c(torch.tanh(self.b(torch.tanh(self.a(inputs)))))
        inputs = torch.tanh(self.b(inputs))
        return self.c(inputs) if self.skips else self.c(torch.tanh(self.a(inputs)))


class Renamed(nn.Module):
    """Has the names that torch.compile gives."""

    def __init__(self) -> None:
        super().__init__()
        self._orig_mod = Reordered()

    def forward(self, inputs: Tensor, step: int) -> Tensor:
        return self._orig_mod(inputs, step)


def members(model: CoreDDP) -> list[list[int]]:
    return [bucket.members for bucket in model.reducer.buckets]


def train_alike(steps: range, rank: int, *models: Any, order: int | None = None) -> None:
    """Each step on each model; asserts that all get the gradients of the first."""
    for step in steps:
        for model in models:
            model.zero_grad()
            reordered = isinstance(model.module, (Reordered, Renamed))
            ways = [step if order is None else order] if reordered else []
            loss_of(model(batch(step, rank, 4, 16), *ways)).backward()
        for model in models[1:]:
            assert torch.equal(gradients(models[0]), gradients(model)), step
            if isinstance(models[0], CoreDDP) and isinstance(model, CoreDDP):
                assert members(models[0]) == members(model), step


def reordered(rank: int = 0, **options: Any) -> CoreDDP:
    skips = "skip_all_reduce_unused_params" in options
    return CoreDDP(Reordered(skips=skips), **{"bucket_cap_mb": SEVERAL, **options})


def random_k(model: nn.Module, **options: Any) -> commhooks.HookState:
    return commhooks.register(model, "random_k", **{"ratio": 0.2, **options})


def goes_on(rank: int, first: Any, second: Any, at: int, until: int, **options: Any) -> list[Any]:
    """Loads the state of the first model into a hook of the second; returns both hooks."""
    hooks = [random_k(model, **options) for model in (first, second)]
    train_alike(range(at), rank, first)
    hooks[1].load_state_dict(hooks[0].state_dict())
    train_alike(range(at, until), rank, first, second)
    return hooks


# ---- torch's class


def _loaded_in_training(rank: int, world_size: int) -> list[Tensor]:
    return [
        torch.cat([_loads_its_own_state(rank, static_graph) for _ in range(36)])
        for static_graph in (False, True)
    ]  # by chance an address comes again


def _loads_its_own_state(rank: int, static_graph: bool) -> Tensor:
    model = TorchDDP(mlp(), static_graph=static_graph)
    hook = commhooks.register(model, "fp16")
    train_alike(range(4), rank, model)
    hook.load_state_dict(hook.state_dict())
    train_alike(range(4, 5), rank, model)
    hook.close()
    return gradients(model)


# torch rebuilds its buckets after one step or two, and their memory may lie where the old lay.
def test_the_saved_layout_is_that_of_the_buckets_that_were_rebuilt() -> None:
    for of_ranks in zip(*run_ranks(_loaded_in_training, 2), strict=True):
        assert equal_bits(list(of_ranks))


@on_ranks(2)
def test_a_state_that_is_loaded_and_saved_keeps_the_layout(rank: int) -> None:
    """Loaded and saved again, before any step; saved by a run that was itself loaded once."""
    for loads_at in (3, 4, 6):  # until the step 3 the first run travels in the loaded buckets
        first, second = (TorchDDP(mlp(), bucket_cap_mb=SMALL) for _ in range(2))
        hook, resumed = random_k(first, seed=3), random_k(second, seed=3)
        train_alike(range(1), rank, first)
        hook.load_state_dict(hook.state_dict())
        train_alike(range(1, loads_at), rank, first)
        resumed.load_state_dict(hook.state_dict())
        resumed.load_state_dict(resumed.state_dict())
        train_alike(range(loads_at, loads_at + 2), rank, first, second)


@pytest.mark.parametrize("static_graph", [False, True])
@on_ranks(2)
def test_a_state_saved_as_regrouping_ends_has_the_next_steps_layout(
    rank: int, static_graph: bool
) -> None:
    """A run that goes on is saved and loaded while torch's buckets may not be its own yet."""
    options: dict[str, Any] = {"bucket_cap_mb": SMALL, "static_graph": static_graph}
    for saved_after in range(4):
        first, second = (TorchDDP(mlp(), **options) for _ in range(2))
        hook, resumed = (commhooks.register(model, "random_k") for model in (first, second))
        train_alike(range(3), rank, first)
        resumed.load_state_dict(hook.state_dict())
        train_alike(range(3, 3 + saved_after), rank, first, second)
        resumed.load_state_dict(resumed.state_dict())
        train_alike(range(3 + saved_after, 8), rank, first, second)
        hook.close()
        resumed.close()


@on_ranks(2)
def test_a_pickled_state_that_is_saved_again_keeps_the_layout(rank: int) -> None:
    model = TorchDDP(mlp(), bucket_cap_mb=SMALL)
    hook = commhooks.register(model, "random_k")
    train_alike(range(3), rank, model)
    layout = hook.state_dict()["layout"]
    assert len(layout) > 1
    assert pickle.loads(pickle.dumps(hook)).state_dict()["layout"] == layout


# ---- our class begins with the saved buckets


def _laid_out_by_switch(rank: int, world_size: int) -> None:
    """Buckets that no other run would have by itself: a switch has laid them out anew."""
    options: dict[str, Any] = {"find_unused_parameters": True, "bucket_cap_mb": 0.003}
    first, second = CoreDDP(mlp(), **options), CoreDDP(mlp(), **options)
    hook = commhooks.register(first, "powersgd", rank=1, layout="shape")
    train_alike(range(2), rank, first)
    hook.switch("int8")
    train_alike(range(2, 4), rank, first)
    resumed = commhooks.register(second, "powersgd", rank=1, layout="shape")
    resumed.switch("int8")
    resumed.load_state_dict(hook.state_dict())
    train_alike(range(4, 8), rank, first, second)


def _laid_out_by_registration(rank: int, world_size: int) -> None:
    """Buckets that no order of arrival gives: one that is not full comes first."""

    def build() -> CoreDDP:
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
        return CoreDDP(net, find_unused_parameters=True, bucket_cap_mb=SEVERAL)

    first, second = build(), build()
    hook, resumed = (commhooks.register(model, "fp16", layout="shape") for model in (first, second))
    train_alike(range(3), rank, first)
    resumed.load_state_dict(hook.state_dict())
    train_alike(range(3, 4), rank, second)
    assert members(first) == members(second) == [[4], [1, 3, 5], [0, 2]]


@pytest.mark.parametrize("laid_out", [_laid_out_by_switch, _laid_out_by_registration])
def test_our_class_goes_on_with_buckets_of_a_layout(laid_out: Any) -> None:
    run_ranks(laid_out, 2)


SKIPS = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
# The only bucket is the first step's, too; the last step before saving skipped a bucket; a second
# load takes the first one back; as before the order of gradients was in the state.
SAVED: list[tuple[dict[str, Any], str]] = [
    ({"bucket_cap_mb": 25}, "once"),
    ({**SKIPS, "bucket_cap_mb": SMALL}, "once"),
    ({}, "twice"),
    ({}, "old"),
]


@on_ranks(2)
def test_our_class_goes_on_in_the_saved_buckets(rank: int) -> None:
    for options, how in SAVED:
        first, second, other = (reordered(**options) for _ in range(3))
        hook, elsewhere = random_k(first), random_k(other, layout="shape")
        train_alike(range(5), rank, first)
        train_alike(range(5), rank, other)
        resumed = random_k(second)
        if how == "twice":
            resumed.load_state_dict(elsewhere.state_dict())
        state = hook.state_dict()
        if how == "old":
            del state[f"rank{rank}"]["arrival"]
            sealed(state)
        resumed.load_state_dict(state)
        # The first step of the run that goes on has the other order.
        train_alike(range(5, 9), rank, first, second)


@on_ranks(2, ignore_warnings=QUIET)
def test_buckets_that_a_switch_asked_for_come_after_loading_too(rank: int) -> None:
    """Asked for, but not laid out yet: PowerSGD asks for larger buckets than random_k."""
    for options in ({}, {"find_unused_parameters": True}):
        first, second = (CoreDDP(Reordered(), **options) for _ in range(2))
        hook = commhooks.register(first, "powersgd", rank=1)
        resumed = random_k(second)
        train_alike(range(3), rank, first)
        for state in (hook, resumed):
            state.switch("random_k", ratio=0.2, error_feedback=True)
        resumed.load_state_dict(hook.state_dict())
        train_alike(range(3, 6), rank, first, second)


@on_ranks(2)
def test_the_last_state_that_is_loaded_decides(rank: int) -> None:
    """The first state's order of gradients is not the second's."""
    for static_graph in (False, True):
        for saved_at in (0, 1):
            straight, other, late = models = [
                reordered(static_graph=static_graph) for _ in range(3)
            ]
            hooks = [random_k(model) for model in models]
            train_alike(range(4), rank, other, order=1)
            train_alike(range(saved_at), rank, straight, order=0)
            hooks[2].load_state_dict(hooks[1].state_dict())
            hooks[2].load_state_dict(hooks[0].state_dict())
            train_alike(range(saved_at, saved_at + 4), rank, straight, late, order=0)


@on_ranks(2)
def test_our_class_goes_on_from_a_state_of_torchs(rank: int) -> None:
    goes_on(rank, *(kind(mlp(), bucket_cap_mb=SMALL) for kind in (TorchDDP, CoreDDP)), 4, 7)


# States of the first step; of a run whose buckets are not rebuilt by themselves; of one whose last
# order is not that by which they were rebuilt.
ORDERS: list[tuple[dict[str, Any], int, int, bool]] = [
    ({}, 1, 2, True),
    ({"static_graph": True}, 1, 9, True),
    ({"find_unused_parameters": True}, 2, 2, True),
    ({}, 4, 5, True),
    ({}, 4, 4, False),  # the saved buckets would do, but are not what was asked for
]


@on_ranks(2, ignore_warnings=QUIET)
def test_our_class_lays_out_by_the_saved_order_of_gradients(rank: int) -> None:
    for options, loads_at, asks_at, apart in ORDERS:

        def layout(_: str, parameter: Tensor, apart: bool = apart) -> Any:
            return apart and parameter.dim()

        first, second = reordered(**options), reordered(**options)
        hook, resumed = random_k(first), random_k(second)
        for step in range(loads_at + 3):
            models = [first] if step < loads_at else [first, second]
            if step == loads_at:
                resumed.load_state_dict(hook.state_dict(gather=True))
            if step == asks_at:
                for model in models:
                    model.request_layout(layout)
            train_alike(range(step, step + 1), rank, *models, order=step + rank)  # rank 0's decides


class _Twice(nn.Module):
    """A model whose last gradient is of the layer that has given the first part of one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.twice, self.between = (nn.Linear(16, 16) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        # A recomputation without inputs that need a gradient has none itself.
        inputs.requires_grad_()
        for layer in (self.twice, self.between, self.twice):
            inputs = torch.tanh(checkpoint(layer, inputs, use_reentrant=True))
        return inputs


@on_ranks(2)
def test_a_static_graph_that_goes_on_takes_gradients_when_they_are_complete(rank: int) -> None:
    first, second = (CoreDDP(_Twice(), static_graph=True, bucket_cap_mb=0.0005) for _ in range(2))
    hooks = goes_on(rank, first, second, 1, 4)
    layouts = [hook.state_dict()["layout"] for hook in hooks]
    assert layouts[0] == layouts[1]
    assert layouts[0][0][0].startswith("between")


@on_ranks(2)
def test_buckets_are_taken_up_beside_sparse_gradients_and_by_plain_names(rank: int) -> None:
    # By plain names, once the order is known and buckets are not laid out by it yet.
    for saved_at, modules in (
        (3, (Reordered(sparse=True), Reordered(sparse=True))),
        (1, (Renamed(), Reordered())),
    ):
        first, second = (CoreDDP(module, bucket_cap_mb=SEVERAL) for module in modules)
        hook, resumed = random_k(first), random_k(second)
        train_alike(range(saved_at), rank, first)
        resumed.load_state_dict(hook.state_dict())
        for step in range(saved_at, saved_at + 3):
            train_alike(range(step, step + 1), rank, first)
            train_alike(range(step, step + 1), rank, second)
        layouts = [state.state_dict()["layout"] for state in (hook, resumed)]
        assert len(layouts[0]) > 1
        assert layouts[0] == layouts[1]


# ---- states that are switched, pickled or set elsewhere before their first step


@on_ranks(2)
def test_a_loaded_state_switches_to_what_travels_together(rank: int) -> None:
    for before, after in ((False, True), (True, False)):
        first, second = (TorchDDP(mlp(), bucket_cap_mb=2.0 / 1024) for _ in range(2))
        for hook in goes_on(rank, first, second, 3, 4, ratio=0.1, coalesce=before):
            hook.switch("random_k", ratio=0.1, coalesce=after)
        train_alike(range(4, 6), rank, first, second)


@on_ranks(2)
def test_a_state_that_is_loaded_before_its_hook_is_set_has_its_buckets(rank: int) -> None:
    for how in ("loaded", "pickled"):
        first, second = (CoreDDP(mlp(), bucket_cap_mb=SEVERAL) for _ in range(2))
        hook = random_k(first, ratio=0.3)
        train_alike(range(4), rank, first)
        resumed = pickle.loads(pickle.dumps(hook))
        if how == "loaded":
            resumed = commhooks.HookState("random_k", second, ratio=0.3)
            resumed.load_state_dict(hook.state_dict())
        second.register_comm_hook(resumed, commhooks.comm_hook)
        train_alike(range(4, 7), rank, first, second)


@on_ranks(2)
def test_a_hook_that_is_set_on_another_model_goes_on_there(rank: int) -> None:
    """The model that a hook was set on first is given up before any step."""
    for loses in (True, False):
        first, second, third = (CoreDDP(mlp(), bucket_cap_mb=SEVERAL) for _ in range(3))
        hook = commhooks.register(first, "random_k")
        train_alike(range(3), rank, first)
        resumed = pickle.loads(pickle.dumps(hook))
        second.register_comm_hook(resumed, commhooks.comm_hook)
        if loses:
            del second
        else:
            second.remove_comm_hook()
        third.register_comm_hook(resumed, commhooks.comm_hook)
        train_alike(range(3, 4), rank, first, third)
        assert hook.state_dict()["layout"] == resumed.state_dict()["layout"]
        assert resumed.state_dict()["bucket_bytes"]


@on_ranks(2)
def test_a_pickled_state_whose_buckets_are_to_be_laid_out_has_the_order(rank: int) -> None:
    first, second = reordered(), reordered()
    hook = random_k(first)
    train_alike(range(3), rank, first)
    first.request_layout(lambda _, parameter: parameter.dim())
    resumed = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(hook))))
    second.register_comm_hook(resumed, commhooks.comm_hook)
    second.request_layout(lambda _, parameter: parameter.dim())
    train_alike(range(3, 6), rank, first, second)


# ---- states that ranks cannot go on from together


@on_ranks(2)
def test_a_state_that_is_loaded_between_forward_and_backward_is_an_error(rank: int) -> None:
    model = CoreDDP(mlp(), bucket_cap_mb=SEVERAL)
    hook = commhooks.register(model, "random_k")
    train_alike(range(2), rank, model)
    state = hook.state_dict()
    train_alike(range(2, 3), rank, model)
    loss = loss_of(model(batch(3, rank, 4, 16)))
    hook.load_state_dict(state)
    with pytest.raises(RuntimeError, match="between the forward pass and backward of step 3"):
        loss.backward()
    train_alike(range(2, 3), rank, model)
    assert hook.step == 3


@pytest.mark.parametrize("kind", [TorchDDP, CoreDDP])
@on_ranks(2)
def test_states_of_other_buckets_or_steps_are_distinguished_at_the_next_step(
    rank: int, kind: type[TorchDDP]
) -> None:
    other_buckets, other_steps = [], []
    for size in (2.0 / 1024, 4.0 / 1024):
        first = kind(mlp(), bucket_cap_mb=size)
        hook = commhooks.register(first, "random_k")
        train_alike(range(3), rank, first)
        other_buckets.append(hook.state_dict())
    module = mlp()
    module.register_buffer("count", torch.zeros(300))  # synchronised before the gradients are
    second = kind(module, bucket_cap_mb=SMALL)
    again = commhooks.register(second, "random_k")
    for step in range(2):
        train_alike(range(step, step + 1), rank, second)
        other_steps.append(again.state_dict())
    for model, state, states, text in (
        (first, hook, other_buckets, "order of the saved buckets differs between ranks"),
        (second, again, other_steps, "step differs between ranks: rank 0 has 1, rank 1 has 2"),
    ):
        state.load_state_dict(states[rank])
        with pytest.raises(commhooks.errors.MismatchError, match=text):
            train_alike(range(3, 4), rank, model)


def _loaded_on_one_rank(rank: int, world_size: int) -> str:
    model = CoreDDP(mlp())
    hook = commhooks.register(model, "random_k")
    train_alike(range(3), rank, model)
    if rank == 1:
        hook.load_state_dict(hook.state_dict())
    with pytest.raises(
        (commhooks.errors.MissingRankError, commhooks.errors.CollectiveError)
    ) as raised:
        train_alike(range(3, 4), rank, model)
    return f"{raised.type.__name__}: {raised.value}"


def test_a_state_that_one_rank_has_loaded_names_the_others() -> None:
    text = run_ranks(_loaded_on_one_rank, 2, pg_timeout=2)[1]
    assert text.startswith("MissingRankError")
    assert "rank 0" in text
