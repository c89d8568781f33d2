"""Defines the laws of one step: sizes, ranks, dtypes, and values that are not finite."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from commhooks.core._layout import Layout
from commhooks.research._laws import (
    NUMEL,
    SHAPES,
    Laws,
    MakeScheme,
    exact_mean,
    gradients,
    need,
    normal,
    ranks_of,
)
from commhooks.research._simulation import Simulation
from commhooks.wrappers._feedback import without_feedback

__all__ = ["OF_A_STEP"]

OF_A_STEP = Laws()


@OF_A_STEP.add("any size and shape is averaged")
def _sizes(make: MakeScheme) -> None:
    for numel in (0, 1, 2, 31, 33, 257, 4099):
        for shape in ((numel,), (numel, 1), (1, numel)):
            layout = Layout(["p"], [shape])
            ranks = Simulation(make(), {"p": shape}, world_size=3)
            for step in range(2):  # the second step reads what the first has written
                for mean in ranks.step(gradients(3, step, numel), buckets=[layout]):
                    need(mean.shape == (numel,), f"shape {shape} gives a mean of {mean.shape}")
                    need(mean.isfinite().all(), f"shape {shape}: the mean is not finite")


@OF_A_STEP.add(
    "all ranks get equal bits, for 1 to 8 ranks",
    guide="Several collectives per bucket",
    of_agreement=True,
)
def _agreement(make: MakeScheme) -> None:
    for world_size in (1, 2, 3, 4, 5, 8):
        ranks = ranks_of(make(), world_size)
        for step in range(3):
            means = ranks.step(gradients(world_size, step))
            equal = all(torch.equal(mean, means[0]) for mean in means)
            need(equal, f"{world_size} ranks differ in step {step}")


@OF_A_STEP.add(
    "payload sizes do not depend on values, and rounds (collectives) are as declared",
    guide="Several collectives per bucket",
)
def _payload_sizes(make: MakeScheme) -> None:
    # Ranks do not send sizes: each allocates the payloads of the others by the size of its payload.
    scheme, sent = make(), []
    for factor in (0.0, 1.0, 1e20):
        ranks = ranks_of(scheme, 3)
        ranks.step([grad * factor for grad in gradients(3, 0)])
        sent.append(ranks.requests)
    need(sent[0] == sent[1] == sent[2], f"sizes differ for zeros, N(0, 1), 1e20 N(0, 1): {sent}")
    rounds = len(sent[0])
    need(rounds <= scheme.traits.rounds, f"{rounds} collectives, rounds = {scheme.traits.rounds}")


@OF_A_STEP.add("two runs are equal bit for bit", guide="Several collectives per bucket")
def _determinism(make: MakeScheme) -> None:
    first, second = ranks_of(make(), 3), ranks_of(make(), 3)
    for step in range(3):
        a, b = (ranks.step(gradients(3, step))[0] for ranks in (first, second))
        need(torch.equal(a, b), f"step {step} differs between two runs")


@OF_A_STEP.add("zeros are averaged to zeros", of_averages=True)
def _zero(make: MakeScheme) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        ranks = ranks_of(make(), 3)
        for _ in range(2):
            mean = ranks.step([torch.zeros(NUMEL, dtype=dtype)] * 3)[0]
            need(not mean.any(), f"zeros of {dtype} become {mean.abs().max().item()}")


@OF_A_STEP.add(
    "a parameter of zeros stays zero",
    guide="What a scheme declares",
    of_averages=True,
    claim="per_parameter",
)
def _zero_parameter(make: MakeScheme) -> None:
    for index, name in enumerate(SHAPES):
        ranks = ranks_of(make(), 3)
        for step in range(3):
            grads = gradients(3, step)
            for grad in grads:
                _part(grad, index).zero_()
            most = float(_part(ranks.step(grads)[0], index).abs().max())
            need(most == 0.0, f"zeros of {name!r} become {most:.3g} in step {step}")


@OF_A_STEP.add(
    "an entry that is zero stays zero",
    guide="What a scheme declares",
    of_averages=True,
    claim="keeps_zeros",
)
def _zero_entries(make: MakeScheme) -> None:
    ranks, zeros = ranks_of(make(), 3), normal(NUMEL, 77) > 0.3
    for step in range(3):
        grads = [grad.masked_fill(zeros, 0.0) for grad in gradients(3, step)]
        most = float(ranks.step(grads)[0][zeros].abs().max())
        need(most == 0.0, f"zeros between other entries become {most:.3g} in step {step}")


@OF_A_STEP.add(
    "a small parameter is as exact as a large one",
    guide="What a scheme declares",
    claim="per_parameter",
)
def _neighbours(make: MakeScheme) -> None:
    for index, (name, shape) in enumerate(SHAPES.items()):
        if math.prod(shape) < 20:
            continue  # the error of few entries is a matter of luck
        errors = {}
        for factor in (1.0, 1e-1, 1e-2, 1e-3):
            ranks, total = ranks_of(without_feedback(make()), 3), 0.0
            for step in range(4):
                grads = gradients(3, step)
                for grad in grads:
                    _part(grad, index).mul_(factor)
                exact = _part(exact_mean(grads), index)
                mean = _part(ranks.step(grads)[0].double(), index)
                total += float((mean - exact).norm() / exact.norm()) / 4
            errors[factor] = total
        text = ", ".join(f"{factor:g}: {error:.3g}" for factor, error in errors.items())
        need(
            max(errors.values()) <= 1.5 * errors[1.0] + 1e-6,
            f"relative errors of {name!r}, whose gradient is times {text}",
        )


def _part(flat: Tensor, index: int) -> Tensor:
    """Returns the entries of one of the parameters of ``SHAPES``; a view."""
    parts: tuple[Tensor, ...] = flat.split([math.prod(shape) for shape in SHAPES.values()])
    return parts[index]


@OF_A_STEP.add("signs and sizes make no difference", of_averages=True)
def _homogeneity(make: MakeScheme) -> None:
    # All of one sign, and none near zero: a scheme that takes negative entries for positive ones,
    # or adds a constant to a scale, has another error at some factor.
    grads = [grad.abs() + 0.1 for grad in gradients(3, 1)]
    errors = {}
    for factor in (1.0, -1.0, 1e-3, 1e3, 1e20):
        scaled = [grad * factor for grad in grads]
        exact = exact_mean(scaled)
        mean = ranks_of(without_feedback(make()), 3).step(scaled)[0].double()
        if mean.isfinite().all():  # 1e20 may overflow, and has to arrive as infinity or NaN then
            errors[factor] = float((mean - exact).norm() / exact.norm())
    worst, best = max(errors.values()), min(errors.values())
    text = ", ".join(f"{factor:g}: {error:.3g}" for factor, error in errors.items())
    need(worst <= 1.5 * best + 1e-2, f"relative errors for positive entries times {text}")


@OF_A_STEP.add("gradients keep their dtype")
def _dtypes(make: MakeScheme) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        ranks = ranks_of(make(), 2)
        for step in range(2):
            mean = ranks.step([grad.to(dtype) for grad in gradients(2, step)])[0]
            need(mean.dtype == dtype, f"{dtype} becomes {mean.dtype}")
            need(mean.isfinite().all(), f"{dtype}: the mean is not finite")


@OF_A_STEP.add("the results do not depend on torch's default dtype")
def _default_dtype(make: MakeScheme) -> None:
    # Scripts that train in bfloat16 set it. A buffer or a draw that is made without a dtype then
    # has another type, and another size than a kernel expects.
    usual, results = torch.get_default_dtype(), []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            ranks = ranks_of(make(), 2)
            results.append([ranks.step(gradients(2, step))[0] for step in range(2)])
        finally:
            torch.set_default_dtype(usual)
        for step, (expected, mean) in enumerate(zip(results[0], results[-1], strict=True)):
            need(torch.equal(expected, mean), f"{dtype} changes the average of step {step}")


@OF_A_STEP.add(
    "sums over entries and ranks do not overflow 16 bits", guide="Several collectives per bucket"
)
def _overflow(make: MakeScheme) -> None:
    # The mean, 20000, fits into float16, whose largest value is 65504. The sum over four ranks does
    # not, nor do sums of four entries within a rank.
    ranks = ranks_of(make(), 4, 36)
    for mean in ranks.step([torch.full((36,), 20000.0, dtype=torch.float16)] * 4):
        need((mean.abs() <= 50000.0).all(), "four ranks' 20000 in float16 are too large a sum")


def _memory(ranks: Simulation) -> list[dict[tuple[str, str], Tensor]]:
    """Returns copies of all that each rank keeps, by key and parameter."""
    return [
        {(key, name): value.clone() for key, name, value in engine.memory.items()}
        for engine in ranks.engines
    ]


def _same_memory(a: Simulation, b: Simulation) -> bool:
    return all(
        first.keys() == second.keys() and all(torch.equal(v, second[k]) for k, v in first.items())
        for first, second in zip(_memory(a), _memory(b), strict=True)
    )


@OF_A_STEP.add(
    "an entry that is not finite is so on every rank, and leaves the state as it was",
    guide="Entries that are not finite",
    of_agreement=True,
)
def _not_finite(make: MakeScheme) -> None:
    for place in (0, 77, NUMEL - 1):  # in the first matrix, and in the last vector
        for bad in (math.inf, math.nan):
            ranks, clean = ranks_of(make(), 3), ranks_of(make(), 3)
            for step in range(2):  # two steps fill the memory
                ranks.step(gradients(3, step))
                clean.step(gradients(3, step))
            grads = gradients(3, 50)
            grads[1][place] = bad
            for rank, mean in enumerate(ranks.step(grads)):
                need(not mean[place].isfinite(), f"{bad} at {place} is finite on rank {rank}")
            need(_same_memory(ranks, clean), f"{bad} at {place} of one rank changes the state")
            counts = [engine.skipped for engine in ranks.engines]
            averages = ranks.engines[0].traits.averages
            need(counts == [int(averages)] * 3, f"{bad} at {place}: skipped steps are {counts}")
