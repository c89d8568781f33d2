"""Says what :mod:`commhooks.predict.headroom` has measured, in words and numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from commhooks.predict.headroom import Gap, Headroom, Kind

__all__ = ["RATIOS", "words"]

RATIOS = (2, 4, 8, 16, 32, 100)  # of the table


def words(one: Headroom) -> list[str]:
    """Returns the lines of what was measured, of the answer, and of what follows from it."""
    return [*_measured(one), "", *_answer(one)]


def _measured(one: Headroom) -> list[str]:
    facts = one.facts
    kinds = (
        ("dense", one.dense),
        ("bf16", one.bf16),
        ("1 value a bucket", one.one),
        ("none (no-op)", one.noop),
    )
    return [
        f"commhooks headroom: {facts.world_size} ranks over {facts.backend}, "
        f"{facts.dense_nbytes / 1e6:.3g} MB of gradients in "
        f"{facts.buckets} bucket{'s' * (facts.buckets != 1)} a step",
        "",
        "communication       step [ms]    middle half of the steps [ms]    steps",
        *(
            f"{name:<16}    {1e3 * kind.median_s:9.2f}    "
            f"{f'{1e3 * kind.low_s:.2f} to {1e3 * kind.high_s:.2f}':<29}    {kind.steps:5d}"
            for name, kind in kinds
        ),
    ]


def _answer(one: Headroom) -> list[str]:
    lines = [
        f"Exposed communication:               {_shown(one.exposed, one.dense)}",
        f"The most that compression can save:  {_shown(one.beside_dense, one.dense)}",
        f"The same beside bf16:                {_shown(one.beside_bf16, one.bf16)}",
        "",
    ]
    return [*lines, *_WORDS[one.verdict](one)]


def _hidden(one: Headroom) -> list[str]:
    return [
        "Do not compress. Backward hides the communication: no compression can save more",
        f"than {_at_most(one.beside_dense, one.dense)}, and it computes for that.",
    ]


def _latency(one: Headroom) -> list[str]:
    return [
        "Do not compress: it can save no more than",
        f"{_at_most(one.beside_dense, one.dense)}. What else is exposed is latency, or",
        "waiting for other ranks, which one value per bucket costs as well. Fewer buckets",
        "(bucket_cap_mb), larger batches and gradient accumulation help against it.",
    ]


def _bf16(one: Headroom) -> list[str]:
    return [
        "Use bf16, and do not compress more: no compression can save more beside it than",
        f"{_at_most(one.beside_bf16, one.bf16)}.",
        '    commhooks.register(ddp_model, "bf16")',
    ]


def _unclear(one: Headroom) -> list[str]:
    if one.beside_dense.is_large(one.dense):
        saves, stay = f"{_shown(one.beside_bf16, one.bf16)}, beside bf16", _name(one)
    else:
        saves, stay = _shown(one.beside_dense, one.dense), "dense"
    return [
        "No answer: the times of the steps differ by more than what is to be measured. What",
        f"compression can save was {saves}.",
        f"Measure more steps, on machines that do nothing else; until then use {stay}.",
    ]


def _compress(one: Headroom) -> list[str]:
    name = _name(one)
    cost = 0.05 * one.noop.median_s
    dense, bf16 = one.break_even(cost), one.break_even(cost, over="bf16")
    return [
        f"Compression may pay. A ratio of {one.ratio_to_hide():.2g} saves nine tenths of what can "
        f"be saved.",
        f"A scheme whose computations add {_ms(cost)} (5 % of the no-op step) breaks even",
        f"with dense {_from(dense)}, with bf16 {_from(bf16)}.",
        "",
        f"ratio    step [ms]    to beat {name}, computations may add [ms]",
        *(
            f"{ratio:5d}    {1e3 * one.step_s(ratio):9.2f}    {_spare(one, ratio):>10}"
            for ratio in RATIOS
        ),
        "(predicted from when the dense steps' buckets begin and how long they travel;",
        f"bf16, a ratio of 2, was measured with its casts: {_ms(one.bf16.median_s)})",
    ]


_WORDS: dict[str, Callable[[Headroom], list[str]]] = {
    "hidden": _hidden,
    "latency": _latency,
    "bf16": _bf16,
    "compress": _compress,
    "unclear": _unclear,
}


def _name(one: Headroom) -> str:
    return "dense" if one.best is one.dense else "bf16"


def _spare(one: Headroom, ratio: float) -> str:
    spare = one.best.median_s - one.step_s(ratio)
    return f"{1e3 * spare:.2f}" if spare > 0 else "loses"


def _shown(gap: Gap, kind: Kind) -> str:
    share = gap.seconds / kind.median_s
    return f"{_ms(gap.seconds)} +- {_ms(gap.noise_s)}, {share:.0%} of a step"


def _at_most(gap: Gap, kind: Kind) -> str:
    most = max(gap.seconds + gap.noise_s, 0.0)
    return f"{_ms(most)}, {most / kind.median_s:.0%} of a step"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _from(ratio: float | None) -> str:
    return "at no ratio" if ratio is None else f"from a ratio of {ratio:.2g} on"
