"""Judges a verified step where each rank gets its shard of the mean alone."""

from __future__ import annotations

import torch
from torch import Tensor

from commhooks.hook.shard_measurement import ShardMeasurement
from commhooks.hook.verdict import (
    Finding,
    Law,
    Verified,
    broken_law,
    lost_values,
    rows_of,
    text_of_lost,
)

__all__ = ["judge_shards"]


def judge_shards(
    law: Law, step: int, one: ShardMeasurement, ranks: Tensor, sketches: Tensor
) -> tuple[list[Verified], list[Finding]]:
    """Returns the rows and findings of one bucket; the same on every rank.

    Args:
        law: of the scheme.
        step: its number.
        one: the bucket.
        ranks: the rows of all ranks, float64 of shape ``(ranks, rows, parameters)``.
        sketches: of the bucket, their mean over ranks.
    """
    own, kept, mean, *_ = ranks.unbind(1)
    findings: list[Finding] = []

    def find(name: str, kind: str, which: list[int], text: str) -> None:
        findings.append(Finding(step, one.bucket, name, kind, tuple(which), text))

    for name, ill in zip(one.names, (~own.isfinite()).T.tolist(), strict=True):
        if any(ill):
            which = [rank for rank, bad in enumerate(ill) if bad]
            find(name, "not finite", which, "the gradient is not finite there before averaging")
    if not law.averages:
        return [], findings
    compared = one.compared(ranks, sketches)
    rows = rows_of(step, one.bucket, one.names, *compared[:4])
    if own.isfinite().all() and kept.isfinite().all():
        if lost := lost_values(mean):
            position, which = lost
            find(one.names[position], "not finite", which, text_of_lost(law))
            return rows, findings
        sizes = torch.sqrt((own.square() + kept.square()).sum(1))
        if text := broken_law(law, one.dtype, sizes, compared.parts, one.layout.numel):
            name, which = compared.place(int(compared.parts.argmax()))
            find(name, "error", which, text)
    return rows, findings
