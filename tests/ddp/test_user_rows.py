"""What users of torch's built-in hooks report as broken works here, or says clearly why it cannot.

Issues of github.com/pytorch/pytorch by the number of a test: 1: 75666, 79334, 102717; 8: 48478.
"""

from __future__ import annotations

import functools
import io
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks import classic
from commhooks.errors import CheckpointError, HookNotAttachedError, RegistrationError
from tests.ddp.test_classic import (
    SIDE,
    assert_equal_ranks,
    backward,
    distance,
    make_model,
    train,
)
from tests.tools.harness import run_ranks

OVERFLOWS = "a float16 payload is not finite"


class Given(nn.Module):
    """A model whose gradients are the tensors it is called with."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.zeros(shape) for shape in shapes])

    def forward(self, *gradients: Tensor) -> Tensor:
        pairs = zip(self.weights, gradients, strict=True)
        return torch.stack([(weight * gradient).sum() for weight, gradient in pairs]).sum()


def given(*shapes: tuple[int, ...]) -> Any:
    return DistributedDataParallel(Given(*shapes), bucket_cap_mb=0.005)


def reduce(model: nn.Module, *gradients: Tensor) -> list[Tensor]:
    """The averages of the gradients given."""
    model.zero_grad()
    model(*gradients).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def noise(rank: int, step: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def through_file(value: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


def powersgd_model(**options: Any) -> Any:
    model = make_model(**options)
    state = classic.PowerSGDState(None, 2, start_powerSGD_iter=2)
    model.register_comm_hook(state, classic.powerSGD_hook)
    return model, state


# ---- R1


def resume(rank: int, world_size: int, name: str) -> list[Tensor]:
    model, state = make_model(), classic.PowerSGDState(None, 2, start_powerSGD_iter=2)
    model.register_comm_hook(state, getattr(classic, name))
    train(model, rank, range(5))
    saved = through_file({"model": model.module.state_dict(), "state": state})
    again = make_model()
    again.module.load_state_dict(saved["model"])
    again.register_comm_hook(saved["state"], getattr(classic, name))
    return train(again, rank, range(5, 8))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["powerSGD_hook", "batched_powerSGD_hook"])
def test_r01_a_saved_powersgd_state_resumes_in_a_new_model_of_many_buckets(name: str) -> None:
    assert_equal_ranks(run_ranks(resume, 2, name))


# ---- R2


def load_with_default_options(rank: int, world_size: int) -> Any:
    model, state = powersgd_model()
    train(model, rank, range(4))
    loaded = through_file({"state": state, "dict": state.state_dict()})
    return loaded["state"].iter, loaded["dict"]["step"]


@pytest.mark.slow
def test_r02_torch_load_takes_the_state_with_its_default_weights_only() -> None:
    assert run_ranks(load_with_default_options, 2) == [(4, 4)] * 2


# ---- R3


def reload_model(rank: int, world_size: int) -> bool:
    model = make_model()
    hook = commhooks.register(model, "powersgd", rank=2)
    backward(model, rank, 0)
    loaded = through_file(model, weights_only=False)
    with pytest.raises(HookNotAttachedError, match=r"commhooks\.register"):
        backward(loaded, rank, 1)
    again = commhooks.register(loaded, "powersgd", rank=2)
    again.load_state_dict(hook.state_dict())
    backward(loaded, rank, 1)
    return again.step == 2 and again.calls > 0


@pytest.mark.slow
def test_r03_a_reloaded_model_whose_hook_would_not_run_raises_until_it_is_registered() -> None:
    assert all(run_ranks(reload_model, 2))


# ---- R4


SHAPES = ((SIDE, SIDE), (SIDE,), (SIDE, SIDE))


def one_infinite_step(rank: int, world_size: int) -> Any:
    # One bucket per run of steps alike, so that both runs sum in the same order.
    model, clean = given(*SHAPES), given(*SHAPES)
    hook = commhooks.register(model, "powersgd", rank=2)
    commhooks.register(clean, "powersgd", rank=2)
    for step in (0, 1):
        reduce(model, *noise(rank, step, *SHAPES))
        reduce(clean, *noise(rank, step, *SHAPES))
    before = hook.residual("weights.0")
    bad = noise(rank, 2, *SHAPES)
    if rank == 0:
        bad[0][3, 5] = float("inf")
    unusable = reduce(model, *bad)
    unchanged = torch.equal(before, hook.residual("weights.0"))
    later = [reduce(one, *noise(rank, 3, *SHAPES)) for one in (model, clean)]
    return (
        bool(unusable[0].isfinite().any()),
        unchanged,
        all(map(torch.equal, *later)),
        hook.skipped_steps,
    )


@pytest.mark.slow
def test_r04_one_infinite_gradient_spoils_one_step_only() -> None:
    assert run_ranks(one_infinite_step, 2) == [(False, True, True, 1)] * 2


# ---- R5


def overflow_in_the_cast(rank: int, world_size: int) -> list[bool]:
    model = given(*SHAPES)
    state = classic.PowerSGDState(None, 2, start_powerSGD_iter=0)
    model.register_comm_hook(state, classic.fp16_compress_wrapper(classic.powerSGD_hook))
    finite = []
    for step, scale in enumerate([1.0, 1.0, 3e5, 1.0, 1.0]):
        results = reduce(model, *[scale * one for one in noise(rank, step, *SHAPES)])
        finite.append(all(bool(result.isfinite().all()) for result in results))
    return finite


@pytest.mark.slow
def test_r05_a_float16_overflow_under_powersgd_is_forgotten_after_the_step() -> None:
    results = run_ranks(overflow_in_the_cast, 2, ignore_warnings=(OVERFLOWS,))
    assert results == [[True, True, False, True, True]] * 2


# ---- R6


def extreme_values(rank: int, world_size: int) -> Any:
    values = torch.tensor([1e5, 4e-8])
    bf16, fp16 = given((2,)), given((2,))
    bf16.register_comm_hook(None, classic.bf16_compress_hook)
    fp16.register_comm_hook(None, classic.fp16_compress_hook)
    (kept,) = reduce(bf16, values)
    with pytest.warns(RuntimeWarning, match=OVERFLOWS):
        reduce(fp16, values)
    return (kept - values).abs().div(values).max().item()


@pytest.mark.slow
def test_r06_a_float16_overflow_is_reported_and_bfloat16_keeps_the_range() -> None:
    assert max(run_ranks(extreme_values, 2)) <= 2**-7  # two roundings to 8 bits


# ---- R7


def zero_layer(rank: int, world_size: int) -> bool:
    model = given(*SHAPES)
    state = classic.PowerSGDState(None, 2, start_powerSGD_iter=0)
    model.register_comm_hook(state, classic.powerSGD_hook)
    for step in range(3):
        gradients = noise(rank, step, *SHAPES)
        gradients[0].zero_()
        results = reduce(model, *gradients)
    return not results[0].any() and all(bool(one.isfinite().all()) for one in results)


@pytest.mark.slow
def test_r07_a_layer_with_zero_gradient_stays_zero_under_powersgd() -> None:
    assert all(run_ranks(zero_layer, 2))


# ---- R8


def many_buckets(rank: int, world_size: int) -> Any:
    model = make_model(24, bucket_cap_mb=0.005)
    state = classic.PowerSGDState(None, 2, start_powerSGD_iter=2)
    indices: set[int] = set()

    def counted(state: Any, bucket: Any) -> Any:
        indices.add(bucket.index())
        return classic.powerSGD_hook(state, bucket)

    model.register_comm_hook(state, commhooks.hook.as_hook(counted))
    for step in range(20):
        gradients = backward(model, rank, step)
    return len(indices), gradients


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_r08_powersgd_runs_on_gloo_with_many_buckets(world_size: int) -> None:
    results = run_ranks(many_buckets, world_size)
    assert_equal_ranks([gradients for _, gradients in results])
    assert results[0][0] >= 20


# ---- R9, R10


def hook_on_gloo(rank: int, world_size: int, name: str) -> Any:
    model, plain = make_model(), make_model()
    model.register_comm_hook(None, getattr(classic, name))
    result = backward(model, rank, 0)
    return result, distance(result[:1], backward(plain, rank, 0)[:1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quantization_pertensor_hook", "quantization_perchannel_hook"])
def test_r09_quantization_hooks_run_on_gloo(name: str) -> None:
    results = run_ranks(hook_on_gloo, 2, name)
    assert_equal_ranks([gradients for gradients, _ in results])


@pytest.mark.slow
def test_r10_bf16_compress_hook_runs_on_gloo() -> None:
    results = run_ranks(hook_on_gloo, 2, "bf16_compress_hook")
    assert_equal_ranks([gradients for gradients, _ in results])
    assert max(error for _, error in results) <= 4 * 2**-8


# ---- R11, R12, R13


def postponed(state: list[int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """This module has postponed annotations."""
    state.append(bucket.index())
    return classic.allreduce_hook(None, bucket)


def other_name(state: list[int], gradients: Any) -> Any:
    return postponed(state, gradients)


def with_option(state: list[int], bucket: Any, *, option: int) -> Any:
    return postponed(state, bucket)


class CallableHook:
    """A hook that is an object."""

    def __call__(self, state: list[int], bucket: Any) -> Any:
        return postponed(state, bucket)


CALLABLES = {
    "postponed": postponed,
    "other_name": other_name,
    "partial": functools.partial(with_option, option=3),
    "object": CallableHook(),
}


def any_callable(rank: int, world_size: int, name: str) -> bool:
    model, plain = make_model(), make_model()
    seen: list[int] = []
    model.register_comm_hook(seen, commhooks.hook.as_hook(CALLABLES[name]))
    same = all(map(torch.equal, backward(model, rank, 0), backward(plain, rank, 0)))
    return same and bool(seen)


@pytest.mark.slow
def test_r11_a_hook_with_postponed_annotations_runs() -> None:
    assert isinstance(postponed.__annotations__["bucket"], str)
    assert all(run_ranks(any_callable, 2, "postponed"))


@pytest.mark.slow
def test_r12_a_hook_whose_second_argument_has_another_name_runs() -> None:
    assert all(run_ranks(any_callable, 2, "other_name"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["partial", "object"])
def test_r13_a_partial_and_an_object_run_as_hooks(name: str) -> None:
    assert all(run_ranks(any_callable, 2, name))


# ---- R14


def second_registration(rank: int, world_size: int) -> bool:
    model, plain = make_model(), make_model()
    hook = commhooks.register(model, "powersgd", rank=2, error_feedback=False)
    backward(model, rank, 0)
    with pytest.raises(RegistrationError, match=r"hook\.switch"):
        commhooks.register(model, "none")
    hook.switch("none")
    backward(plain, rank, 0)
    return all(map(torch.equal, backward(model, rank, 1), backward(plain, rank, 1)))


@pytest.mark.slow
def test_r14_switch_changes_the_scheme_where_a_second_registration_cannot() -> None:
    assert all(run_ranks(second_registration, 2))


# ---- R15


def python_reducer(rank: int, world_size: int, name: str) -> bool:
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        model = make_model(2)
        if name == "register":
            commhooks.register(model, "powersgd")
        elif name == "powerSGD_hook":
            model.register_comm_hook(classic.PowerSGDState(None), classic.powerSGD_hook)
        else:
            model.register_comm_hook(None, getattr(classic, name))
        with pytest.raises(HookNotAttachedError, match="optimize_ddp"):
            backward(model, rank, 0)
    return True


@pytest.mark.slow
@pytest.mark.parametrize("name", ["register", "powerSGD_hook", "fp16_compress_hook"])
def test_r15_under_the_python_reducer_the_error_names_the_setting(name: str) -> None:
    assert all(run_ranks(python_reducer, 1, name))


# ---- R16


def two_models_and_another_rank(rank: int, world_size: int) -> Any:
    state = classic.PowerSGDState(None, 1, start_powerSGD_iter=1)
    models = [make_model(), make_model(3)]
    for model in models:
        model.register_comm_hook(state, classic.powerSGD_hook)
    for step in range(6):
        state.matrix_approximation_rank = 1 if step < 3 else 4
        results = [backward(model, rank, step) for model in models]
    ranks = [int(torch.linalg.matrix_rank(one[0], rtol=1e-4)) for one in results]
    return results, ranks


@pytest.mark.slow
def test_r16_one_state_serves_two_models_and_takes_another_rank_mid_run() -> None:
    results = run_ranks(two_models_and_another_rank, 2)
    assert_equal_ranks([gradients for gradients, _ in results])
    assert [ranks for _, ranks in results] == [[4, 4]] * 2


# ---- R17


def per_rank_residuals(rank: int, world_size: int) -> Any:
    model = make_model()
    hook = commhooks.register(model, "powersgd", rank=2)
    backward(model, rank, 0)
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, through_file(hook.state_dict()))
    fresh = make_model()
    again = commhooks.register(fresh, "powersgd", rank=2)
    again.load_state_dict(everyone[rank])
    name = "0.weight"
    restored = torch.equal(hook.residual(name), again.residual(name))
    with pytest.raises(CheckpointError, match="Residuals differ per rank"):
        again.load_state_dict(everyone[1 - rank])
    kept = torch.equal(hook.residual(name), again.residual(name))
    return restored and kept, hook.residual(name)


@pytest.mark.slow
def test_r17_residuals_are_restored_per_rank_and_another_ranks_are_refused() -> None:
    (good0, residual0), (good1, residual1) = run_ranks(per_rank_residuals, 2)
    assert good0
    assert good1
    assert distance([residual0], [residual1]) > 0.5


def classic_state_of_rank_zero(rank: int, world_size: int) -> bool:
    model, state = powersgd_model()
    train(model, rank, range(3))
    saved = [state.state_dict()]
    dist.broadcast_object_list(saved, src=0)
    if rank == 0:
        state.load_state_dict(saved[0])
    else:
        with pytest.raises(CheckpointError, match="Residuals differ per rank"):
            state.load_state_dict(saved[0])
    return True


@pytest.mark.slow
def test_r17_a_classic_state_of_rank_zero_is_refused_on_rank_one() -> None:
    assert all(run_ranks(classic_state_of_rank_zero, 2))


# ---- R18


def sharded(rank: int, world_size: int) -> bool:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(nn.Linear(SIDE, SIDE), device_id=torch.device("cpu"))
    with pytest.raises(RegistrationError, match="FSDP"):
        commhooks.register(model, "powersgd")
    model.register_comm_hook(classic.PowerSGDState(None), classic.powerSGD_hook)
    with pytest.raises(RegistrationError, match="FSDP"):
        model(torch.randn(4, SIDE)).sum().backward()
    return True


@pytest.mark.slow
def test_r18_on_fsdp_the_error_says_what_to_wrap_in() -> None:
    assert all(run_ranks(sharded, 2, ignore_warnings=(".*",)))


# ---- R23


def uneven_inputs(rank: int, world_size: int) -> Any:
    model, state = powersgd_model()
    with model.join():
        train(model, rank, range(4 if rank == 0 else 7))
    return [parameter.detach().clone() for parameter in model.parameters()], state.iter


@pytest.mark.slow
def test_r23_join_with_uneven_inputs_works_under_powersgd() -> None:
    results = run_ranks(uneven_inputs, 2)
    assert_equal_ranks([parameters for parameters, _ in results])
    assert [steps for _, steps in results] == [7, 7]


# ---- R24


def accumulation(rank: int, world_size: int) -> Any:
    model, plain = make_model(), make_model()
    hook = commhooks.register(model, "allreduce")
    for one in (model, plain):
        for step in range(4):
            with ExitStack() as stack:
                if step < 3:
                    stack.enter_context(one.no_sync())
                one(torch.full((8, SIDE), float(step + rank))).square().sum().backward()
    results = [[parameter.grad for parameter in one.parameters()] for one in (model, plain)]
    return hook.step, all(map(torch.equal, *results))


@pytest.mark.slow
def test_r24_with_no_sync_the_hook_sees_the_accumulated_sum_once() -> None:
    assert run_ranks(accumulation, 2) == [(1, True)] * 2
