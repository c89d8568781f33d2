"""Defines the laws of one step: sizes, ranks, dtypes, and values that are not finite."""

from __future__ import annotations

import math
from contextlib import ExitStack
from functools import partialmethod
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from commhooks.core._bucket import Bucket
from commhooks.core._layout import Layout
from commhooks.core._scheme import Codec, slots_of, walk
from commhooks.research._laws import (
    LATE,
    NUMEL,
    SHAPES,
    Laws,
    MakeScheme,
    begun,
    check_law,
    exact_mean,
    gradients,
    in_words,
    normal,
    ranks_of,
)
from commhooks.research._simulation import Simulation
from commhooks.wrappers._feedback import without_feedback
from ddp_core import Collective
from ddp_core.exchange._devices import as_bytes
from ddp_core.exchange._errors import listed

__all__ = ["FIRST", "OF_A_STEP"]

OF_A_STEP = Laws()
FIRST = "a bucket is exchanged on two ranks"  # the simplest case


@OF_A_STEP.add(FIRST)
def _first(make: MakeScheme) -> None:
    ranks_of(make(), 2).step(gradients(2, 0))


@OF_A_STEP.add("any size and shape is averaged")
def _sizes(make: MakeScheme) -> None:
    for numel in (0, 1, 2, 31, 33, 257, 4099):
        for shape in ((numel,), (numel, 1), (1, numel)):
            layout = Layout(["p"], [shape])
            ranks = begun(Simulation(make(), {"p": shape}, world_size=3))
            for step in range(2):  # the second step reads what the first has written
                for mean in ranks.step(gradients(3, step, numel), buckets=[layout]):
                    check_law(mean.shape == (numel,), f"shape {shape} gives a mean of {mean.shape}")
                    check_law(mean.isfinite().all(), f"shape {shape}: the mean is not finite")


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
            for rank in range(1, world_size):
                check_law(
                    torch.equal(means[0], means[rank]),
                    f"{in_words(world_size)}, step {step}: ranks 0 and {rank} differ in "
                    f"{_unequal(means[0], means[rank])}; the average may depend only on what "
                    f"collectives have returned",
                )


def _unequal(a: Tensor, b: Tensor) -> str:
    """Returns the names of the parameters of ``SHAPES`` whose entries are not the same."""
    return listed(
        [name for i, name in enumerate(SHAPES) if not torch.equal(_part(a, i), _part(b, i))]
    )


@OF_A_STEP.add("what is declared as the same on all ranks is", guide="Persistent state")
def _same_on_all_ranks(make: MakeScheme) -> None:
    # A checkpoint has one copy of such a slot, and every rank that loads it gets that copy.
    ranks = ranks_of(make(), 3)
    _run(ranks)
    first, *others = _memory(ranks)
    for key in (slot.key for slot in slots_of(make()) if slot.resize == "same"):
        for rank, other in enumerate(others, 1):
            for name in SHAPES:
                a, b = first.get((key, name)), other.get((key, name))
                check_law(
                    _same_bits(a, b),
                    f'Slot({key!r}, resize="same"): ranks 0 and {rank} of 3 keep other values of '
                    f'{name!r}; where ranks keep values of their own, resize is "sum", "mean" or '
                    f'"drop"',
                )


def _run(ranks: Simulation, dtype: torch.dtype = torch.float32) -> None:
    """Runs three steps, of which the later ones read what the first has written, and three late."""
    for first in (ranks.engines[0].step, LATE):
        for engine in ranks.engines:
            engine.step = first
        for step in range(3):
            ranks.step([grad.to(dtype) for grad in gradients(len(ranks.engines), step)])


def _same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    # Not of the values: a NaN differs from itself.
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(as_bytes(a), as_bytes(b))


@OF_A_STEP.add("encode leaves its input as it is", guide="What a scheme declares")
def _input(make: MakeScheme) -> None:
    kinds = {type(inside) for inside in walk(make()) if isinstance(inside, Codec)}
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64) if kinds else ():
        with ExitStack() as patches:
            for kind in kinds:
                encode = partialmethod(_watched, kind.encode)
                patches.enter_context(patch.object(kind, "encode", encode))
            # Feedback hands on float32, also where gradients are not.
            for scheme in (make(), without_feedback(make())):
                _run(ranks_of(scheme, 2), dtype)


def _watched(codec: Codec, encode: Any, gradient: Tensor, bucket: Bucket) -> Any:
    """Encodes, and raises ``LawBroken`` if that has changed the gradient."""
    before = gradient.clone()
    payload = encode(codec, gradient, bucket)
    check_law(
        torch.equal(before, gradient),
        f"encode changed its input, of {gradient.dtype}, in step {bucket.step}; work on a copy "
        f"of it",
    )
    return payload


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
    check_law(
        sent[0] == sent[1] == sent[2], f"sizes differ for zeros, N(0, 1), 1e20 N(0, 1): {sent}"
    )
    rounds = len(sent[0])
    check_law(
        rounds <= scheme.traits.rounds, f"{rounds} collectives, rounds = {scheme.traits.rounds}"
    )


@OF_A_STEP.add("two runs are equal bit for bit", guide="Several collectives per bucket")
def _determinism(make: MakeScheme) -> None:
    first, second = ranks_of(make(), 3), ranks_of(make(), 3)
    for step in range(3):
        a, b = (ranks.step(gradients(3, step))[0] for ranks in (first, second))
        check_law(
            torch.equal(a, b),
            f"step {step} differs between two runs: draw from bucket.generator(name), and not from "
            f"torch's generator",
        )


@OF_A_STEP.add("zeros are averaged to zeros", of_averages=True)
def _zero(make: MakeScheme) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        ranks = ranks_of(make(), 3)
        for _ in range(2):
            mean = ranks.step([torch.zeros(NUMEL, dtype=dtype)] * 3)[0]
            check_law(not mean.any(), f"zeros of {dtype} become {mean.abs().max().item()}")


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
            check_law(most == 0.0, f"zeros of {name!r} become {most:.3g} in step {step}")


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
        check_law(most == 0.0, f"zeros between other entries become {most:.3g} in step {step}")


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
        check_law(
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
    check_law(worst <= 1.5 * best + 1e-2, f"relative errors for positive entries times {text}")


@OF_A_STEP.add("gradients keep their dtype")
def _dtypes(make: MakeScheme) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        ranks = ranks_of(make(), 2)
        for step in range(2):
            mean = ranks.step([grad.to(dtype) for grad in gradients(2, step)])[0]
            check_law(mean.dtype == dtype, f"{dtype} becomes {mean.dtype}")
            check_law(mean.isfinite().all(), f"{dtype}: the mean is not finite")


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
            check_law(torch.equal(expected, mean), f"{dtype} changes the average of step {step}")


@OF_A_STEP.add(
    "sums over entries and ranks do not overflow 16 bits", guide="Several collectives per bucket"
)
def _overflow(make: MakeScheme) -> None:
    # The mean, 20000, fits into float16, whose largest value is 65504. The sum over four ranks does
    # not, nor do sums of four entries within a rank.
    ranks = ranks_of(make(), 4, 36)
    for mean in ranks.step([torch.full((36,), 20000.0, dtype=torch.float16)] * 4):
        check_law((mean.abs() <= 50000.0).all(), "four ranks' 20000 in float16 are too large a sum")


class _Sums(Simulation):
    """Watches the sums of integers over ranks.

    Attributes:
        of_integers: whether there was any in the last step.
        has_summed: whether there was any in any step.
        too_large: describes one that does not fit into its dtype; "": all do.
    """

    of_integers, has_summed, too_large = False, False, ""
    _total: Tensor

    def _record(self, request: Collective, rank: int) -> None:
        super()._record(request, rank)
        tensor = request.tensor
        dtype = tensor.dtype
        is_integer = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
        if not is_integer or getattr(request, "op", "") != "sum" or not tensor.numel():
            return
        self.of_integers = self.has_summed = True
        # Ranks ask in their order, and all of them before the first gets an answer.
        self._total = tensor.long() + (self._total if rank else 0)
        ends, last = torch.iinfo(dtype), rank == len(self.engines) - 1
        for total in (int(self._total.min()), int(self._total.max())) if last else ():
            if not ends.min <= total <= ends.max:
                self.too_large = (
                    f"{in_words(len(self.engines))}: codes add up to {total}, which {dtype} "
                    f"does not hold; take fewer levels on more ranks, a wider dtype, or "
                    f"AllGather(codes)"
                )


@OF_A_STEP.add(
    "sums of integers do not overflow, on up to 1024 ranks", guide="Several collectives per bucket"
)
def _integer_sums(make: MakeScheme) -> None:
    # Ranks have equal gradients, so that their codes add up. Codes are largest where all entries
    # are equal, or all but one are zero; those by a scale of past steps, where entries grow.
    ones, single = torch.ones(256), torch.zeros(256)
    single[0] = 1.0
    steps = [("ones", ones)] * 2  # the first may be dense
    steps += [("N(0, 1)", normal(256, 1)), ("a one among zeros", single), ("eights", 8 * ones)]
    for world_size in (2, 16, 128, 256, 1024):
        ranks = begun(_Sums(make(), {"p": (16, 16)}, world_size=world_size))
        for name, grad in steps:
            ranks.of_integers = False
            mean = ranks.step([grad] * world_size)[0]
            check_law(not ranks.too_large, ranks.too_large)
            text = f"{in_words(world_size)}: the mean of {name} is"
            if ranks.of_integers:
                check_law(mean.isfinite().all(), f"{text} not finite; do levels remain on so many?")
            if ranks.of_integers and name == "ones" and make().traits.returns == "mean":
                check_law((mean != 0).any(), f"{text} zero; do levels remain on so many?")
        if not ranks.has_summed and world_size > 2:  # some sum on many ranks only
            return


def _memory(ranks: Simulation) -> list[dict[tuple[str, str], Tensor]]:
    """Returns copies of all that each rank keeps, by key and parameter."""
    return [
        {(key, name): value.clone() for key, name, value in engine.memory.items()}
        for engine in ranks.engines
    ]


def _same_memory(a: Simulation, b: Simulation) -> bool:
    return all(
        first.keys() == second.keys() and all(_same_bits(v, second[k]) for k, v in first.items())
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
                check_law(not mean[place].isfinite(), f"{bad} at {place} is finite on rank {rank}")
            check_law(_same_memory(ranks, clean), f"{bad} at {place} of one rank changes the state")
            counts = [engine.skipped for engine in ranks.engines]
            averages = ranks.engines[0].traits.averages
            check_law(
                counts == [int(averages)] * 3, f"{bad} at {place}: skipped steps are {counts}"
            )
