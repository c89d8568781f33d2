"""Judges a verified step where each rank gets its shard of the mean alone."""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import Tensor

from commhooks.core.names import is_padding, whole_name
from commhooks.hook.shard_measurement import Compared, ShardMeasurement
from commhooks.hook.verdict import Finding, Law, Verified, apply_law

__all__ = ["judge_shards"]


def judge_shards(
    law: Law,
    step: int,
    one: ShardMeasurement,
    ranks: Tensor,
    compared: Compared,
    balance: Tensor | None,
) -> tuple[list[Verified], list[Finding]]:
    """Returns the rows and findings of one bucket; the same on every rank.

    Args:
        law: of the scheme.
        step: its number.
        one: the bucket.
        ranks: the rows of all ranks, float64 of shape ``(ranks, rows, pieces)``.
        compared, balance: see ``ShardMeasurement.compared``.
    """
    own, kept, mean, *_ = ranks.unbind(1)
    names = [whole_name(name) for name in one.layout.names]
    findings: list[Finding] = []

    def find(position: int, kind: str, which: list[int], text: str) -> None:
        findings.append(Finding(step, one.bucket, names[position], kind, tuple(which), text))

    # In the order of the bucket; a parameter has several pieces.
    pieces: dict[str, list[int]] = defaultdict(list)
    for column, name in enumerate(one.layout.names):
        if not is_padding(name):
            pieces[names[column]].append(column)
    for columns in pieces.values():
        ill = (~own[:, columns].isfinite()).any(1).nonzero().view(-1).tolist()
        if ill:
            text = "the gradient is not finite there before averaging"
            find(columns[0], "not finite", ill, text)
    rows: list[Verified] = []
    if not law.averages:
        return rows, findings
    for name, columns in pieces.items():
        dense, error, dot = (
            float(part[columns].sum()) for part in (compared.dense, compared.error, compared.dot)
        )
        norm, off = math.sqrt(dense), math.sqrt(error)
        both = norm * float(mean[:, columns].norm())
        rows.append(
            Verified(
                *(step, one.bucket, name),
                error=off / norm if norm else (math.inf if off else 0.0),
                cosine=min(1.0, dot / both) if both else math.nan,
                norm=norm,
            )
        )
    if own.isfinite().all() and kept.isfinite().all():

        def find_in_shard(position: int, kind: str, _: list[int], text: str) -> None:
            size, first = one.layout.sizes[position], one.layout.offsets[position]
            spans = enumerate(one.shards)
            owners = [rank for rank, (a, b) in spans if a < first + size and first < b]
            find(position, kind, owners, text)

        sizes = torch.sqrt((own.square() + kept.square()).sum(1))
        apply_law(
            *(law, find_in_shard, one.dtype, sizes, mean),
            *(compared.error.sqrt(), balance, one.layout.numel),
        )
    return rows, findings
