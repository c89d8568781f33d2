"""Compares the ranks' measurements of one verified step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.errors import CollectiveError
from commhooks.hook.measurement import Measurement
from commhooks.hook.shard_measurement import ShardMeasurement
from commhooks.hook.shard_verdict import judge_shards
from commhooks.hook.verdict import Finding, Law, Verified, judge, judge_parameters
from ddp_core import AllReduce, LaneGroup

__all__ = ["VerifiedStep"]


class VerifiedStep:
    """Holds a verified step whose collectives are under way.

    Args:
        step: its number.
        law: of the scheme that ran.
        measured: its buckets, at least one.
        names: of the parameters that ranks have in common.
        hashes: of their values before the step.
        group: the ranks; issues the collectives.
        lent: what counts the collectives of a group that was borrowed for them.

    Attributes:
        works: of the collectives.
    """

    def __init__(
        self,
        step: int,
        law: Law,
        measured: list[Measurement],
        names: Sequence[str],
        hashes: Tensor,
        group: dist.ProcessGroup,
        lent: LaneGroup | None,
    ) -> None:
        self.step, self.law, self.measured, self._lent = step, law, measured, lent
        self._names, self._hashes = names, hashes
        # Rows of all ranks: only this rank's are filled in before the sum.
        self._table, self._sketches = _table(measured, hashes, group), _joined(measured)
        requests = [AllReduce(self._table, "sum")]
        if law.averages:
            if self._sketches.numel():
                requests.append(AllReduce(self._sketches))
            for one in measured:
                requests += [AllReduce(part) for part in one.operands()]
        if lent is not None:
            lent.issued += len(requests)  # before: what fails to be issued leaves the group spoiled
        self.works: list[Any] = [request.issue(group) for request in requests]

    def ready(self) -> bool:
        """Whether all collectives have ended."""
        return all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        """Waits for the collectives.

        Raises:
            CollectiveError: one failed, since a peer did.
        """
        for number, work in enumerate(self.works):
            _finish(work, self._lent, self.step, number)

    def judge(self) -> tuple[list[Finding], list[Verified]]:
        """Returns findings and rows of the step; the same on every rank."""
        ranks = self._table.cpu().view(torch.float64)
        counts = [one.sketches.numel() for one in self.measured]
        begin = 0
        findings: list[Finding] = []
        rows: list[Verified] = []
        for one, flat in zip(self.measured, self._sketches.cpu().split(counts), strict=True):
            end = begin + one.rows.numel()
            of_all = ranks[:, begin:end].reshape(len(ranks), *one.rows.shape)
            sketches, step = flat.view(one.sketches.shape), (self.law, self.step)
            if isinstance(one, ShardMeasurement):
                judged, found = judge_shards(*step, one, of_all, sketches)
            else:
                judged, found = judge(*step, one, of_all, sketches)
            rows += judged
            findings += found
            begin = end
        hashes = ranks[:, begin:].view(torch.int64)
        return judge_parameters(self.step, self._names, hashes) + findings, rows


def _table(measured: Sequence[Measurement], hashes: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns what becomes the rows of all ranks by a sum: as integers, so that no bit changes."""
    device = measured[0].rows.device
    rows = torch.cat([one.rows.to(device).reshape(-1) for one in measured]).view(torch.int64)
    rows = torch.cat([rows, hashes.to(device)])
    table = torch.zeros((group.size(), len(rows)), dtype=torch.int64, device=device)
    table[group.rank()] = rows
    return table


def _joined(measured: Sequence[Measurement]) -> Tensor:
    """Returns the sketches of all buckets, as one message of the widest of their dtypes."""
    device = measured[0].rows.device
    return torch.cat([one.sketches.to(device).reshape(-1) for one in measured])


def _finish(work: Any, lent: LaneGroup | None, step: int, number: int) -> None:
    try:
        work.wait()
    except Exception as error:
        if lent is not None:
            lent.spoiled = True
        raise CollectiveError(
            f"the verification of step {step} failed: {error}. A peer died, a link broke, or "
            f"the ranks do not run the same code",
            step=step,
            bucket=number,
            round=0,
        ) from error
    if lent is not None:
        lent.answered += 1
