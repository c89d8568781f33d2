"""The hooks under PyTorch's names do what PyTorch documents, on real Gloo processes."""

from __future__ import annotations

import copy
import inspect
import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from commhooks import classic
from commhooks.errors import CheckpointError, RegistrationError
from commhooks.hook import as_hook
from tests.tools.harness import run_ranks

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


def train(model: nn.Module, rank: int, steps: range) -> list[Tensor]:
    """The parameters after some steps of SGD."""
    for step in steps:
        backward(model, rank, step)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
    return [parameter.detach().clone() for parameter in model.parameters()]


def distance(left: list[Tensor], right: list[Tensor]) -> float:
    """The largest relative distance of two tensors, pair by pair."""
    pairs = zip(left, right, strict=True)
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


def flat(gradients: list[Tensor]) -> list[Tensor]:
    """All gradients as one tensor, so that their distance is that of the whole."""
    return [torch.cat([gradient.view(-1) for gradient in gradients])]


def assert_equal_ranks(results: list[Any]) -> None:
    """All ranks returned the same bits."""
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=0, equal_nan=True)


# ---- signatures

TORCH = {
    "allreduce_hook": default_hooks,
    "fp16_compress_hook": default_hooks,
    "bf16_compress_hook": default_hooks,
    "fp16_compress_wrapper": default_hooks,
    "bf16_compress_wrapper": default_hooks,
    "PowerSGDState": powerSGD_hook,
    "powerSGD_hook": powerSGD_hook,
    "batched_powerSGD_hook": powerSGD_hook,
    "noop_hook": debugging_hooks,
    "quantization_pertensor_hook": quantization_hooks,
    "quantization_perchannel_hook": quantization_hooks,
    "PostLocalSGDState": post_localSGD_hook,
    "post_localSGD_hook": post_localSGD_hook,
}


def test_every_classic_name_is_compared_with_torch() -> None:
    assert sorted(TORCH) == sorted(classic.__all__)


@pytest.mark.parametrize("name", TORCH)
def test_names_order_and_defaults_of_parameters_are_torchs(name: str) -> None:
    def parameters(function: Any) -> list[Any]:
        found = inspect.signature(function).parameters.values()
        return [(one.name, one.kind, one.default) for one in found]

    assert parameters(getattr(classic, name)) == parameters(getattr(TORCH[name], name))


@pytest.mark.parametrize("name", ["PowerSGDState", "PostLocalSGDState"])
def test_settings_of_a_state_are_readable_and_writable(name: str) -> None:
    required = {"process_group": None, "subgroup": None, "start_localSGD_iter": 3}
    state_class = getattr(classic, name)
    names = list(inspect.signature(state_class).parameters)
    state = state_class(**{key: value for key, value in required.items() if key in names})
    for setting in names:
        setattr(state, setting, getattr(state, setting))
    assert state.iter == 0


def test_powersgd_state_refuses_a_bad_rank_at_once() -> None:
    with pytest.raises(ValueError, match="rank"):
        classic.PowerSGDState(None, matrix_approximation_rank=0)


# ---- hooks without a state


def stateless(rank: int, world_size: int, name: str, explicit: bool) -> Any:
    model, plain = make_model(), make_model()
    model.register_comm_hook(dist.group.WORLD if explicit else None, getattr(classic, name))
    results = [(backward(model, rank, step), backward(plain, rank, step)) for step in range(3)]
    return [one for one, _ in results], max(distance(*map(flat, pair)) for pair in results)


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


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", TOLERANCE)
def test_stateless_hook_averages(name: str, world_size: int) -> None:
    results = run_ranks(stateless, world_size, name, world_size == 3)
    assert_equal_ranks([gradients for gradients, _ in results])
    assert max(error for _, error in results) <= TOLERANCE[name]


def noop(rank: int, world_size: int) -> bool:
    model, local = make_model(), make_model()
    model.register_comm_hook(None, classic.noop_hook)
    with local.no_sync():
        expected = backward(local, rank, 0)
    return all(map(torch.equal, backward(model, rank, 0), expected))


def test_noop_hook_returns_the_local_gradient() -> None:
    assert all(run_ranks(noop, 2))


def interleaved(rank: int, world_size: int) -> bool:
    models = [make_model(), make_model(3)]
    plain = [make_model(), make_model(3)]
    for model in models:
        model.register_comm_hook(None, classic.allreduce_hook)
    for step in range(4):
        for position in (0, 1) if step % 2 else (1, 0):
            result = backward(models[position], rank, step)
            if not all(map(torch.equal, result, backward(plain[position], rank, step))):
                return False
    return True


def test_two_models_without_a_state_do_not_mix() -> None:
    assert all(run_ranks(interleaved, 2))


def custom_group(rank: int, world_size: int) -> bool:
    pair = dist.new_group([0, 1])
    if rank == 2:
        return True
    model, plain = make_model(process_group=pair), make_model(process_group=pair)
    model.register_comm_hook(None, classic.allreduce_hook)
    return all(map(torch.equal, backward(model, rank, 0), backward(plain, rank, 0)))


def test_without_a_group_the_hook_averages_over_the_models_own() -> None:
    assert all(run_ranks(custom_group, 3))


# ---- wrappers


def foreign_hook(state: list[torch.dtype], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    state.append(bucket.buffer().dtype)
    tensor = bucket.buffer().div_(dist.get_world_size())
    future = dist.all_reduce(tensor, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def wrapped_foreign(rank: int, world_size: int, name: str) -> Any:
    model, plain = make_model(), make_model()
    dtypes: list[torch.dtype] = []
    model.register_comm_hook(dtypes, getattr(classic, name)(foreign_hook))
    result = backward(model, rank, 0)
    return result, distance(result, backward(plain, rank, 0)), set(map(str, dtypes))


@pytest.mark.parametrize(("kind", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_wrapper_hands_a_foreign_hook_16_bits(kind: str, dtype: torch.dtype) -> None:
    results = run_ranks(wrapped_foreign, 2, f"{kind}_compress_wrapper")
    assert_equal_ranks([gradients for gradients, _, _ in results])
    assert all(seen == {str(dtype)} for _, _, seen in results)
    assert max(error for _, error, _ in results) <= 8 * torch.finfo(dtype).eps / 2


def wrapped_allreduce(rank: int, world_size: int) -> bool:
    model, other = make_model(), make_model()
    model.register_comm_hook(None, classic.fp16_compress_wrapper(classic.allreduce_hook))
    other.register_comm_hook(None, classic.fp16_compress_hook)
    return all(map(torch.equal, backward(model, rank, 0), backward(other, rank, 0)))


def test_fp16_wrapper_of_allreduce_is_the_fp16_hook() -> None:
    assert all(run_ranks(wrapped_allreduce, 2))


# ---- PowerSGD


def as_matrix(columns: Tensor) -> Tensor:
    """Orthonormal columns of the same span."""
    return torch.linalg.qr(columns)[0]


def predicted_second_step(
    first: list[Tensor], means: list[list[Tensor]], rank: int
) -> list[Tensor]:
    """What PowerSGD gives in its second step, from its first result and the plain averages.

    All is linear in the mean, so the ranks' residuals only matter by their mean, M1 - G1; the warm
    start is the row space of G1.
    """
    predicted = []
    for result, mean1, mean2 in zip(first, *means, strict=True):
        if result.dim() < 2:
            predicted.append(mean2)
            continue
        corrected = (mean2 + mean1 - result).double()
        rows = torch.linalg.svd(result.double())[2][:rank]
        basis = as_matrix(corrected @ rows.T)
        predicted.append((basis @ basis.T @ corrected).to(mean2.dtype))
    return predicted


def powersgd(rank: int, world_size: int, approximation_rank: int) -> Any:
    model, plain = make_model(), make_model()
    state = classic.PowerSGDState(None, approximation_rank, start_powerSGD_iter=1)
    model.register_comm_hook(state, classic.powerSGD_hook)
    results = [backward(model, rank, step) for step in range(3)]
    means = [backward(plain, rank, step) for step in range(3)]
    dense_is_plain = all(map(torch.equal, results[0], means[0]))
    predicted = predicted_second_step(results[1], means[1:], approximation_rank)
    return results, dense_is_plain, distance(results[2], predicted), state.compression_stats()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("approximation_rank", [1, 3])
def test_powersgd_equals_an_independent_computation(
    approximation_rank: int, world_size: int
) -> None:
    results = run_ranks(powersgd, world_size, approximation_rank)
    assert_equal_ranks([gradients for gradients, _, _, _ in results])
    assert all(dense_is_plain for _, dense_is_plain, _, _ in results)
    # Rounding of float32 (6e-8) times the condition of the factors, below 1e3 for random ones.
    assert max(error for _, _, error, _ in results) < 1e-4
    entries = LAYERS * (SIDE * SIDE + SIDE)
    sent = LAYERS * (2 * SIDE * approximation_rank + SIDE)
    assert results[0][3] == (entries / sent, 2 * entries, 2 * sent)


def many_buckets(rank: int, world_size: int, name: str) -> Any:
    model = make_model(18)
    state = classic.PowerSGDState(None, 2, start_powerSGD_iter=0)
    model.register_comm_hook(state, getattr(classic, name))
    return [backward(model, rank, step) for step in range(10)][-1]


@pytest.mark.parametrize("name", ["powerSGD_hook", "batched_powerSGD_hook"])
def test_many_buckets_on_four_ranks_give_equal_bits(name: str) -> None:
    results = run_ranks(many_buckets, 4, name)
    assert_equal_ranks(results)
    assert all(gradient.isfinite().all() for gradient in results[0])


def exact_at_full_rank(rank: int, world_size: int, name: str) -> float:
    model, plain = make_model(2), make_model(2)
    state = classic.PowerSGDState(None, 8, 0, min_compression_rate=0, use_error_feedback=False)
    model.register_comm_hook(state, getattr(classic, name))
    inputs = torch.randn(2, SIDE, generator=torch.Generator().manual_seed(rank))
    for one in (model, plain):  # gradients of rank 2 on each of 2 ranks
        one(inputs).square().sum().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max(((a.grad - b.grad).norm() / b.grad.norm()).item() for a, b in pairs)


def test_gradients_of_low_rank_arrive_exactly() -> None:
    assert max(run_ranks(exact_at_full_rank, 2, "powerSGD_hook")) < 1e-5


def switched_rank(rank: int, world_size: int) -> Any:
    model = make_model()
    state = classic.PowerSGDState(None, 1, start_powerSGD_iter=0)
    model.register_comm_hook(state, classic.powerSGD_hook)
    ranks = []
    for step, approximation_rank in enumerate([1, 1, 3, 3, 2]):
        state.matrix_approximation_rank = approximation_rank
        weight = backward(model, rank, step)[0]
        ranks.append(int(torch.linalg.matrix_rank(weight, rtol=1e-4)))
    return ranks


def test_another_rank_takes_effect_in_the_next_step() -> None:
    assert run_ranks(switched_rank, 2) == [[1, 1, 3, 3, 2]] * 2


def two_models(rank: int, world_size: int) -> bool:
    shared = classic.PowerSGDState(None, 2, start_powerSGD_iter=1)
    both = [make_model(), make_model(3)]
    apart = [make_model(), make_model(3)]
    for model in both:
        model.register_comm_hook(shared, classic.powerSGD_hook)
    for model in apart:
        model.register_comm_hook(
            classic.PowerSGDState(None, 2, start_powerSGD_iter=1), classic.powerSGD_hook
        )
    results = [[backward(model, rank, s) for s in range(4) for model in x] for x in (both, apart)]
    same = all(all(map(torch.equal, *pair)) for pair in zip(*results, strict=True))
    with pytest.raises(RegistrationError, match="2 models"):
        shared.state_dict()
    return same and shared.iter == 4


def test_one_state_on_two_models_is_as_two_states() -> None:
    assert all(run_ranks(two_models, 2))


def wrapped_powersgd(rank: int, world_size: int) -> Any:
    model, other = make_model(), make_model()
    state, exact = (classic.PowerSGDState(None, 2, start_powerSGD_iter=1) for _ in range(2))
    model.register_comm_hook(state, classic.bf16_compress_wrapper(classic.powerSGD_hook))
    other.register_comm_hook(exact, classic.powerSGD_hook)
    results = [(backward(model, rank, step), backward(other, rank, step)) for step in range(3)]
    memory = state.state_dict()[f"rank{rank}"]["memory"]["residual"]
    dtypes = {str(value.dtype) for value in memory.values()}
    # The first compressed step; later ones start from different factors.
    return results[1][0], distance(*results[1]), dtypes


def test_wrapped_powersgd_keeps_its_residual_in_float32() -> None:
    results = run_ranks(wrapped_powersgd, 2)
    assert_equal_ranks([gradients for gradients, _, _ in results])
    assert all(dtypes == {"torch.float32"} for _, _, dtypes in results)
    assert max(error for _, error, _ in results) < 8 * 2**-8


def resumed(rank: int, world_size: int, way: str, hook_name: str) -> bool:
    hook = getattr(classic, hook_name)
    straight, state = make_model(), classic.PowerSGDState(None, 2, start_powerSGD_iter=2)
    straight.register_comm_hook(state, hook)
    train(straight, rank, range(5))
    weights = copy.deepcopy(straight.module.state_dict())
    file = io.BytesIO()
    torch.save(state if way == "pickle" else state.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file)  # weights_only=True is the default
    later = train(straight, rank, range(5, 8))

    again = make_model(bucket_cap_mb=0.02)
    again.module.load_state_dict(weights)
    other = loaded
    if way != "pickle":
        other = classic.PowerSGDState(None, 2, start_powerSGD_iter=2)
    if way == "before":
        other.load_state_dict(loaded)
    again.register_comm_hook(other, hook)
    if way == "after":
        other.load_state_dict(loaded)
    assert other.iter == 5
    return all(map(torch.equal, train(again, rank, range(5, 8)), later))


@pytest.mark.parametrize("way", ["pickle", "before", "after"])
def test_resumed_powersgd_continues_bit_for_bit_with_other_buckets(way: str) -> None:
    assert all(run_ranks(resumed, 2, way, "powerSGD_hook"))


def mixed_up(rank: int, world_size: int) -> str:
    model, state = make_model(), classic.PowerSGDState(None, start_powerSGD_iter=0)
    model.register_comm_hook(state, classic.powerSGD_hook)
    backward(model, rank, 0)
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, copy.deepcopy(state))
    fresh = make_model()
    theirs = everyone[1 - rank].__getstate__()["saved"][0][0]
    fresh.register_comm_hook(everyone[1 - rank], classic.powerSGD_hook)
    with pytest.raises(CheckpointError, match="every rank loads its own file, or all the same"):
        backward(fresh, rank, 1)
    with pytest.raises(CheckpointError, match="Residuals differ per rank"):
        state.load_state_dict(theirs)
    return "refused"


def test_states_that_were_mixed_up_are_refused_on_all_ranks() -> None:
    assert run_ranks(mixed_up, 2) == ["refused"] * 2


def on_fewer_ranks(rank: int, world_size: int, folder: str) -> Any:
    """Gradients and warnings with a state of rank 0 of 3, and a gathered one, on 2 ranks."""
    model, state = make_model(), classic.PowerSGDState(None, 2, start_powerSGD_iter=1)
    model.register_comm_hook(state, classic.powerSGD_hook)
    train(model, rank, range(3))
    saved = {"alone": copy.deepcopy(state), "gathered": state.gathered()}
    if rank == 0:
        torch.save(saved, f"{folder}/state")
    dist.barrier()
    pair = dist.new_group([0, 1])
    found, kept = {}, []
    for name, loaded in torch.load(f"{folder}/state").items() if rank < 2 else ():
        again = make_model(process_group=pair)
        kept.append(again)
        again.register_comm_hook(loaded, classic.powerSGD_hook)
        assert loaded.iter == 3
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found[name] = flat(backward(again, rank, 3)), len(caught)
    return found


def test_a_state_of_one_rank_or_of_all_continues_on_fewer_ranks(tmp_path: Path) -> None:
    left, right, _ = run_ranks(on_fewer_ranks, 3, str(tmp_path))
    for name, warned in (("alone", 1), ("gathered", 0)):
        assert_equal_ranks([left[name][0], right[name][0]])
        assert (left[name][1], right[name][1]) == (warned, 0)
    assert not torch.equal(left["alone"][0][0], left["gathered"][0][0])


def shown(rank: int, world_size: int, hook_name: str) -> Any:
    """How far the residuals are from their law, and shapes of the factors."""
    model, plain = make_model(4), make_model(4)
    state = classic.PowerSGDState(None, 2, start_powerSGD_iter=2)
    model.register_comm_hook(state, getattr(classic, hook_name))
    owed = torch.zeros(())
    for step in range(4):
        assert bool(state.error_dict) == bool(state.q_memory_dict) == (step > 2)
        assert not state.p_memory_dict
        result, mean = flat(backward(model, rank, step))[0], flat(backward(plain, rank, step))[0]
        owed = owed + (mean - result).sum()
    names = dict(model.module.named_parameters())
    assert set(state.error_dict) == set(names)
    errors = torch.cat([one.flatten() for one in state.error_dict.values()])
    dist.all_reduce(errors)
    # Buckets have their own order of entries, which their sum does not know.
    off = (errors.sum() / world_size - owed).abs() / errors.abs().sum()
    assert set(state.q_memory_dict) <= set(names)
    return off.item(), [tuple(factors.shape) for factors in state.q_memory_dict.values()]


@pytest.mark.parametrize(
    ("hook_name", "shapes"),
    # Two layers of 40 x 40 are in a bucket; its 3280 entries are a square of 58 x 58.
    [("powerSGD_hook", [(2, SIDE)] * 4), ("batched_powerSGD_hook", [(2, 58)] * 2)],
)
def test_memory_is_shown_under_torchs_names(hook_name: str, shapes: Any) -> None:
    for off, found in run_ranks(shown, 2, hook_name):
        assert off < 1e-5  # float32 rounds by 6e-8; a sum of 6,560 entries 100 times as much
        assert found == shapes


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


def with_options(rank: int, world_size: int) -> dict[str, tuple[bool, bool]]:
    """By option: whether it changes the gradients, given at once and between two steps."""

    def run(changes: dict[str, Any], start: int) -> Tensor:
        model = make_model(2)
        early = changes if start == 0 else {}
        state = classic.PowerSGDState(None, **{"start_powerSGD_iter": 1, **early})
        model.register_comm_hook(state, classic.powerSGD_hook)
        gradients = []
        for step in range(4):
            if step == start:
                for name, value in changes.items():
                    setattr(state, name, value)
            gradients += flat(backward(model, rank, step))
        model.zero_grad()
        (model(torch.zeros(1, SIDE)) * 0).sum().backward()  # a gradient of zeros
        gradients += flat([parameter.grad for parameter in model.parameters()])
        return torch.cat(gradients)

    usual = run({}, 0)
    assert usual.isfinite().all()
    found = {}
    for name, value in OPTIONS.items():
        results = [run({name: value}, start) for start in (0, 2)]
        assert all(bool(result.isfinite().all()) for result in results)
        found[name] = tuple(not torch.equal(result, usual) for result in results)
    return found


def test_every_option_has_its_effect_or_is_said_to_have_none() -> None:
    for found in run_ranks(with_options, 2):
        for name, effects in found.items():
            late = name != "random_seed"  # a warm start has forgotten its first factors
            expected = (False, False) if name in CHANGES_NO_BIT else (True, late)
            assert effects == expected, name
    text = " ".join((classic.PowerSGDState.__doc__ or "").split())
    for name in ("orthogonalization_epsilon", "batch_tensors_with_same_shape"):
        assert f"{name}: accepted, and" in text


def regrouped(rank: int, world_size: int) -> Any:
    """The group of a state changes between two steps; the residual stays."""
    halves = [dist.new_group([0, 1]), dist.new_group([2])]
    model, state = make_model(2), classic.PowerSGDState(None, 2, start_powerSGD_iter=1)
    model.register_comm_hook(state, classic.powerSGD_hook)
    train(model, rank, range(3))
    before = state.state_dict()[f"rank{rank}"]["memory"]["residual"]
    state.process_group = halves[rank // 2]
    result = flat(backward(model, rank, 3))
    hook = next(iter(state._on_models.inners.values())).hook
    first = {name: bool(value.any()) for name, value in before.items()}
    return result, (hook.world_size, hook.step, any(first.values()))


def test_another_process_group_takes_effect_in_the_next_step() -> None:
    (left, a), (right, b), (alone, c) = run_ranks(regrouped, 3)
    assert_equal_ranks([left, right])
    assert not torch.equal(left[0], alone[0])
    assert [a, b, c] == [(2, 4, True), (2, 4, True), (1, 4, True)]


def own_hook(rank: int, world_size: int) -> int:
    """A hook of one's own with a state of the package counts its steps as torch's does."""
    model, state = make_model(4), classic.PowerSGDState(None)

    buckets = 0

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        nonlocal buckets
        buckets += 1
        state.maybe_increase_iter(bucket)
        work = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return work.then(lambda done: done.value()[0])

    model.register_comm_hook(state, as_hook(hook))
    for step in range(3):
        backward(model, rank, step)
    other, running = make_model(2), classic.PowerSGDState(None)
    other.register_comm_hook(running, classic.powerSGD_hook)
    for step in range(3):
        backward(other, rank, step)
    running.maybe_increase_iter(LastBucket())  # type: ignore[arg-type]
    assert running.iter == 3
    assert buckets > 3  # more than one in a step
    with pytest.raises(ValueError, match="0 or more, got -1"):
        running.iter = -1
    return state.iter


class LastBucket:
    def is_last(self) -> bool:
        return True


def test_a_hook_of_ones_own_counts_steps_in_the_state() -> None:
    assert run_ranks(own_hook, 2) == [3, 3]


def unfrozen(rank: int, world_size: int) -> tuple[int, bool, int]:
    net = nn.Sequential(*[nn.Linear(SIDE, SIDE) for _ in range(3)])
    net[0].requires_grad_(False)
    state = classic.PowerSGDState(None, 2, start_powerSGD_iter=2)
    model = DistributedDataParallel(net, bucket_cap_mb=0.01)
    model.register_comm_hook(state, classic.powerSGD_hook)
    train_only = [backward_trainable(model, rank, step) for step in range(4)]
    before = state.state_dict()[f"rank{rank}"]["memory"]["residual"]["2.weight"]
    net[0].requires_grad_(True)
    again = DistributedDataParallel(net, bucket_cap_mb=0.01)
    again.register_comm_hook(state, classic.powerSGD_hook)
    state.iter = 0  # dense again, for the residual to be seen
    train_only.append(backward_trainable(again, rank, 4))
    after = state.state_dict()[f"rank{rank}"]["memory"]["residual"]["2.weight"]
    backward_trainable(again, rank, 5)
    return state.iter, torch.equal(before, after), len(train_only[-1])


def backward_trainable(model: nn.Module, rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    model(torch.randn(8, SIDE, generator=generator)).square().sum().backward()
    return [one.grad.clone() for one in model.parameters() if one.grad is not None]


def test_a_state_goes_on_when_frozen_layers_are_unfrozen() -> None:
    assert run_ranks(unfrozen, 2) == [(2, True, 6)] * 2


# ---- post-local SGD


def local_sgd(rank: int, world_size: int, allreduce: bool, given: bool) -> list[float]:
    """Distances to the global mean (early, late), to the pair's mean and to the own gradient."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = pairs[rank // 2]
    model = make_model()
    state = classic.PostLocalSGDState(None, pair if given else None, 2, allreduce)
    model.register_comm_hook(state, classic.post_localSGD_hook)
    results = [backward(model, rank, step) for step in range(4)]
    everywhere, here = make_model(), make_model(process_group=pair)
    local = make_model(process_group=pair)
    assert state.iter == 2
    with local.no_sync():
        own = backward(local, rank, 3)
    return [
        distance(results[1], backward(everywhere, rank, 1)),
        distance(results[3], backward(everywhere, rank, 3)),
        distance(results[3], backward(here, rank, 3)),
        distance(results[3], own),
    ]


@pytest.mark.parametrize(
    ("allreduce", "given", "zeros"),
    # All ranks are on this host: without a subgroup the local mean is the global one.
    [(True, True, [0, 2]), (False, True, [0, 3]), (True, False, [0, 1])],
)
def test_post_local_sgd_averages_globally_then_locally(
    allreduce: bool, given: bool, zeros: list[int]
) -> None:
    for distances in run_ranks(local_sgd, 4, allreduce, given):
        # Sums of 4 numbers in two orders differ in the last bits of float32.
        assert [position for position in range(4) if distances[position] < 1e-5] == zeros


def resumed_local_sgd(rank: int, world_size: int) -> Any:
    """A state that was saved in the local steps; loaded by torch.load as it is by default."""
    own = [dist.new_group([one]) for one in range(world_size)][rank]
    seen = []
    for subgroup in (own, None):
        model = make_model(2)
        state = classic.PostLocalSGDState(None, subgroup, 2)
        model.register_comm_hook(state, classic.post_localSGD_hook)
        for step in range(4):
            expected = backward(model, rank, step)
        file = io.BytesIO()
        torch.save({"comm_hook": classic.post_localSGD_hook, "comm_hook_state": state}, file)
        file.seek(0)
        loaded = torch.load(file)
        again = make_model(2)
        again.register_comm_hook(loaded["comm_hook_state"], loaded["comm_hook"])
        if subgroup is not None:
            with pytest.raises(RegistrationError, match=r"set state\.subgroup"):
                backward(again, rank, 3)
            loaded["comm_hook_state"].subgroup = subgroup
            again = make_model(2)
            again.register_comm_hook(loaded["comm_hook_state"], loaded["comm_hook"])
        result = backward(again, rank, 3)
        seen.append((loaded["comm_hook_state"].iter, all(map(torch.equal, result, expected))))
    return seen


def test_a_state_of_post_local_sgd_is_saved_and_goes_on() -> None:
    assert run_ranks(resumed_local_sgd, 2) == [[(2, True)] * 2] * 2


def averaged_periodically(rank: int, world_size: int) -> list[Tensor]:
    own = [dist.new_group([one]) for one in range(world_size)][rank]
    model = make_model()
    state = classic.PostLocalSGDState(None, own, 2)
    model.register_comm_hook(state, classic.post_localSGD_hook)
    averager = PeriodicModelAverager(period=3, warmup_steps=2)
    for step in range(6):
        train(model, rank, range(step, step + 1))
        averager.average_parameters(model.parameters())
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_post_local_sgd_works_with_torchs_model_averager() -> None:
    assert_equal_ranks(run_ranks(averaged_periodically, 2))


# ---- what cannot work says so


@pytest.mark.parametrize("hook", [classic.powerSGD_hook, classic.post_localSGD_hook])
def test_a_missing_state_is_named(hook: Any) -> None:
    with pytest.raises(TypeError, match=r"State as state, got builtins\.NoneType"):
        hook(None, object())


def test_a_state_that_is_no_group_is_named() -> None:
    with pytest.raises(TypeError, match="process group, or None"):
        classic.allreduce_hook("gloo", object())  # type: ignore[arg-type]
