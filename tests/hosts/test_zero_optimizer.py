"""Optimizers sharded over ranks (ZeRO-1) train as plain ones do, in less memory."""

from __future__ import annotations

import math
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
from commhooks.errors import RegistrationError
from commhooks.zero import ZeroOptimizer
from commhooks.zero._optimizer import check_elementwise
from commhooks.zero._saving import home_of
from ddp_core import DistributedDataParallel, MixedPrecision
from tests.device.device_cases import default_dtype
from tests.hosts.every_host import Elsewhere
from tests.hosts.zero_training import (
    ADAM,
    OPTIMIZERS,
    agree,
    backward,
    both_with,
    differ_by,
    inputs_of,
    model_of,
    same,
    take_steps,
    values,
    wrapped,
)
from tests.tools.harness import on_ranks
from tests.tools.training import everyone

# ---- the bits of plain training


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(1, 2, 3)
def test_shards_train_as_a_plain_optimizer_does(rank: int, world_size: int, name: str) -> None:
    kind, settings = OPTIMIZERS[name]
    for in_backward in (False, True):
        plain, ours = (wrapped(model_of(), gradient_as_bucket_view=name == "sgd") for _ in range(2))
        zero = ZeroOptimizer(ours, kind, in_backward=in_backward, **settings)
        take_steps(plain, kind(plain.parameters(), **settings), rank, 0, 5)
        take_steps(ours, zero, rank, 0, 5)
        assert len(ours.reducer.buckets) > 1
        agree(ours)
        if world_size == 2:
            assert same(plain, ours), in_backward
        differ_by(plain, ours, 1e-5, rtol=1e-4)  # the order of the sum


@on_ranks(2)
def test_a_scheme_may_return_the_mean_in_memory_of_its_own(rank: int) -> None:
    kind, settings = OPTIMIZERS["sgd"]
    for in_backward in (False, True):
        plain, ours = wrapped(model_of()), wrapped(model_of())
        plain_optimizer = ZeroOptimizer(plain, kind, **settings)
        zero = ZeroOptimizer(ours, kind, scheme=Elsewhere(), in_backward=in_backward, **settings)
        take_steps(plain, plain_optimizer, rank, 0, 2)
        take_steps(ours, zero, rank, 0, 2)
        assert same(plain, ours), in_backward


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

    def forward(self, inputs: Tensor) -> Tensor:
        layers = self.layers[:4] if self.skips else self.layers
        if self.recomputes:
            return checkpoint(layers, inputs, use_reentrant=False)  # type: ignore[no-any-return]
        return layers(inputs)  # type: ignore[no-any-return]


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
            return [{"params": [parameter for _, parameter in named], "weight_decay": 0.2}]
        return [
            {"params": [value for name, value in named if "weight" in name], "weight_decay": 0.3},
            {"params": [value for name, value in named if "bias" in name], "lr": 3e-3},
        ]

    plain_optimizer = kind(groups(plain), **settings)
    in_backward = "in backward" in features
    zero = ZeroOptimizer(ours, kind, params=groups(ours), in_backward=in_backward, **settings)
    for model, optimizer in ((plain, plain_optimizer), (ours, zero)):
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
            take_steps(model, optimizer, rank, step, 1)
            schedule.step()
    agree(ours)
    if "two passes" in features and not in_backward:
        # The reducer adds the first mean on each rank, rounded to the low precision if there is
        # one, and then averages; shards add two means.
        differ_by(plain, ours, 2e-2 if "mixed precision" in features else 1e-5)
    else:
        assert same(plain, ours), features


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(name, marks=() if name in AT_EVERY_RUN else pytest.mark.slow)
        for name in FEATURES
    ],
)
@on_ranks(2)
def test_pairs_of_features_have_the_bits_of_plain_training(rank: int, first: str) -> None:
    for second in FEATURES[FEATURES.index(first) :]:
        features = {first, second}
        if features in REFUSED:
            with pytest.raises(RegistrationError, match="in_backward"):
                _pair(rank, features)
        elif features != {"static graph", "unused"}:  # torch refuses it
            _pair(rank, features)


@on_ranks(3)
def test_clipping_by_the_norm_over_all_shards(rank: int) -> None:
    for norm_type in (2.0, math.inf):
        (plain, plain_optimizer), (ours, zero) = both_with("adamw")
        for step, most in enumerate((0.005, 0.005, 100.0)):
            for model in (plain, ours):
                backward(model, step, rank)
            wanted = nn.utils.clip_grad_norm_(plain.parameters(), most, norm_type)
            norm = zero.clip_grad_norm_(most, norm_type)
            torch.testing.assert_close(norm, wanted)
            assert 0.005 < norm < 100
            for optimizer in (plain_optimizer, zero):
                optimizer.step()
                optimizer.zero_grad()
        agree(ours)
        differ_by(plain, ours, 1e-5, rtol=1e-4)


class _Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        images = inputs[:, :27].view(-1, 3, 3, 3).repeat(1, 1, 3, 3)
        return self.second(self.first(images).tanh())


def _channels_last(rank: int, world_size: int, gather: str) -> None:
    plain, ours = (
        wrapped(_Images().to(memory_format=torch.channels_last))  # type: ignore[call-overload]
        for _ in range(2)
    )
    kind, settings = ADAM
    zero = ZeroOptimizer(ours, kind, gather=gather, **settings)
    take_steps(plain, kind(plain.parameters(), **settings), rank, 0, 3)
    take_steps(ours, zero, rank, 0, 3)
    saved = zero.state_dict(gather=True)["pieces"]
    for name, parameter in plain.module.named_parameters():
        exact = saved[name]["entries"]["exact"]
        if gather == "none":
            assert torch.equal(exact, parameter)
        assert exact.shape == parameter.shape
        torch.testing.assert_close(exact, parameter.detach(), atol=0.02, rtol=0)
    assert same(plain, ours) or gather != "none"


def _sixteen_bits(rank: int, world_size: int, gather: str) -> None:
    ours, exact = wrapped(model_of(torch.bfloat16)), model_of()
    kind, settings = ADAM
    zero = ZeroOptimizer(ours, kind, gather=gather, **{**settings, "lr": 1e-4})
    exact_optimizer = kind(exact.parameters(), **{**settings, "lr": 1e-4})
    for step in range(20):
        backward(ours, step, rank)
        losses = [exact(inputs_of(step, other)).square().mean() for other in range(world_size)]
        torch.stack(losses).mean().backward()
        for optimizer in (zero, exact_optimizer):
            optimizer.step()
            optimizer.zero_grad()
    agree(ours)
    # Steps of 1e-4 are lost where parameters of 16 bits are stepped themselves.
    saved = zero.state_dict(gather=True)["pieces"]
    before = model_of().state_dict()
    moved = far = 0.0
    for name, parameter in exact.state_dict().items():
        value = saved[name]["entries"]["exact"]
        assert value.dtype == torch.float32
        moved += float((parameter - before[name]).square().sum())
        far += float((parameter - value).square().sum())
    assert far < 0.5 * moved


@on_ranks(2)
def test_another_memory_format_and_16_bits_are_stepped_in_order_and_in_float32(
    rank: int, world_size: int
) -> None:
    for gather in ("none", "int8"):
        _channels_last(rank, world_size, gather)
        _sixteen_bits(rank, world_size, gather)


# ---- codecs


# "none", a codec in backward and one of bits at every run.
@pytest.mark.parametrize(
    "gathers",
    [
        ("none", "int8", "onebit"),
        pytest.param(("bf16", "fp16", "int4", "fp8", "eden", "topk"), marks=pytest.mark.slow),
    ],
    ids=["some", "others"],
)
@on_ranks(3)
def test_all_ranks_have_equal_parameters_after_every_step(
    rank: int, gathers: tuple[str, ...]
) -> None:
    for name in gathers:
        model = wrapped(model_of())
        gather: Any = commhooks.make("eden", bits=4) if name == "eden" else name
        zero = ZeroOptimizer(
            model, torch.optim.AdamW, scheme="int8", gather=gather,
            in_backward=name in ("int8", "int4"), lr=1e-2,
        )  # fmt: skip
        for step in range(4):
            take_steps(model, zero, rank, step, 1)
            agree(model)
        collectives = {row.collective for row in zero.hook.ledger._rows}
        assert collectives == {"all_to_all", "all_gather"}, name


@on_ranks(4, ignore_warnings=(".*TypedStorage",))
def test_beside_tensor_parallelism_what_is_not_cut_stays_equal(rank: int) -> None:
    """Parameters that tensor parallelism does not cut stay equal on its ranks."""
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


class _Linear(nn.Module):
    """A layer whose gradients do not depend on its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 33 * 50).sin().view(33, 50))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.weight


def _exact_and_held(rank: int, gather: str) -> tuple[Tensor, Tensor]:
    model = wrapped(_Linear())
    codec: Any = commhooks.make("eden", bits=4) if gather == "eden" else gather
    zero = ZeroOptimizer(model, torch.optim.SGD, gather=codec, lr=0.1)
    for step in range(30):
        model(inputs_of(step, rank)).mean().backward()
        zero.step()
        zero.zero_grad()
    exact = zero.state_dict(gather=True)["pieces"]["weight"]["entries"]["exact"]
    return exact, values(model)[0]


@pytest.mark.parametrize(
    "gathers",
    [("eden", "topk"), pytest.param(("int8", "int4", "onebit"), marks=pytest.mark.slow)],
    ids=["some", "others"],
)
@on_ranks(2)
def test_what_ranks_have_and_what_the_owner_keeps_are_the_exact_parameters(
    rank: int, gathers: tuple[str, ...]
) -> None:
    wanted, _ = _exact_and_held(rank, "none")
    start = _Linear().weight.detach()
    for gather in gathers:
        exact, held = _exact_and_held(rank, gather)
        assert torch.equal(exact, wanted), gather  # whatever was sent
        unsent, moved = float((exact - held).norm()), float((exact - start).norm())
        # Without feedback errors of 30 steps would add up.
        assert 0 < unsent < {"int8": 0.01, "int4": 0.1}.get(gather, 0.9) * moved, gather


# ---- memory and bytes


@on_ranks(2)
def test_state_is_divided_and_bytes_are_two_halves(rank: int) -> None:
    model, other = wrapped(model_of()), wrapped(model_of())
    zero = ZeroOptimizer(model, torch.optim.AdamW, lr=1e-2)
    take_steps(model, zero, rank, 0, 1)
    kept = sum(
        value.numel() for state in zero.state.values() for value in state.values() if value.dim()
    )
    exact = sum(piece.value.numel() for piece in zero._shards.pieces())
    total = sum(parameter.numel() for parameter in model.parameters())
    assert sum(everyone(kept)) == 2 * total  # two moments
    assert sum(everyone(exact)) == total
    # Shards are multiples of 64 entries in each of the buckets.
    assert abs(kept - total) <= 2 * 64 * 4
    # Reduce-scatter and gather: as many bytes as an all-reduce, but for rows filled up.
    dense = zero.hook.ledger.dense_wire_bytes
    assert 1.0 <= zero.hook.ledger.wire_bytes / dense < 1.1
    small = ZeroOptimizer(other, torch.optim.AdamW, scheme="int8", gather="int8", lr=1e-2)
    take_steps(other, small, rank, 0, 1)
    # One byte and some scales for four, in buckets of few blocks.
    assert small.hook.ledger.wire_bytes / dense < 0.35


# ---- training


@pytest.mark.slow
@on_ranks(2)
def test_a_transformer_trains_as_with_bf16(rank: int, world_size: int) -> None:
    from experiments.tools.tasks import characters

    task, losses = characters(world_size, length=32), {}
    for how in ("bf16", "int8"):
        torch.manual_seed(0)
        model = DistributedDataParallel(task.model())
        if how == "bf16":
            commhooks.register(model, "bf16")
            optimizer: torch.optim.Optimizer = task.optimizer(model)
        else:
            optimizer = ZeroOptimizer(
                model, torch.optim.AdamW, scheme=how, gather=how, in_backward=True, lr=task.lr
            )
        for step in range(40):
            inputs, target = task.batch(rank, step)
            task.loss(model(inputs), target).backward()
            optimizer.step()
            optimizer.zero_grad()
        losses[how] = task.evaluate(model.module)[0]
    assert losses["bf16"] < 3.6  # of log(128) = 4.85
    assert abs(losses["int8"] - losses["bf16"]) < 0.05


@on_ranks(2)
def test_a_compiled_model_trains_in_the_same_buckets(rank: int) -> None:
    both = both_with("adamw")
    for model, optimizer in both:
        take_steps(torch.compile(model, backend="eager"), optimizer, rank, 0, 3)
    agree(both[1][0])
    assert same(both[0][0], both[1][0])


# ---- devices and types


def test_an_optimizer_is_tried_where_it_will_step() -> None:
    devices = []

    class Noted(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            devices.append({value.device.type for value in self.param_groups[0]["params"]})
            raise NotImplementedError

    with pytest.raises(RegistrationError, match="NotImplementedError"):
        check_elementwise(Noted, {"lr": 0.1}, torch.device("meta"))
    assert devices == [{"meta"}]


def test_an_object_in_place_of_an_optimizers_class_is_refused() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3))])
    with pytest.raises(TypeError, match=r"takes a class.*AdamW, lr="):
        check_elementwise(optimizer, {}, torch.device("cpu"))


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


@on_ranks(2)
def test_another_default_dtype_changes_nothing(rank: int) -> None:
    runs, inputs = [], [inputs_of(step, rank) for step in range(3)]
    for dtype in (torch.float32, torch.bfloat16):
        runs.append(wrapped(model_of()))
        with default_dtype(dtype):
            zero = ZeroOptimizer(runs[-1], *ADAM[:1], gather="int8", **ADAM[1])
            for of_step in inputs:
                runs[-1](of_step).square().mean().backward()
                zero.clip_grad_norm_(1.0)
                zero.step()
                zero.zero_grad()
    assert same(*runs)
