"""The hooks under PyTorch's names do what PyTorch documents, on real Gloo processes."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks import classic
from commhooks.errors import CheckpointError, HookNotAttachedError, RegistrationError
from commhooks.hook import as_hook
from commhooks.wrappers import _cast as _cast
from tests.tools.harness import on_ranks
from tests.tools.training import equal_on_all_ranks, everyone, same, through_file, train

SIDE, LAYERS = 40, 6


def make_model(layers: int = LAYERS, *, bucket_cap_mb: float = 0.01, **options: Any) -> Any:
    """Layers of 40 x 40 in DDP; 0.01 MiB holds one of them, so there is a bucket for each."""
    torch.manual_seed(0)
    stack = []
    for _ in range(layers):
        stack += [nn.Linear(SIDE, SIDE), nn.Tanh()]
    return DistributedDataParallel(nn.Sequential(*stack), bucket_cap_mb=bucket_cap_mb, **options)


def backward(model: nn.Module, rank: int, step: int) -> list[Tensor]:
    """The gradients of a step whose data differ on every rank and step."""
    model.zero_grad()
    generator = torch.Generator().manual_seed(1000 * step + rank)
    model(torch.randn(8, SIDE, generator=generator)).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def distance(left: list[Tensor], right: list[Tensor]) -> float:
    """The largest relative distance of two tensors, pair by pair."""
    pairs = zip(left, right, strict=True)
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


def flat(gradients: list[Tensor]) -> list[Tensor]:
    """All gradients as one tensor, so that their distance is that of the whole."""
    return [torch.cat([gradient.view(-1) for gradient in gradients])]


# ---- hooks without a state


def test_powersgd_state_refuses_a_bad_rank_at_once() -> None:
    with pytest.raises(ValueError, match="rank"):
        classic.PowerSGDState(None, matrix_approximation_rank=0)


TOLERANCE = {
    "allreduce_hook": 0.0,
    # A rank's rounding errors are relative to its own gradient, which is about sqrt(n) times as
    # long as the mean; and each rank rounds in the cast and in the sum.
    "fp16_compress_hook": 4 * 2**-11,
    "bf16_compress_hook": 4 * 2**-8,
    # Uniform errors of one level: 1/255 of the range, over sqrt(12). The range of a bucket is below
    # 40 standard deviations here, of 512 entries below 20.
    "quantization_pertensor_hook": 40 / 255 / 12**0.5,
    "quantization_perchannel_hook": 20 / 255 / 12**0.5,
}


@on_ranks(3)
def test_stateless_hooks_average_over_the_models_ranks_or_those_given(rank: int) -> None:
    pair = dist.new_group([0, 1])
    for name, bound in TOLERANCE.items():
        model, plain = make_model(), make_model()
        model.register_comm_hook(
            dist.group.WORLD if "fp16" in name else None, getattr(classic, name)
        )
        for step in range(3):
            result, mean = flat(backward(model, rank, step)), flat(backward(plain, rank, step))
            assert equal_on_all_ranks(*result), name
            assert distance(result, mean) <= bound, name
    if rank < 2:
        model, plain = make_model(process_group=pair), make_model(process_group=pair)
        model.register_comm_hook(None, classic.allreduce_hook)
        assert all(map(torch.equal, backward(model, rank, 0), backward(plain, rank, 0)))


@on_ranks(2)
def test_noop_hook_returns_the_local_gradient(rank: int) -> None:
    model, local = make_model(), make_model()
    model.register_comm_hook(None, classic.noop_hook)
    with local.no_sync():
        expected = backward(local, rank, 0)
    assert all(map(torch.equal, backward(model, rank, 0), expected))


@on_ranks(2)
def test_two_models_without_a_state_do_not_mix(rank: int) -> None:
    models = [make_model(), make_model(3)]
    plain = [make_model(), make_model(3)]
    for model in models:
        model.register_comm_hook(None, classic.allreduce_hook)
    for step in range(4):
        for position in (0, 1) if step % 2 else (1, 0):
            result = backward(models[position], rank, step)
            assert all(map(torch.equal, result, backward(plain[position], rank, step)))


@pytest.mark.parametrize("hook", [classic.fp16_compress_hook, classic.powerSGD_hook])
def test_under_the_python_reducer_the_error_names_the_setting(hook: Any) -> None:
    state = classic.PowerSGDState(None) if hook is classic.powerSGD_hook else None
    with pytest.raises(HookNotAttachedError, match="optimize_ddp"):
        hook(state, (torch.ones(2), torch.ones(2)))


# ---- wrappers


def foreign_hook(state: list[torch.dtype], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    state.append(bucket.buffer().dtype)
    tensor = bucket.buffer().div_(dist.get_world_size())
    future = dist.all_reduce(tensor, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


@on_ranks(2)
def test_wrapper_hands_a_foreign_hook_16_bits(rank: int) -> None:
    for kind, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        model, plain = make_model(), make_model()
        dtypes: list[torch.dtype] = []
        model.register_comm_hook(dtypes, getattr(classic, f"{kind}_compress_wrapper")(foreign_hook))
        result = backward(model, rank, 0)
        assert equal_on_all_ranks(*result)
        assert set(dtypes) == {dtype}
        assert distance(result, backward(plain, rank, 0)) <= 8 * torch.finfo(dtype).eps / 2


@on_ranks(2)
def test_fp16_wrapper_of_allreduce_is_the_fp16_hook(rank: int) -> None:
    model, other = make_model(), make_model()
    model.register_comm_hook(None, classic.fp16_compress_wrapper(classic.allreduce_hook))
    other.register_comm_hook(None, classic.fp16_compress_hook)
    assert all(map(torch.equal, backward(model, rank, 0), backward(other, rank, 0)))


@on_ranks(2)
@mock.patch.object(_cast, "_warned_of_overflow", True)
def test_an_overflow_in_the_cast_of_powersgd_is_forgotten_after_the_step(rank: int) -> None:
    model = make_model()
    state = classic.PowerSGDState(None, 2, start_powerSGD_iter=0)
    model.register_comm_hook(state, classic.fp16_compress_wrapper(classic.powerSGD_hook))
    for step, scale in enumerate([1.0, 1.0, 1e7, 1.0, 1.0]):
        model.zero_grad()
        (scale * model(torch.randn(8, SIDE)).square().sum()).backward()
        finite = [bool(parameter.grad.isfinite().all()) for parameter in model.parameters()]
        assert all(finite) == (step != 2)


# ---- PowerSGD


def powersgd_model(*arguments: Any, layers: int = LAYERS, **options: Any) -> tuple[Any, Any]:
    """A model with torch's PowerSGD, of a rank and from a step given."""
    model, state = make_model(layers), classic.PowerSGDState(None, *arguments, **options)
    model.register_comm_hook(state, classic.powerSGD_hook)
    return model, state


@on_ranks(3)
def test_powersgd_is_the_scheme_of_that_name(rank: int) -> None:
    """Torch's state gives the bits of "powersgd", which tests/unit compare with the paper."""
    for approximation_rank in (1, 3):
        model, state = powersgd_model(approximation_rank, start_powerSGD_iter=1)
        plain, other = make_model(), make_model()
        commhooks.register(other, "powersgd", rank=approximation_rank, start_step=1)
        for step in range(3):
            result = backward(model, rank, step)
            assert equal_on_all_ranks(*result)
            assert all(map(torch.equal, result, backward(other, rank, step)))
            assert all(map(torch.equal, result, backward(plain, rank, step))) == (step == 0)
        entries = LAYERS * (SIDE * SIDE + SIDE)
        sent = LAYERS * (2 * SIDE * approximation_rank + SIDE)
        assert state.compression_stats() == (entries / sent, 2 * entries, 2 * sent)


@on_ranks(2)
def test_another_rank_takes_effect_in_the_next_step(rank: int) -> None:
    model, state = powersgd_model(1, start_powerSGD_iter=0)
    for step, approximation_rank in enumerate([1, 1, 3, 3, 2]):
        state.matrix_approximation_rank = approximation_rank
        weight = backward(model, rank, step)[0]
        assert int(torch.linalg.matrix_rank(weight, rtol=1e-4)) == approximation_rank


@on_ranks(2)
def test_one_state_on_two_models_is_as_two_states(rank: int) -> None:
    shared = classic.PowerSGDState(None, 2, start_powerSGD_iter=1)
    together = [make_model(), make_model(3)]
    for model in together:
        model.register_comm_hook(shared, classic.powerSGD_hook)
    apart = [powersgd_model(2, layers=n, start_powerSGD_iter=1)[0] for n in (LAYERS, 3)]
    for step in range(4):
        for model, other in zip(together, apart, strict=True):
            assert all(map(torch.equal, backward(model, rank, step), backward(other, rank, step)))
    with pytest.raises(RegistrationError, match="2 models"):
        shared.state_dict()
    assert shared.iter == 4


@on_ranks(2)
def test_wrapped_powersgd_keeps_its_residual_in_float32(rank: int) -> None:
    model, state = make_model(), classic.PowerSGDState(None, 2, start_powerSGD_iter=1)
    model.register_comm_hook(state, classic.bf16_compress_wrapper(classic.powerSGD_hook))
    other, _ = powersgd_model(2, start_powerSGD_iter=1)
    results = [(backward(model, rank, step), backward(other, rank, step)) for step in range(2)]
    memory = state.state_dict()[f"rank{rank}"]["memory"]["residual"]
    assert {value.dtype for value in memory.values()} == {torch.float32}
    # The first compressed step; later ones start from different factors.
    assert equal_on_all_ranks(*results[1][0])
    assert distance(*results[1]) < 8 * 2**-8


@on_ranks(2)
def test_resumed_powersgd_continues_bit_for_bit_with_other_buckets(rank: int) -> None:
    straight, state = powersgd_model(2, start_powerSGD_iter=2)
    train(straight, rank, range(5), lr=0.01, width=SIDE)
    weights = copy.deepcopy(straight.module.state_dict())
    # With the defaults of torch.load, which takes no other types than it knows.
    loaded = through_file({"pickle": state, "dict": state.state_dict()})
    later = train(straight, rank, range(5, 8), lr=0.01, width=SIDE)
    for way in ("pickle", "before", "after"):
        again = make_model(bucket_cap_mb=0.02)
        again.module.load_state_dict(weights)
        other = loaded["pickle"]
        if way != "pickle":
            other = classic.PowerSGDState(None, 2, start_powerSGD_iter=2)
        if way == "before":
            other.load_state_dict(loaded["dict"])
        again.register_comm_hook(other, classic.powerSGD_hook)
        if way == "after":
            other.load_state_dict(loaded["dict"])
        assert other.iter == 5
        assert same(train(again, rank, range(5, 8), lr=0.01, width=SIDE), later), way


@on_ranks(2)
def test_states_that_were_mixed_up_are_refused_on_all_ranks(rank: int) -> None:
    model, state = powersgd_model(start_powerSGD_iter=0)
    backward(model, rank, 0)
    other = everyone(copy.deepcopy(state))[1 - rank]
    fresh = make_model()
    foreign_state = other.__getstate__()["saved"][0][0]
    fresh.register_comm_hook(other, classic.powerSGD_hook)
    with pytest.raises(CheckpointError, match="every rank loads its own file, or all the same"):
        backward(fresh, rank, 1)
    with pytest.raises(CheckpointError, match="Residuals differ per rank"):
        state.load_state_dict(foreign_state)


@on_ranks(3)
def test_a_state_of_one_rank_or_of_all_continues_on_fewer_ranks(rank: int, tmp_path: Path) -> None:
    model, state = powersgd_model(2, start_powerSGD_iter=1)
    train(model, rank, range(3), lr=0.01, width=SIDE)
    saved = {"alone": copy.deepcopy(state), "gathered": state.gathered()}
    if rank == 0:
        torch.save(saved, tmp_path / "state")
    dist.barrier()
    pair = dist.new_group([0, 1])
    if rank == 2:
        return
    results = []
    for name, loaded in torch.load(tmp_path / "state").items():
        again = make_model(process_group=pair)
        again.register_comm_hook(loaded, classic.powerSGD_hook)
        assert loaded.iter == 3
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            (result,) = flat(backward(again, rank, 3))
        assert len(caught) == (name == "alone" and rank == 0)
        of_rank_0 = result.clone()
        dist.broadcast(of_rank_0, 0, group=pair)
        assert torch.equal(result, of_rank_0)
        results.append(result)
    assert not torch.equal(*results)


# Two layers of 40 x 40 are in a bucket; its 3280 entries are a square of 58 x 58.
SHAPES = {"powerSGD_hook": [(2, SIDE)] * 4, "batched_powerSGD_hook": [(2, 58)] * 2}


@on_ranks(2)
def test_memory_is_shown_under_torchs_names(rank: int, world_size: int) -> None:
    for hook_name, shapes in SHAPES.items():
        model, plain = make_model(4), make_model(4)
        state = classic.PowerSGDState(None, 2, start_powerSGD_iter=2)
        model.register_comm_hook(state, getattr(classic, hook_name))
        owed = torch.zeros(())
        for step in range(4):
            assert bool(state.error_dict) == bool(state.q_memory_dict) == (step > 2)
            assert not state.p_memory_dict
            result, mean = (flat(backward(each, rank, step))[0] for each in (model, plain))
            owed = owed + (mean - result).sum()
        names = dict(model.module.named_parameters())
        assert set(state.error_dict) == set(names)
        errors = torch.cat([error.flatten() for error in state.error_dict.values()])
        dist.all_reduce(errors)
        # Buckets have their own order of entries, which their sum does not know; float32 rounds by
        # 6e-8, a sum of 6,560 entries by 100 times as much.
        assert (errors.sum() / world_size - owed).abs() / errors.abs().sum() < 1e-5
        assert set(state.q_memory_dict) <= set(names)
        assert [tuple(factors.shape) for factors in state.q_memory_dict.values()] == shapes


OPTIONS = {
    "orthogonalization_epsilon": 0.5,
    "batch_tensors_with_same_shape": True,
    "compression_stats_logging_frequency": 1,
    "random_seed": 1,
    "min_compression_rate": 30,
    "warm_start": False,
    "use_error_feedback": False,
    "start_powerSGD_iter": 3,
    "matrix_approximation_rank": 3,
}
CHANGES_NO_BIT = [
    "orthogonalization_epsilon",
    "batch_tensors_with_same_shape",
    "compression_stats_logging_frequency",
]


@on_ranks(2)
def test_every_option_has_its_effect_or_is_said_to_have_none(rank: int) -> None:
    def run(changes: dict[str, Any], start: int) -> Tensor:
        early = changes if start == 0 else {}
        model, state = powersgd_model(layers=2, **{"start_powerSGD_iter": 1, **early})
        gradients = []
        for step in range(4):
            if step == start:
                for name, value in changes.items():
                    setattr(state, name, value)
            gradients += flat(backward(model, rank, step))
        model.zero_grad()
        (model(torch.zeros(1, SIDE)) * 0).sum().backward()  # a gradient of zeros
        gradients += flat([parameter.grad for parameter in model.parameters()])
        assert all(bool(gradient.isfinite().all()) for gradient in gradients)
        return torch.cat(gradients)

    usual = run({}, 0)
    for name, value in OPTIONS.items():
        effects = [not torch.equal(run({name: value}, start), usual) for start in (0, 2)]
        late = name != "random_seed"  # a warm start has forgotten its first factors
        assert effects == ([False, False] if name in CHANGES_NO_BIT else [True, late]), name
    text = " ".join((classic.PowerSGDState.__doc__ or "").split())
    for name in ("orthogonalization_epsilon", "batch_tensors_with_same_shape"):
        assert f"{name}: accepted, and" in text


@on_ranks(3)
def test_another_process_group_takes_effect_in_the_next_step(rank: int, world_size: int) -> None:
    halves = [dist.new_group([0, 1]), dist.new_group([2])]
    model, state = powersgd_model(2, layers=2, start_powerSGD_iter=1)
    train(model, rank, range(3), lr=0.01, width=SIDE)
    before = state.state_dict()[f"rank{rank}"]["memory"]["residual"]
    state.process_group = halves[rank // 2]
    (result,) = flat(backward(model, rank, 3))
    hook = next(iter(state._on_models.inners.values())).hook
    assert (hook.world_size, hook.step) == (2 - rank // 2, 4)
    assert any(bool(value.any()) for value in before.values())
    left, right, alone = (torch.empty_like(result) for _ in range(world_size))
    dist.all_gather([left, right, alone], result)
    assert torch.equal(left, right)
    assert not torch.equal(left, alone)


class LastBucket:
    def is_last(self) -> bool:
        return True


@on_ranks(2)
def test_a_hook_of_ones_own_counts_steps_in_the_state(rank: int) -> None:
    model, state = make_model(4), classic.PowerSGDState(None)
    buckets = 0

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        nonlocal buckets
        buckets += 1
        state.maybe_increase_iter(bucket)
        work = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return work.then(lambda done: done.value()[0])

    model.register_comm_hook(state, as_hook(hook))
    other, running = powersgd_model(layers=2)
    for step in range(3):
        backward(model, rank, step)
        backward(other, rank, step)
    running.maybe_increase_iter(LastBucket())
    assert state.iter == running.iter == 3
    assert buckets > 3  # more than one in a step
    with pytest.raises(ValueError, match="0 or more, got -1"):
        running.iter = -1


@on_ranks(2)
def test_a_state_goes_on_when_frozen_layers_are_unfrozen(rank: int) -> None:
    net = nn.Sequential(*[nn.Linear(SIDE, SIDE) for _ in range(3)])
    net[0].requires_grad_(False)
    state = classic.PowerSGDState(None, 2, start_powerSGD_iter=2)

    def residual() -> Tensor:
        kept: Tensor = state.state_dict()[f"rank{rank}"]["memory"]["residual"]["2.weight"]
        return kept

    for trained, steps in ((4, range(4)), (6, range(4, 6))):
        model = DistributedDataParallel(net, bucket_cap_mb=0.01)
        model.register_comm_hook(state, classic.powerSGD_hook)
        if trained == 6:
            before, state.iter = residual(), 0  # dense again, for the residual to be seen
        for step in steps:
            model.zero_grad()
            generator = torch.Generator().manual_seed(1000 * step + rank)
            model(torch.randn(8, SIDE, generator=generator)).square().sum().backward()
            if step == 4:
                assert torch.equal(residual(), before)
        assert sum(parameter.grad is not None for parameter in net.parameters()) == trained
        net[0].requires_grad_(True)
    assert state.iter == 2


# ---- what cannot work says so


@pytest.mark.parametrize("hook", [classic.powerSGD_hook, classic.post_localSGD_hook])
def test_a_missing_state_is_named(hook: Any) -> None:
    with pytest.raises(TypeError, match=r"State as state, got builtins\.NoneType"):
        hook(None, object())


def test_a_state_that_is_no_group_is_named() -> None:
    with pytest.raises(TypeError, match="process group, or None"):
        classic.allreduce_hook("gloo", object())  # type: ignore[arg-type]
