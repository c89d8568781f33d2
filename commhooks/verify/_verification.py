"""Defines ``Verification``, which compares the results of some steps with the dense mean."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.core._scheme import Scheme
from commhooks.core._settings import check_value, shown
from commhooks.errors import CollectiveError, OptionError, RegistrationError, VerificationError
from commhooks.verify._equal import hashes_of, keeps_equal, local_part
from commhooks.verify._judge import (
    ErrorBound,
    Finding,
    VerifiedRow,
    error_bound_of,
    judge,
    judge_parameters,
    judge_shards,
)
from commhooks.verify._measure import Measurement, ShardMeasurement
from ddp_core import (
    AllReduce,
    LaneGroup,
    acquire_lane_groups,
    cpu_backend,
    is_gloo,
    needs,
    stream_of,
)

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Verification", "check_verifiable", "verification_of"]

Action = Literal["warn", "raise"]
_Warned = tuple[str, str, tuple[int, ...]]  # kind, parameter, ranks
_AT_CLOSE = 5.0  # seconds that ``close`` waits for what is under way


class Verification:
    """Compares the result of some steps with the uncompressed (dense) mean, and across ranks.

    The ranks exchange sketches after the step, in a process group of its own on Gloo, while
    training continues. The result is judged when a later step begins and its collectives have
    ended; with ``action="raise"`` the next step waits for them. A second verified step waits for
    the first. When the hook is closed, or at exit, findings of the last steps are warnings.

    If the scheme keeps the ranks' parameters equal, hashes of parameters are compared before a
    verified step, too. They are not after a scheme that lets ranks differ (local steps, gossip).

    Args:
        every: verifies the steps that are multiples of this number.
        action: consequence of a finding. "warn": a warning; "raise": :class:`VerificationError` on
            every rank. A gradient that is not finite is always a warning, as loss scalers want it.
        history: number of parameters' rows, and of findings, that are kept.

    Errors of parameters of up to 64 entries are exact. Those of others are estimates, from sketches
    of a small part of the gradient's bytes, with a standard deviation of 9 % (up to 8,000 entries)
    to 2 % (from 65,000 on).

    Attributes:
        steps: number of steps that were verified.

    Example:
        >>> verify = commhooks.Verification(100, action="raise")
        >>> hook = commhooks.register(ddp_model, "int8", verify=verify)
        >>> print(hook.verification)  # after some steps
        int8: 3 steps verified, the last is 200. ...
    """

    def __init__(self, every: int, action: Action = "warn", *, history: int = 100_000) -> None:
        self.every = check_value("Verification", "every", every, int)
        if self.every < 1:
            raise OptionError(f"Verification(every): a number of steps, 1 or more, got {every}")
        if action not in ("warn", "raise"):
            raise OptionError(f"Verification(action): 'warn' or 'raise', got {shown(action)}")
        self.action: Action = action
        history = check_value("Verification", "history", history, int)
        if history < 1:
            raise OptionError(
                f"Verification(history=...): a number of rows, 1 or more, got {history}"
            )
        self._findings: deque[Finding] = deque(maxlen=history)
        self.steps = 0
        self._rows: deque[VerifiedRow] = deque(maxlen=history)
        self._latest: list[VerifiedRow] = []  # of the last verified step
        self._pending: deque[_VerifiedStep] = deque()
        self._judging = threading.RLock()
        self._warned: set[_Warned] = set()
        self._group: dist.ProcessGroup | None = None
        self._lane_group: LaneGroup | None = None
        self._join: Callable[[], None] = _nothing
        self._cancel_finalizer: Callable[[], object] = _nothing
        self._unraised_findings: list[Finding] = []
        self._verdict_groups: Sequence[dist.ProcessGroup] = ()
        self._peers_pending = False  # a step was verified, and ``verdict_groups`` do not know yet
        self._values: Callable[[], Mapping[str, Tensor]] = dict
        self._names: tuple[str, ...] = ()
        self._noted: tuple[int, Tensor] | None = None  # a step, and hashes of parameters before it
        self._apart = False  # a scheme has run that lets parameters differ
        self._last = ""
        self._owner: weakref.ref[object] | None = None  # the hook, while it is open

    def open(
        self,
        group: dist.ProcessGroup,
        devices: Set[str],
        join: Callable[[], None],
        verdict_groups: Sequence[dist.ProcessGroup] = (),
        values: Callable[[], Mapping[str, Tensor]] = dict,
        *,
        owner: object,
    ) -> None:
        """Opens the process group in which ranks are compared; a collective.

        Args:
            group: the hook's process group.
            devices: types of the devices that the model is on.
            join: makes the caller's stream wait for the exchanges.
            verdict_groups: process groups of the other shards (HSDP), whose ranks raise as well.
            values: returns the parameters that ranks have in common, by name; no other names later.
            owner: the hook; when it is deleted, or at exit, the last verified step is judged.
        """
        known = None if self._owner is None else self._owner()
        if self._group is not None and known not in (None, owner):
            raise OptionError(
                "register(verify=...): this Verification is another hook's; make one for each hook"
            )
        self._verdict_groups = verdict_groups
        if self._group is not None:
            return
        self._owner = weakref.ref(owner)
        self._group, self._join = group, join
        self._values, self._names, self._apart = values, tuple(values()), False
        # Its own group: on the hook's, the next step's messages would queue behind this one's. On a
        # GPU the order of collectives of one group is that of the host, the same on all ranks.
        if devices <= {"cpu"} and is_gloo(cpu_backend(group)):
            (self._lane_group,) = acquire_lane_groups(group, 1)
            self._group = self._lane_group.group
        # At interpreter exit before Gloo's threads lose the interpreter.
        self._cancel_finalizer = weakref.finalize(owner, self.close).detach

    @property
    def shares_group(self) -> bool:
        """Whether ranks are compared in the hook's own process group."""
        return self._group is not None and self._lane_group is None

    @property
    def findings(self) -> list[Finding]:
        """Returns the findings so far, the oldest first."""
        return list(self._findings)

    # ---- what the engine calls

    def wants(self, step: int, scheme: Scheme) -> bool:
        """Whether a step is verified."""
        return step % self.every == 0 and self._group is not None

    def on_first_bucket(self, step: int, scheme: Scheme) -> None:
        """Hashes the parameters: no optimizer steps them before the first average has arrived."""
        self._apart = self._apart or not keeps_equal(scheme)
        if self.wants(step, scheme) and not self._apart:
            values = self._values()
            parts = {name: local_part(value) for name, value in values.items()}
            none = next(iter(parts.values()), torch.empty(0, device="cpu")).new_empty(0)
            self._noted = step, hashes_of([parts.get(name, none) for name in self._names])

    def on_step_end(self, step: int, scheme: Scheme, measured: list[Measurement]) -> None:
        """Starts the all-reduces of a verified step without waiting."""
        group = self._group
        if group is None:
            return
        self._join()
        bound = error_bound_of(scheme, group.size(), step)
        noted, self._noted = self._noted, None
        if noted is None or noted[0] != step:  # zeros: other ranks may have hashes
            noted = step, measured[0].rows.new_zeros(len(self._names), dtype=torch.int64)
        compared = (measured, self._names, noted[1])
        self._pending.append(_VerifiedStep(step, bound, *compared, group, self._lane_group))
        self._peers_pending = True

    # ---- what the hook calls

    def on_step_begin(self, step: int) -> None:
        """Judges verified steps whose collectives have ended.

        Waits for them with ``action="raise"``, and before the next verified step.

        Raises:
            VerificationError: a step broke its bound, and ``action`` is "raise".
            CollectiveError: the verification failed, since a peer did.
        """
        raises = self.action == "raise"
        if self._pending or self._unraised_findings or self._peers_pending:
            peers_pending, self._peers_pending = self._peers_pending, False
            self._collect(wait=raises or step % self.every == 0)
            wrong, self._unraised_findings = self._unraised_findings, []
            if raises:
                # Ranks of the other shards come here in the same step, and raise as well.
                _raise_findings(wrong, self._verdict_groups if peers_pending else ())

    def close(self) -> None:
        """Warns of findings that were not reported, and releases the process group.

        Steps whose collectives do not end within some seconds are dropped, as after a failed peer.
        """
        self._cancel_finalizer()
        end = time.monotonic() + _AT_CLOSE
        while self._pending and not self._pending[0].ready() and time.monotonic() < end:
            time.sleep(1e-3)
        with contextlib.suppress(CollectiveError):
            self._collect(wait=False)
        if self._group is not None:
            _warn_findings(self._unraised_findings, self._group.rank(), "warn", self._warned)
        if self._lane_group is not None:
            works = [work for pending in self._pending for work in pending.works]
            if works:
                self._lane_group.discard(works)  # waits for no peer
            else:
                self._lane_group.release()
        self._pending.clear()
        self._group = self._lane_group = None

    def abort(self) -> None:
        """Leaves the process group without waiting for its ranks, which may be gone.

        Results of collectives under way are dropped; ``open`` takes another group.
        """
        works = [work for pending in self._pending for work in pending.works]
        self._pending.clear()
        if self._lane_group is not None:
            self._lane_group.discard(works)
        self._cancel_finalizer()
        self._group = self._lane_group = None

    # ---- results

    def report(self) -> pd.DataFrame:
        """Returns a row per verified step, bucket and parameter; waits for collectives under way.

        ``error`` is the norm of the averaged gradient minus the uncompressed (dense) mean, over
        that of the dense mean; ``cosine`` is of the angle between the two; ``norm`` is the dense
        mean's. With error feedback the error of a step is what later steps send. No finding is
        raised here.
        """
        with needs("hook.verification.report()", "pandas"):
            import pandas as pd
        self._collect(wait=True)
        frame: pd.DataFrame = pd.DataFrame(list(self._rows), columns=list(VerifiedRow._fields))
        return frame

    def latest(self, *, wait: bool = False) -> list[VerifiedRow]:
        """Returns the report's rows of the last verified step.

        Args:
            wait: waits for collectives under way; False: returns the last step that was judged.
        """
        if wait:
            self._collect(wait=True)
        return self._latest

    def metrics(self) -> dict[str, float]:
        """Returns numbers of the last verified step, see :meth:`HookState.metrics`."""
        self._collect(wait=False)
        return _metrics(self._latest, len(self._findings))

    def __str__(self) -> str:
        self._collect(wait=False)
        if not self.steps:
            return "no step was verified yet"
        return _describe(self._last, self.steps, self._latest, self.findings)

    # ---- inside

    def _collect(self, *, wait: bool) -> None:
        """Judges the steps whose collectives have ended, and raises none of their findings."""
        with self._judging:
            while self._pending and (wait or self._pending[0].ready()):
                pending = self._pending.popleft()
                with _stream_beside(pending.device):
                    pending.wait()
                    findings, rows = pending.judge()
                self._findings += findings
                self._rows += rows
                self._latest = rows
                self.steps, self._last = self.steps + 1, pending.bound.name
                self._unraised_findings += [
                    finding for finding in findings if finding.kind != "not finite"
                ]
                assert self._group is not None
                _warn_findings(findings, self._group.rank(), self.action, self._warned)


def verification_of(verify: object, history: int) -> Verification | None:
    """Returns the ``verify`` of :func:`commhooks.register` as a verification, or None.

    Raises:
        OptionError: ``verify`` is something else.
    """
    if verify is None:
        return None
    if not isinstance(verify, Verification):
        if not isinstance(verify, Integral) or isinstance(verify, bool):
            raise OptionError(
                f"register(verify=...) is a number of steps, a commhooks.Verification or None, "
                f"got {shown(verify)}"
            )
        return Verification(int(verify), history=history)
    return verify


def check_verifiable(device: torch.device) -> None:
    """Raises while a CUDA graph is captured, since replays would not be verified."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RegistrationError(
            "register(verify=...): this step is being captured in a CUDA graph, and replays would "
            "not be verified; register without verify, or run without capture"
        )


def _nothing() -> None:
    return


# ---- a step whose collectives are under way


class _VerifiedStep:
    """Holds a verified step whose collectives are under way.

    Args:
        step: number of the step.
        bound: bound of the scheme that ran.
        measured: measurements of the buckets, at least one.
        names: names of the parameters that ranks have in common.
        hashes: hashes of these parameters before the step.
        group: process group of the collectives.
        lane_group: borrowed group, if any, whose collectives are counted.

    Attributes:
        works: handles of the collectives.
    """

    def __init__(
        self,
        step: int,
        bound: ErrorBound,
        measured: list[Measurement],
        names: Sequence[str],
        hashes: Tensor,
        group: dist.ProcessGroup,
        lane_group: LaneGroup | None,
    ) -> None:
        self.step, self.bound, self.measured, self._lane_group = step, bound, measured, lane_group
        self._names, self._hashes = names, hashes
        # Rows of all ranks: only this rank's are filled in before the sum.
        self._table, self._sketches = _table(measured, hashes, group), _joined(measured)
        requests = [AllReduce(self._table, "sum")]
        if bound.averages and self._sketches.numel():
            requests.append(AllReduce(self._sketches))
        if lane_group is not None:
            # Counted first: a request that fails to be issued leaves the group unusable.
            lane_group.issued += len(requests)
        self.works: list[Any] = [request.issue(group) for request in requests]

    @property
    def device(self) -> torch.device:
        """Returns the device of the collectives."""
        return self._table.device

    def ready(self) -> bool:
        """Whether all collectives have ended."""
        return all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        """Waits for the collectives.

        Raises:
            CollectiveError: one failed, since a peer did.
        """
        for number, work in enumerate(self.works):
            _finish(work, self._lane_group, self.step, number)

    def judge(self) -> tuple[list[Finding], list[VerifiedRow]]:
        """Returns findings and rows of the step; the same on every rank."""
        ranks = self._table.cpu().view(torch.float64)
        counts = [bucket.sketches.numel() for bucket in self.measured]
        begin = 0
        findings: list[Finding] = []
        rows: list[VerifiedRow] = []
        for bucket, flat in zip(self.measured, self._sketches.cpu().split(counts), strict=True):
            end = begin + bucket.rows.numel()
            of_all = ranks[:, begin:end].reshape(len(ranks), *bucket.rows.shape)
            sketches, step = flat.view(bucket.sketches.shape), (self.bound, self.step)
            if isinstance(bucket, ShardMeasurement):
                bucket_rows, bucket_findings = judge_shards(*step, bucket, of_all, sketches)
            else:
                bucket_rows, bucket_findings = judge(*step, bucket, of_all, sketches)
            rows += bucket_rows
            findings += bucket_findings
            begin = end
        hashes = ranks[:, begin:].view(torch.int64)
        return judge_parameters(self.step, self._names, hashes) + findings, rows


def _stream_beside(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Makes a stream current on which the host waits for nothing else than the collectives.

    On the caller's it would wait for all that the caller has enqueued.
    """
    if stream_of(device) is None:
        return contextlib.nullcontext()
    module = torch.get_device_module(device.type)
    beside: contextlib.AbstractContextManager[object] = module.stream(module.Stream(device))
    return beside


def _table(measured: Sequence[Measurement], hashes: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns a table whose sum over ranks has all rows: as integers, so that no bit changes."""
    device = measured[0].rows.device
    rows = [bucket.rows.to(device).view(-1).view(torch.int64) for bucket in measured]
    rows.append(hashes.to(device))
    length = sum(row.numel() for row in rows)
    table = torch.zeros((group.size(), length), dtype=torch.int64, device=device)
    torch.cat(rows, out=table[group.rank()])
    return table


def _joined(measured: Sequence[Measurement]) -> Tensor:
    """Joins the sketches of all buckets to one message of the widest of their dtypes."""
    device = measured[0].rows.device
    first, *others = (bucket.sketches.to(device).view(-1) for bucket in measured)
    return torch.cat([first, *others]) if others else first


def _finish(work: Any, lane_group: LaneGroup | None, step: int, number: int) -> None:
    try:
        work.wait()
    except Exception as error:
        if lane_group is not None:
            lane_group.unusable = True
        raise CollectiveError(
            f"the verification of step {step} failed: {error}. A peer died, a link broke, or "
            f"the ranks do not run the same code",
            step=step,
            bucket=number,
            round=0,
        ) from error
    if lane_group is not None:
        lane_group.completed += 1


# ---- words and numbers


def _worst_of(rows: list[VerifiedRow]) -> str:
    """Returns a sentence on the parameter with the largest error of a step."""
    known = [row for row in rows if row.error == row.error]
    if not known:
        return ""
    worst, median = max(known, key=lambda row: row.error), _median_of(rows)
    median_text = "" if median is None else f"; the median of all parameters is {median:.3g}"
    return (
        f", the last is {worst.step}. Its largest error is {worst.error:.3g} of the uncompressed "
        f"mean, of {worst.parameter!r}, at a cosine of {worst.cosine:.5g}{median_text}"
    )


def _median_of(rows: list[VerifiedRow]) -> float | None:
    """Returns the error of the parameter in the middle; None: every dense mean is zero.

    A parameter whose dense mean is zero has no relative error, and one that is lost has none.
    """
    errors = [row.error for row in rows if row.norm > 0 and row.error == row.error]
    return statistics.median(errors) if errors else None


def _describe(name: str, steps: int, rows: list[VerifiedRow], findings: list[Finding]) -> str:
    """Describes the verified steps of a scheme and the last findings."""
    last = [f"\n  {finding}" for finding in findings[-10:]]
    return (
        f"{name}: {_count_of(steps, 'step')} verified{_worst_of(rows)}. "
        f"{_count_of(len(findings), 'finding')}{':' if last else '.'}{''.join(last)}"
    )


def _metrics(rows: list[VerifiedRow], findings: int) -> dict[str, float]:
    metrics = {"verify/findings": float(findings)}
    if errors := [row.error for row in rows if row.error == row.error]:
        metrics["verify/error"] = max(errors)
    if (median := _median_of(rows)) is not None:
        metrics["verify/error_median"] = median
    if cosines := [row.cosine for row in rows if row.cosine == row.cosine]:
        metrics["verify/cosine_min"] = min(cosines)
    return metrics


def _warn_findings(
    findings: list[Finding], rank: int, action: Action, warned: set[_Warned]
) -> None:
    """Warns of the first finding of each kind, once for a parameter and its ranks."""
    for kind in dict.fromkeys(finding.kind for finding in findings):
        same = [finding for finding in findings if finding.kind == kind]
        first = same[0]
        key = (kind, first.parameter, first.ranks)
        raised = action == "raise" and kind != "not finite"
        # On a thousand ranks one warning is enough, and those of the ranks that are concerned.
        elsewhere = rank != 0 and (rank not in first.ranks or kind == "error")
        if raised or elsewhere or key in warned:
            continue
        warned.add(key)
        more = f" (and {len(same) - 1} more, see hook.verification)" if len(same) > 1 else ""
        warnings.warn(f"commhooks: {first}{more}", RuntimeWarning, stacklevel=2)


def _count_of(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _raise_findings(wrong: Sequence[Finding], verdict_groups: Sequence[dist.ProcessGroup]) -> None:
    """Raises VerificationError if this rank, or a rank of another shard, has a finding.

    Args:
        verdict_groups: groups of ranks that call this function at the same time.
    """
    messages = [(finding.step, str(finding)) for finding in wrong[:20]]
    for group in verdict_groups:
        everyone: list[list[tuple[int, str]]] = [[] for _ in range(group.size())]
        dist.all_gather_object(everyone, messages, group=group)
        messages = sorted({message for rank_messages in everyone for message in rank_messages})
    if messages:
        text = "\n  ".join(text for _, text in messages)
        raise VerificationError(
            f"verification of step {messages[0][0]}:\n  {text}\nTraining cannot be trusted from "
            f"this step on. Where parameters differ, load one checkpoint on all ranks; else "
            f"hook.switch('none') does without the scheme. Verification(action='warn') continues"
        )
