"""Optimizers sharded over ranks (ZeRO-1): bits of plain training, equal ranks, memory, saving."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import weakref
from collections.abc import Collection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import commhooks
from commhooks.errors import CheckpointError, Error, MismatchError, RegistrationError
from commhooks.zero import ZeroOptimizer
from commhooks.zero._optimizer import check_elementwise
from commhooks.zero._saving import home_of
from ddp_core import DistributedDataParallel, MixedPrecision
from tests.device.device_cases import default_dtype
from tests.fsdp.test_fsdp2 import Elsewhere
from tests.tools.harness import run_ranks

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2}),
    "sgd": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3}),
}
GATHERS = ("none", "bf16", "fp16", "int8", "int4", "fp8", "onebit", "eden", "topk")
ADAM = OPTIMIZERS["adamw"]


def model_of(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Returns layers of odd sizes, some of which lie in two shards."""
    torch.manual_seed(0)
    sizes = (33, 65, 64, 7)
    layers = [[nn.Linear(a, b), nn.Tanh()] for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*itertools.chain(*layers)).to(dtype)


def wrapped(module: nn.Module, **options: Any) -> DistributedDataParallel:
    """Returns the module in several small buckets."""
    return DistributedDataParallel(module, **{"bucket_cap_mb": 0.01, **options})


def inputs_of(step: int, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 33, generator=generator).to(dtype)


def backward(model: nn.Module, step: int, rank: int) -> None:
    dtype = next(model.parameters()).dtype
    model(inputs_of(step, rank, dtype)).float().square().mean().backward()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, first: int, steps: int
) -> None:
    for step in range(first, first + steps):
        backward(model, step, rank)
        optimizer.step()
        optimizer.zero_grad()


def values(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def agree(model: nn.Module) -> None:
    """Asserts that all ranks have the same bits."""
    for own in values(model):
        first = own.clone()
        dist.broadcast(first, 0)
        assert torch.equal(own.view(torch.uint8), first.view(torch.uint8))


def same(left: nn.Module, right: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(values(left), values(right), strict=True))


# ---- the bits of plain training


def _plain_bits(rank: int, world_size: int, name: str, in_backward: bool, view: bool) -> None:
    kind, settings = OPTIMIZERS[name]
    plain, ours = (wrapped(model_of(), gradient_as_bucket_view=view) for _ in range(2))
    zero = ZeroOptimizer(ours, kind, in_backward=in_backward, **settings)
    train(plain, kind(plain.parameters(), **settings), rank, 0, 5)
    train(ours, zero, rank, 0, 5)
    assert len(ours.reducer.buckets) > 1
    agree(ours)
    if world_size == 2:
        assert same(plain, ours)
    for one, other in zip(values(plain), values(ours), strict=True):  # the order of the sum
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_ranks_have_the_bits_of_plain_training(name: str, in_backward: bool) -> None:
    run_ranks(_plain_bits, 2, name, in_backward, name == "sgd")


@pytest.mark.parametrize("world_size", [1, 3])
def test_other_ranks_train_as_without_shards(world_size: int) -> None:
    run_ranks(_plain_bits, world_size, "adamw", False, False)


def _own_memory(rank: int, world_size: int, in_backward: bool) -> None:
    kind, settings = OPTIMIZERS["sgd"]
    plain, ours = wrapped(model_of()), wrapped(model_of())
    one = ZeroOptimizer(plain, kind, **settings)
    other = ZeroOptimizer(ours, kind, scheme=Elsewhere(), in_backward=in_backward, **settings)
    train(plain, one, rank, 0, 2)
    train(ours, other, rank, 0, 2)
    assert same(plain, ours)


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_scheme_may_return_the_mean_in_memory_of_its_own(in_backward: bool) -> None:
    run_ranks(_own_memory, 2, in_backward)


FEATURES = (
    *("groups", "schedule", "accumulation", "two passes", "unused", "static graph"),
    *("mixed precision", "view", "in backward", "one bucket", "recomputed"),
)
AT_EVERY_RUN = {"accumulation", "two passes", "unused"}
REFUSED = [{"in backward", other} for other in ("unused", "static graph", "mixed precision")]


class _Model(nn.Module):
    """Layers, of which the last ones may be unused, or computed again in backward."""

    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.layers, self.recomputes, self.skips = model_of(), recomputes, False

    def forward(self, x: Tensor) -> Tensor:
        layers = self.layers[:4] if self.skips else self.layers
        if self.recomputes:
            return checkpoint(layers, x, use_reentrant=False)  # type: ignore[no-any-return]
        return layers(x)  # type: ignore[no-any-return]


def _pair(rank: int, features: Collection[str]) -> None:
    options: dict[str, Any] = {
        "find_unused_parameters": "unused" in features,
        "static_graph": "static graph" in features,
        "gradient_as_bucket_view": "view" in features,
    }
    if "mixed precision" in features:
        options["mixed_precision"] = MixedPrecision(param_dtype=torch.bfloat16)
    if "one bucket" in features:
        options["bucket_cap_mb"] = 100
    plain, ours = (wrapped(_Model("recomputed" in features), **options) for _ in range(2))
    kind, settings = ADAM

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        named = list(model.named_parameters())
        if "groups" not in features:
            return [{"params": [one for _, one in named], "weight_decay": 0.2}]
        return [
            {"params": [one for name, one in named if "weight" in name], "weight_decay": 0.3},
            {"params": [one for name, one in named if "bias" in name], "lr": 3e-3},
        ]

    theirs = kind(groups(plain), **settings)
    in_backward = "in backward" in features
    zero = ZeroOptimizer(ours, kind, params=groups(ours), in_backward=in_backward, **settings)
    for model, optimizer in ((plain, theirs), (ours, zero)):
        every = 2 if "schedule" in features else 100
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, every, 0.3)
        for step in range(4):
            if "accumulation" in features:
                with model.no_sync():
                    backward(model, 100 + step, rank)
            if "two passes" in features:
                backward(model, 100 + step, rank)
                if in_backward:
                    optimizer.step()
                    optimizer.zero_grad()
            model.module.skips = "unused" in features and step in (0, 2)
            backward(model, step, rank)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    agree(ours)
    if "two passes" in features and not in_backward:
        # The reducer adds the first mean on each rank, rounded to the low precision if there is
        # one, and then averages; shards add two means.
        most = 2e-2 if "mixed precision" in features else 1e-5
        for one, other in zip(values(plain), values(ours), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=most)
    else:
        assert same(plain, ours), features


def _pairs(rank: int, world_size: int, first: str) -> None:
    for second in FEATURES[FEATURES.index(first) :]:
        features = {first, second}
        if features in REFUSED:
            with pytest.raises(RegistrationError, match="in_backward"):
                _pair(rank, features)
        elif features != {"static graph", "unused"}:  # torch refuses it
            _pair(rank, features)


@pytest.mark.parametrize(
    "first",
    [pytest.param(one, marks=() if one in AT_EVERY_RUN else pytest.mark.slow) for one in FEATURES],
)
def test_pairs_of_features_have_the_bits_of_plain_training(first: str) -> None:
    run_ranks(_pairs, 2, first)


def _clip(rank: int, world_size: int, norm_type: float) -> None:
    plain, ours = wrapped(model_of()), wrapped(model_of())
    kind, settings = ADAM
    theirs, zero = kind(plain.parameters(), **settings), ZeroOptimizer(ours, kind, **settings)
    for step, most in enumerate((0.005, 0.005, 100.0)):
        for model in (plain, ours):
            backward(model, step, rank)
        wanted = nn.utils.clip_grad_norm_(plain.parameters(), most, norm_type)
        found = zero.clip_grad_norm_(most, norm_type)
        torch.testing.assert_close(found, wanted)
        assert 0.005 < found < 100
        for optimizer in (theirs, zero):
            optimizer.step()
            optimizer.zero_grad()
    agree(ours)
    for one, other in zip(values(plain), values(ours), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_clipping_by_the_norm_over_all_shards(norm_type: float) -> None:
    run_ranks(_clip, 3, norm_type)


class _Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x[:, :27].view(-1, 3, 3, 3).repeat(1, 1, 3, 3)).tanh())


def _channels_last(rank: int, world_size: int, gather: str) -> None:
    plain, ours = (
        wrapped(_Images().to(memory_format=torch.channels_last))  # type: ignore[call-overload]
        for _ in range(2)
    )
    kind, settings = ADAM
    zero = ZeroOptimizer(ours, kind, gather=gather, **settings)
    train(plain, kind(plain.parameters(), **settings), rank, 0, 3)
    train(ours, zero, rank, 0, 3)
    saved = zero.state_dict(gather=True)["pieces"]
    for name, one in plain.module.named_parameters():
        exact = saved[name]["entries"]["exact"]
        if gather == "none":
            assert torch.equal(exact, one)
        assert exact.shape == one.shape
        torch.testing.assert_close(exact, one.detach(), atol=0.02, rtol=0)
    assert same(plain, ours) or gather != "none"


@pytest.mark.parametrize("gather", ["none", "int8"])
def test_another_memory_format(gather: str) -> None:
    run_ranks(_channels_last, 2, gather)


def _sixteen_bits(rank: int, world_size: int, gather: str) -> None:
    ours, exact = wrapped(model_of(torch.bfloat16)), model_of()
    kind, settings = ADAM
    zero = ZeroOptimizer(ours, kind, gather=gather, **{**settings, "lr": 1e-4})
    theirs = kind(exact.parameters(), **{**settings, "lr": 1e-4})
    for step in range(20):
        backward(ours, step, rank)
        loss = [exact(inputs_of(step, one)).square().mean() for one in range(world_size)]
        torch.stack(loss).mean().backward()
        for optimizer in (zero, theirs):
            optimizer.step()
            optimizer.zero_grad()
    agree(ours)
    # Steps of 1e-4 are lost where parameters of 16 bits are stepped themselves.
    saved = zero.state_dict(gather=True)["pieces"]
    before = model_of().state_dict()
    moved = far = 0.0
    for name, one in exact.state_dict().items():
        value = saved[name]["entries"]["exact"]
        assert value.dtype == torch.float32
        moved += float((one - before[name]).square().sum())
        far += float((one - value).square().sum())
    assert far < 0.5 * moved


@pytest.mark.parametrize("gather", ["none", "int8"])
def test_parameters_of_16_bits_are_stepped_in_float32(gather: str) -> None:
    run_ranks(_sixteen_bits, 2, gather)


# ---- codecs


def _codec(rank: int, world_size: int, gather: Any, in_backward: bool) -> None:
    model = wrapped(model_of())
    if gather == "eden":
        gather = commhooks.make("eden", bits=4)
    zero = ZeroOptimizer(
        model, torch.optim.AdamW, scheme="int8", gather=gather, in_backward=in_backward, lr=1e-2
    )
    for step in range(4):
        train(model, zero, rank, step, 1)
        agree(model)
    names = {row.collective for row in zero.hook.ledger._rows}
    assert names == {"all_to_all", "all_gather"}


@pytest.mark.parametrize("gather", GATHERS)
def test_all_ranks_have_equal_parameters_after_every_step(gather: str) -> None:
    run_ranks(_codec, 3, gather, gather in ("int8", "int4"))


def _beside_pieces(rank: int, world_size: int) -> None:
    """What tensor parallelism does not cut stays equal on its ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}

    def made(**settings: Any) -> tuple[Any, ZeroOptimizer]:
        inside = nn.Sequential(nn.Linear(33, 64), nn.ReLU(), nn.Linear(64, 7))
        parallelize_module(inside, mesh["tp"], plan)
        model = DistributedDataParallel(inside, device_mesh=mesh["dp"])
        return model, ZeroOptimizer(model, torch.optim.AdamW, lr=1e-2, **settings)

    with pytest.raises(RegistrationError, match=r"rounds 2\.bias together .* gather='none'"):
        made(gather="int8")
    for in_backward, gather in ((False, "none"), (True, "bf16")):
        torch.manual_seed(0)
        model, zero = made(scheme="int8", gather=gather, in_backward=in_backward)
        for step in range(3):
            model(torch.randn(4, 33) + rank // 2 + step).square().sum().backward()
            zero.step()
            zero.zero_grad()
        bias = dict(model.named_parameters())["module.2.bias"].detach()
        everyone = [torch.empty_like(bias) for _ in range(2)]
        dist.all_gather(everyone, bias, group=mesh["tp"].get_group())
        assert torch.equal(*everyone)


def test_beside_tensor_parallelism_what_is_not_cut_stays_equal() -> None:
    run_ranks(_beside_pieces, 4, ignore_warnings=(".*TypedStorage",))


class _Linear(nn.Module):
    """Its gradients do not depend on its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 33 * 50).sin().view(33, 50))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def _nothing_is_lost(rank: int, world_size: int, gather: str) -> tuple[float, float]:
    found = []
    for how in ("none", commhooks.make("eden", bits=4) if gather == "eden" else gather):
        model = wrapped(_Linear())
        zero = ZeroOptimizer(model, torch.optim.SGD, gather=how, lr=0.1)
        for step in range(30):
            model(inputs_of(step, rank)).mean().backward()
            zero.step()
            zero.zero_grad()
        exact = zero.state_dict(gather=True)["pieces"]["weight"]["entries"]["exact"]
        found.append((exact, values(model)[0]))
    (wanted, _), (exact, held) = found
    assert torch.equal(exact, wanted)  # whatever was sent
    start = _Linear().weight.detach()
    return float((exact - held).norm()), float((exact - start).norm())


@pytest.mark.parametrize("gather", ["eden", "int8", "int4", "topk", "onebit"])
def test_what_ranks_have_and_what_the_owner_keeps_are_the_exact_parameters(gather: str) -> None:
    for unsent, moved in run_ranks(_nothing_is_lost, 2, gather):
        # Without feedback errors of 30 steps would add up.
        assert 0 < unsent < {"int8": 0.01, "int4": 0.1}.get(gather, 0.9) * moved


# ---- memory and bytes


def _counts(rank: int, world_size: int) -> tuple[int, int, int, float, float]:
    model = wrapped(model_of())
    zero = ZeroOptimizer(model, torch.optim.AdamW, lr=1e-2)
    train(model, zero, rank, 0, 1)
    kept = sum(
        value.numel() for state in zero.state.values() for value in state.values() if value.dim()
    )
    exact = sum(piece.value.numel() for piece in zero._shards.pieces())
    total = sum(one.numel() for one in model.parameters())
    wire, dense = zero.hook.ledger.wire_bytes, zero.hook.ledger.dense_wire_bytes
    other = wrapped(model_of())
    small = ZeroOptimizer(other, torch.optim.AdamW, scheme="int8", gather="int8", lr=1e-2)
    train(other, small, rank, 0, 1)
    return kept, exact, total, wire / dense, small.hook.ledger.wire_bytes / dense


def test_state_is_divided_and_bytes_are_two_halves() -> None:
    ranks = run_ranks(_counts, 2)
    total = ranks[0][2]
    assert sum(kept for kept, *_ in ranks) == 2 * total  # two moments
    assert sum(exact for _, exact, *_ in ranks) == total
    for kept, _, _, whole, small in ranks:
        # Shards are multiples of 64 entries in each of the buckets.
        assert abs(kept - total) <= 2 * 64 * 4
        # Reduce-scatter and gather: as many bytes as an all-reduce, but for rows filled up.
        assert 1.0 <= whole < 1.1
        assert small < 0.35  # one byte and some scales for four, in buckets of few blocks


# ---- save and resume


def _made(gather: str = "int8", **settings: Any) -> tuple[DistributedDataParallel, ZeroOptimizer]:
    model = wrapped(model_of())
    scheme = commhooks.make("int4", block=64)
    settings = {"lr": 1e-2, **settings}
    return model, ZeroOptimizer(model, torch.optim.AdamW, scheme=scheme, gather=gather, **settings)


def _resume(rank: int, world_size: int, gathered: bool, in_backward: bool) -> None:
    model, zero = _made(in_backward=in_backward)
    train(model, zero, rank, 0, 3)
    saved = copy.deepcopy((model.state_dict(), zero.state_dict(gather=gathered)))
    train(model, zero, rank, 3, 3)
    zero.param_groups[0]["lr"] = 1.0
    other, resumed = _made(in_backward=in_backward)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert resumed.param_groups[0]["lr"] == 1e-2
    train(other, resumed, rank, 3, 3)
    assert same(model, other)
    resumed.load_state_dict(saved[1])  # once more: of the state before nothing is left
    assert len(resumed.state) == len(resumed._shards.pieces())


@pytest.mark.parametrize("gathered", [False, True])
def test_a_resumed_run_continues_bit_for_bit(gathered: bool) -> None:
    run_ranks(_resume, 2, gathered, gathered)


def _saved(rank: int, world_size: int) -> tuple[Any, Any]:
    model, zero = _made()
    train(model, zero, rank, 0, 3)
    only = zero.state_dict(gather=True, dst=1)
    assert bool(only) == (rank == 1)
    return model.state_dict(), zero.state_dict(gather=True)


def _loaded(rank: int, world_size: int, parts: Any) -> Any:
    model, zero = _made()
    model.load_state_dict(parts[0])
    zero.load_state_dict(parts[1])
    again = zero.state_dict(gather=True)
    train(model, zero, rank, 3, 2)
    agree(model)
    return again


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (2, 1)])
def test_a_gathered_state_loads_on_another_number_of_ranks(before: int, after: int) -> None:
    parts = run_ranks(_saved, before)[0]
    for again in run_ranks(_loaded, after, parts):
        for name, one in parts[1]["pieces"].items():
            for key, value in one["entries"].items():
                assert torch.equal(value, again["pieces"][name]["entries"][key])
            assert one["rest"] == again["pieces"][name]["rest"]


def _refused_states(rank: int, world_size: int) -> None:
    model, zero = _made()
    train(model, zero, rank, 0, 1)
    before = values(model)
    own, whole = zero.state_dict(), zero.state_dict(gather=True)
    torchs = torch.optim.AdamW(model_of().parameters()).state_dict()
    foreign = dict(whole, pieces={"another.weight": whole["pieces"]["0.weight"]})
    other = dict(whole, groups=[*whole["groups"], *whole["groups"]])
    for wrong, why in (
        (torchs, "plain optimizer"),
        (foreign, "does not fit"),
        (other, "same groups"),
        (dict(whole, version=99), "update commhooks"),
        (3, "plain optimizer"),
    ):
        with pytest.raises(CheckpointError, match=why):
            zero.load_state_dict(wrong)  # type: ignore[arg-type]
    states = [None] * world_size
    dist.all_gather_object(states, own)
    with pytest.raises(CheckpointError):
        zero.load_state_dict(states[1 - rank])  # type: ignore[arg-type]
    for one, two in zip(before, values(model), strict=True):
        assert torch.equal(one, two)


def test_states_that_do_not_fit_are_refused() -> None:
    run_ranks(_refused_states, 2)


# ---- steps that do not count


def overflow_once(module: nn.Module, rank: int) -> Any:
    """Makes a few gradients of rank 1 infinite: they are in the shard of one rank."""
    bias: Any = module[4].bias  # type: ignore[index]
    return bias.register_hook(lambda grad: grad * (math.inf if rank == 1 else 1.0))


def _overflow(rank: int, world_size: int, in_backward: bool, first: int) -> None:
    model, zero = _made(in_backward=in_backward)
    train(model, zero, rank, 0, first)
    before, kept = values(model), copy.deepcopy(zero.state_dict())
    handle = overflow_once(model.module, rank)
    backward(model, 2, rank)
    handle.remove()
    zero.step()
    zero.zero_grad()
    for one, two in zip(before, values(model), strict=True):
        assert torch.equal(one, two)
    for name, one in zero.state_dict()["pieces"].items():
        for key, value in one["entries"].items():
            assert torch.equal(value, kept["pieces"][name]["entries"][key])
        assert one["rest"] == kept["pieces"][name]["rest"]
        assert one["entries"].keys() == kept["pieces"][name]["entries"].keys()
    assert zero.skipped_steps == zero.hook.skipped_steps == 1
    train(model, zero, rank, 3, 1)
    agree(model)
    assert not same(model, model_of())
    assert all(bool(one.isfinite().all()) for one in values(model))


@pytest.mark.parametrize(("in_backward", "first"), [(False, 2), (True, 2), (True, 0)])
def test_a_step_that_overflows_on_one_rank_changes_nothing_on_any(
    in_backward: bool, first: int
) -> None:
    run_ranks(_overflow, 2, in_backward, first)


def _accumulated_in_vain(rank: int, world_size: int) -> None:
    model, plain = wrapped(model_of()), wrapped(model_of())
    zero = ZeroOptimizer(model, torch.optim.AdamW, lr=1e-2)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for one, stepping in ((model, zero), (plain, optimizer)):
        for step in range(3):
            with one.no_sync():
                one(inputs_of(9 + step, rank)).square().mean().backward()
            stepping.zero_grad()  # a batch that the program has thought better of
            one(inputs_of(step, rank)).square().mean().backward()
            stepping.step()
            stepping.zero_grad()
    assert same(model, plain)


def test_zero_grad_drops_what_was_accumulated() -> None:
    run_ranks(_accumulated_in_vain, 2)


def _scaler(rank: int, world_size: int) -> float:
    model = wrapped(model_of())
    zero = ZeroOptimizer(model, torch.optim.AdamW, lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        loss = model(inputs_of(step, rank)).square().mean()
        handle = overflow_once(model.module, rank if step == 1 else 0)
        scaler.scale(loss).backward()
        handle.remove()
        scaler.unscale_(zero)
        zero.clip_grad_norm_(1.0)
        scaler.step(zero)
        scaler.update()
        zero.zero_grad()
    agree(model)
    return scaler.get_scale()


def test_a_gradient_scaler_sees_the_verdict_of_all_ranks() -> None:
    assert run_ranks(_scaler, 2) == [512.0, 512.0]


def _scaled_on_one(rank: int, world_size: int) -> tuple[float, int]:
    """Trains fewer entries than a shard has, so that the last ranks have none."""
    torch.manual_seed(0)
    model = wrapped(nn.Linear(3, 2))
    zero = ZeroOptimizer(model, torch.optim.AdamW, lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        loss = model(torch.ones(2, 3)).sum() * (math.inf if step == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(zero)
        scaler.update()
        zero.zero_grad()
    agree(model)
    again = zero.state_dict(gather=True)
    zero.load_state_dict(again)
    assert len(again["pieces"]) == 2
    return scaler.get_scale(), len(zero.state)


def test_a_gradient_scaler_works_on_ranks_without_shards() -> None:
    assert run_ranks(_scaled_on_one, 3) == [(512.0, 2), (512.0, 0), (512.0, 0)]


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise ValueError("planned")


def _raised(rank: int, world_size: int, in_backward: bool) -> None:
    plain, ours = (_made(in_backward=in_backward) for _ in range(2))
    for model, zero in (plain, ours):
        train(model, zero, rank, 0, 2)
        if model is ours[0]:
            # The last layers' buckets are launched before.
            handle = model.module[0].register_forward_hook(lambda *a: _Raises.apply(a[2]))
            with pytest.raises(ValueError, match="planned"):
                backward(model, 2, rank)
            handle.remove()
            zero.zero_grad()
        train(model, zero, rank, 2, 2)
    agree(ours[0])
    assert same(plain[0], ours[0])


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_backward_pass_that_raised_leaves_nothing_behind(in_backward: bool) -> None:
    run_ranks(_raised, 2, in_backward)


def _written(rank: int, world_size: int, gather: str) -> None:
    plain, ours = wrapped(model_of()), wrapped(model_of())
    theirs = torch.optim.SGD(plain.parameters(), lr=1e-2)
    zero = ZeroOptimizer(ours, torch.optim.SGD, gather=gather, lr=1e-2)
    other = {f"module.{name}": value * 3 for name, value in model_of().state_dict().items()}
    for model, optimizer in ((plain, theirs), (ours, zero)):
        train(model, optimizer, rank, 0, 1)
        model.load_state_dict(other)
        train(model, optimizer, rank, 1, 1)
    agree(ours)
    for one, two in zip(values(plain), values(ours), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0 if gather == "none" else 1e-3)


@pytest.mark.parametrize("gather", ["none", "int8"])
def test_parameters_that_are_loaded_later_hold(gather: str) -> None:
    run_ranks(_written, 2, gather)


# ---- what is done to gradients and parameters besides


def _dropped(rank: int, world_size: int, in_backward: bool, gather: str) -> None:
    """``model.zero_grad()``, also after an overflow, and gradients that are dropped one by one."""
    plain, ours = wrapped(model_of()), wrapped(model_of())
    kind, settings = ADAM
    theirs, zero = (
        kind(plain.parameters(), **settings),
        ZeroOptimizer(ours, kind, in_backward=in_backward, gather=gather, **settings),
    )
    for model, optimizer in ((plain, theirs), (ours, zero)):
        for step in range(5):
            handle = overflow_once(model.module, rank if step == 1 else 0)
            if step == 3 and not in_backward:
                with model.no_sync():
                    backward(model, 50, rank)
                backward(model, 51, rank)  # accumulates two averages
            backward(model, step, rank)
            handle.remove()
            if step in (2, 4):
                model.module[0].weight.grad = None  # type: ignore[union-attr]
            if model is ours or step != 1:
                optimizer.step()
            model.zero_grad()
    assert zero.skipped_steps == 1
    agree(ours)
    for one, other in zip(values(plain), values(ours), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6 if gather == "none" else 2e-3)


@pytest.mark.parametrize(
    ("in_backward", "gather"), [(False, "none"), (True, "none"), (True, "int8")]
)
def test_gradients_that_the_model_drops_are_dropped(in_backward: bool, gather: str) -> None:
    run_ranks(_dropped, 2, in_backward, gather)


def _clipped(rank: int, world_size: int, gather: str) -> None:
    plain, ours = wrapped(model_of()), wrapped(model_of())
    theirs = torch.optim.SGD(plain.parameters(), lr=1e-2)
    zero = ZeroOptimizer(ours, torch.optim.SGD, gather=gather, lr=1e-2)
    for model, optimizer in ((plain, theirs), (ours, zero)):
        for step in range(3):
            for parameter in model.parameters():
                parameter.data.clamp_(-0.05, 0.05)
            train(model, optimizer, rank, step, 1)
    agree(ours)
    for one, two in zip(values(plain), values(ours), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0 if gather == "none" else 1e-3)


@pytest.mark.parametrize("gather", ["none", "int8"])
def test_entries_that_are_clipped_in_data_hold(gather: str) -> None:
    run_ranks(_clipped, 2, gather)


class _Counts(torch.optim.SGD):
    """Divides steps by a count of its calls, as optimizers with schedules of their own do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            for one in group["params"]:
                if one.grad is not None:
                    one.grad.div_(group["calls"])
        return super().step(closure)


def _own_gradients(rank: int, world_size: int) -> None:
    with pytest.raises(RegistrationError, match=r"calls of step\(\)"):
        ZeroOptimizer(wrapped(model_of()), _Counts, lr=1e-2)
    model = wrapped(model_of())
    zero = ZeroOptimizer(model, torch.optim.SGD, lr=1e-2)
    backward(model, 0, rank)
    with model.no_sync():
        backward(model, 1, rank)
    with pytest.raises(RegistrationError, match="was not averaged"):
        zero.step()
    zero.zero_grad()
    with model.hold():
        backward(model, 2, rank)
    with pytest.raises(RegistrationError, match="hold"):
        zero.step()
    model.reduce()
    zero.step()
    zero.zero_grad()
    with pytest.raises(RegistrationError, match="keeps its shards on these ranks"):
        zero.hook.change_group(dist.new_group([0, 1]))
    train(model, zero, rank, 3, 1)
    agree(model)


def test_gradients_of_one_rank_are_no_step() -> None:
    run_ranks(_own_gradients, 2)


# ---- refusals


def _refusals(rank: int, world_size: int) -> None:
    def refused(why: str, *args: Any, options: Any = None, **settings: Any) -> None:
        model = wrapped(model_of(), **(options or {}))
        with pytest.raises((Error, ValueError), match=why):
            ZeroOptimizer(model, *(args or (torch.optim.AdamW,)), **settings)
        train(model, torch.optim.SGD(model.parameters()), rank, 0, 1)

    refused(r"averages whole buckets.* or PerParameter$", scheme="powersgd")
    refused("does not pack", gather="powersgd")
    refused("would grow", gather=commhooks.make("int4", rounding="stochastic", rotate=False))
    refused("matrix", torch.optim.Adafactor)
    refused("closure", torch.optim.LBFGS)
    refused("Invalid learning rate", lr=-1.0)
    refused("find_unused", in_backward=True, options={"find_unused_parameters": True})
    refused("in two groups", params=model_of().parameters())
    with pytest.raises(RegistrationError, match="writes the mean of all"):
        ZeroOptimizer(nn.parallel.DistributedDataParallel(model_of()), torch.optim.AdamW)
    with pytest.raises(MismatchError, match="lr"):
        ZeroOptimizer(wrapped(model_of()), torch.optim.AdamW, lr=0.1 * (rank + 1))
    hooked = wrapped(model_of())
    commhooks.register(hooked, "int8")
    with pytest.raises(RegistrationError, match="has a hook already"):
        ZeroOptimizer(hooked, torch.optim.AdamW)
    sparse = wrapped(nn.Embedding(9, 4, sparse=True))
    with pytest.raises(RegistrationError, match="sparse gradients"):
        ZeroOptimizer(sparse, torch.optim.AdamW)


def test_what_cannot_be_combined_is_refused() -> None:
    run_ranks(_refusals, 2)


def _misuse(rank: int, world_size: int) -> None:
    model = wrapped(model_of())
    zero = ZeroOptimizer(model, torch.optim.AdamW, in_backward=True, lr=1e-2)
    zero.step()  # before any backward pass: as other optimizers, nothing
    backward(model, 0, rank)
    for call in (
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: zero.clip_grad_norm_(1.0),
        lambda: zero.state_dict(),
        lambda: zero.add_param_group({"params": []}),
        lambda: backward(model, 1, rank),
    ):
        with pytest.raises(RegistrationError, match="ZeroOptimizer"):
            call()  # type: ignore[no-untyped-call]
    weight = model.module[0].weight
    with torch.no_grad():
        weight.mul_(0.5)
    before = values(model)
    with pytest.raises(RegistrationError, match=r"0\.weight written since backward"):
        zero.step()
    zero.zero_grad()
    for one, other in zip(before, values(model), strict=True):
        assert one.equal(other)
    backward(model, 0, rank)
    zero.step()
    assert not weight.equal(before[0])
    with pytest.raises(RegistrationError, match="this step was made"):
        zero.step()
    zero.zero_grad()
    zero.hook.switch("int8")
    with pytest.raises(RegistrationError, match="averages whole buckets"):
        zero.hook.switch("powersgd")
    train(model, zero, rank, 1, 1)
    with model.no_sync():
        backward(model, 2, rank)
    with pytest.raises(RegistrationError, match="no_sync"):
        zero.step()
    zero.zero_grad()
    with pytest.raises(RuntimeError, match=r"join: .*ZeroOptimizer"), model.join():
        backward(model, 3, rank)


def test_misuse_is_an_error() -> None:
    run_ranks(_misuse, 2)


def _freed(rank: int, world_size: int) -> None:
    model = wrapped(model_of())
    zero = ZeroOptimizer(model, torch.optim.AdamW, scheme="int8", gather="int8", lr=1e-2)
    train(model, zero, rank, 0, 2)
    refs = [weakref.ref(model), weakref.ref(zero), weakref.ref(zero.hook)]
    gc.disable()
    hook = zero.hook
    del zero
    assert refs[1]() is None
    backward_raises = pytest.raises(RegistrationError, match="it was deleted")
    with backward_raises:
        backward(model, 2, rank)
    hook.close()
    del hook, model, backward_raises
    gc.enable()
    gc.collect()
    assert [ref() for ref in refs] == [None, None, None]


def test_a_deleted_optimizer_is_freed_and_missed() -> None:
    run_ranks(_freed, 2)


# ---- training


def _characters(rank: int, world_size: int, how: str, steps: int) -> float:
    from experiments.tools.tasks import characters

    task = characters(world_size, length=32)
    torch.manual_seed(0)
    model = DistributedDataParallel(task.model())
    if how == "bf16":
        commhooks.register(model, "bf16")
        optimizer: torch.optim.Optimizer = task.optimizer(model)
    else:
        optimizer = ZeroOptimizer(
            model, torch.optim.AdamW, scheme=how, gather=how, in_backward=True, lr=task.lr
        )
    for step in range(steps):
        x, target = task.batch(rank, step)
        task.loss(model(x), target).backward()
        optimizer.step()
        optimizer.zero_grad()
    return task.evaluate(model.module)[0]


@pytest.mark.slow
def test_a_transformer_trains_as_with_bf16() -> None:
    losses = {how: run_ranks(_characters, 2, how, 40)[0] for how in ("bf16", "int8")}
    assert losses["bf16"] < 3.6  # of log(128) = 4.85
    assert abs(losses["int8"] - losses["bf16"]) < 0.05


def _compiled(rank: int, world_size: int) -> None:
    plain, ours = wrapped(model_of()), wrapped(model_of())
    kind, settings = ADAM
    theirs, zero = kind(plain.parameters(), **settings), ZeroOptimizer(ours, kind, **settings)
    for model, optimizer in ((plain, theirs), (ours, zero)):
        train(torch.compile(model, backend="eager"), optimizer, rank, 0, 3)  # type: ignore[arg-type]
    agree(ours)
    assert same(plain, ours)


def test_a_compiled_model_trains_in_the_same_buckets() -> None:
    run_ranks(_compiled, 2)


# ---- devices


def test_an_optimizer_is_tried_where_it_will_step() -> None:
    tried = []

    class Noted(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            tried.append({one.device.type for one in self.param_groups[0]["params"]})
            raise NotImplementedError

    with pytest.raises(RegistrationError, match="NotImplementedError"):
        check_elementwise(Noted, {"lr": 0.1}, torch.device("meta"))
    assert tried == [{"meta"}]


def test_an_object_in_place_of_an_optimizers_class_is_refused() -> None:
    made = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3))])
    with pytest.raises(TypeError, match=r"takes a class.*AdamW, lr="):
        check_elementwise(made, {}, torch.device("cpu"))


@pytest.mark.parametrize(
    ("key", "settings", "there"),
    [
        ("step", {}, False),
        ("step", {"fused": None, "capturable": False}, False),
        ("step", {"fused": True}, True),
        ("step", {"capturable": True}, True),
        ("mu_product", {}, True),
    ],
)
def test_numbers_of_a_state_go_where_optimizers_keep_them(
    key: str, settings: dict[str, Any], there: bool
) -> None:
    assert home_of(key, torch.device("meta"), settings).type == ("meta" if there else "cpu")


def _narrow_default(rank: int, world_size: int) -> None:
    runs, inputs = [], [inputs_of(step, rank) for step in range(3)]
    for dtype in (torch.float32, torch.bfloat16):
        runs.append(wrapped(model_of()))
        with default_dtype(dtype):
            zero = ZeroOptimizer(runs[-1], *ADAM[:1], gather="int8", **ADAM[1])
            for one in inputs:
                runs[-1](one).square().mean().backward()
                zero.clip_grad_norm_(1.0)
                zero.step()
                zero.zero_grad()
    assert same(*runs)


def test_another_default_dtype_changes_nothing() -> None:
    run_ranks(_narrow_default, 2)
