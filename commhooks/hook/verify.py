"""Defines ``Verification``: every k steps the dense mean is computed beside the scheme's result."""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Set
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.core.scheme import Scheme
from commhooks.core.settings import fitting
from commhooks.errors import OptionError, RegistrationError, VerificationError
from commhooks.hook.measurement import Measurement
from commhooks.hook.verdict import Finding, Law, Verified, judge, law_of
from ddp_core import AllReduce, CollectiveError, LaneGroup, borrow, host_backend, is_gloo, needs

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Verification", "Verify", "attach", "need_verifiable"]

Verify = Literal["warn", "raise"]
_Told = tuple[str, str, tuple[int, ...]]  # kind, parameter, ranks
_AT_CLOSE = 5.0  # seconds that ``close`` waits for what is under way


class _Pending(NamedTuple):
    """Holds a verified step whose collectives are under way."""

    step: int
    law: Law
    measured: list[Measurement]
    table: Tensor  # rows of all ranks, as int64: only this rank's are filled in before the sum
    works: list[Any]

    def ready(self) -> bool:
        return all(work.is_completed() for work in self.works)


class Verification:
    """Computes the dense mean of some steps, and compares the scheme's result with it.

    The ranks exchange it after the step, in a process group of its own on Gloo, while training goes
    on. The result is looked at when a later step begins and it has come; with ``action="raise"``
    the next step waits for it. A second verified step waits for the first.

    Args:
        every: verifies the steps that are multiples of this number.
        action: what a finding is: "warn": a warning; "raise": :class:`VerificationError` on every
            rank. A gradient that is not finite is a warning in any case, as loss scalers want it.
        history: number of parameters' rows, and of findings, that are kept.

    Attributes:
        findings: what was found, the oldest first.
        steps: number of steps that were verified.

    Example:
        >>> hook = commhooks.register(ddp_model, "int8", verify_every=100)
        >>> print(hook.verification)  # after some steps
        int8: 3 steps verified, the last is 200. ...
    """

    def __init__(self, every: int, action: Verify = "warn", history: int = 100_000) -> None:
        every = fitting("register", "verify_every", every, int)
        if every < 1:
            raise OptionError(
                f"register(verify_every=...) is a number of steps, 1 or more, or None; got {every}"
            )
        if action not in ("warn", "raise"):
            raise OptionError(f"register(verify=...) is 'warn' or 'raise', got {action!r}")
        self.every, self.action = every, action
        self.findings: deque[Finding] = deque(maxlen=history)
        self.steps = 0
        self._rows: deque[Verified] = deque(maxlen=history)
        self._latest: list[Verified] = []  # of the last verified step
        self._pending: deque[_Pending] = deque()
        self._judging = threading.RLock()
        self._warned: set[_Told] = set()
        self._group: dist.ProcessGroup | None = None
        self._lent: LaneGroup | None = None
        self._join: Callable[[], None] = _nothing
        self._unraised: list[Finding] = []
        self._last = ""

    def open(self, group: dist.ProcessGroup, devices: Set[str], join: Callable[[], None]) -> None:
        """Takes the ranks to compare; a collective.

        Args:
            group: the hook's.
            devices: types of those that the model is on.
            join: makes the caller's stream wait for the exchanges.
        """
        if self._group is not None:
            return
        self._group, self._join = group, join
        # Its own group: on the hook's, the next step's messages would queue behind this one's. On a
        # GPU the order of collectives of one group is that of the host, the same on all ranks.
        if devices <= {"cpu"} and is_gloo(host_backend(group)):
            (self._lent,) = borrow(group, 1)
            self._group = self._lent.group
            # Also at interpreter exit, before Gloo's threads lose the interpreter.
            self._give_back = weakref.finalize(self, self._lent.give_back)

    # ---- what the engine calls

    def wants(self, step: int, scheme: Scheme) -> bool:
        """Whether a step is verified."""
        return step % self.every == 0 and self._group is not None

    def step_over(self, step: int, scheme: Scheme, measured: list[Measurement]) -> None:
        """Starts the all-reduces of a verified step; waits for nothing."""
        group = self._group
        if group is None:
            return
        self._join()
        law, size = law_of(scheme, group.size(), step), group.size()
        rows = torch.cat([one.rows.to(measured[0].rows.device) for one in measured], 1)
        # A sum in which all but one rank have zeros, as integers: no bit changes.
        table = torch.zeros((size, *rows.shape), dtype=torch.int64, device=rows.device)
        table[group.rank()] = rows.view(torch.int64)
        requests = [AllReduce(table, "sum")]
        if law.averages:
            for one in measured:
                requests += [AllReduce(part) for part in one.operands()]
        if self._lent is not None:
            self._lent.issued += len(requests)
        works = [request.issue(group) for request in requests]
        self._pending.append(_Pending(step, law, measured, table, works))

    # ---- what the hook calls

    def step_begins(self, step: int) -> None:
        """Looks at what has come since; waits for it where the user or the memory wants that.

        Raises:
            VerificationError: a step broke its law, and ``action`` is "raise".
            CollectiveError: the verification failed, since a peer did.
        """
        if self._pending or self._unraised:
            self._settle(wait=self.action == "raise" or step % self.every == 0)

    def close(self) -> None:
        """Gives back the process group; what has not come in some seconds is dropped."""
        end = time.monotonic() + _AT_CLOSE
        while self._pending and not self._pending[0].ready() and time.monotonic() < end:
            time.sleep(1e-3)
        if not self._pending or self._pending[0].ready():
            self.action = "warn"
            self._settle(wait=False)
        if self._lent is not None:
            self._lent.spoiled |= bool(self._pending)
            self._give_back()
        self._pending.clear()
        self._group = self._lent = None

    def abandon(self) -> None:
        """Leaves the ranks without waiting for them, which may be gone; ``open`` takes others.

        The result of a step that is under way is dropped.
        """
        works = [work for one in self._pending for work in one.works]
        self._pending.clear()
        if self._lent is not None:
            self._give_back.detach()
            self._lent.give_up(works)
        self._group = self._lent = None

    # ---- results

    def report(self) -> pd.DataFrame:
        """Returns a row per verified step, bucket and parameter; waits for what is under way.

        ``error`` is the norm of the averaged gradient minus the dense mean, over that of the dense
        mean; ``cosine`` is of the angle between the two; ``norm`` is the dense mean's. With error
        feedback the error of a step is what later steps send.
        """
        with needs("hook.verification.report()", "pandas"):
            import pandas as pd
        self._settle(wait=True)
        frame: pd.DataFrame = pd.DataFrame(list(self._rows), columns=list(Verified._fields))
        return frame

    def latest(self, *, wait: bool = False) -> list[Verified]:
        """Returns the report's rows of the last verified step; raises no finding.

        Args:
            wait: for what is under way; False: of the last step whose result was looked at.
        """
        if wait:
            self._collect(wait=True)
        return self._latest

    def metrics(self) -> dict[str, float]:
        """Returns numbers of the last verified step, see :meth:`HookState.metrics`."""
        return _numbers(self._latest, len(self.findings))

    def __str__(self) -> str:
        self._settle(wait=False)
        if not self.steps:
            return "no step was verified yet"
        text = f"{self._last}: {_count(self.steps, 'step')} verified{_worst(self._latest)}. "
        found = [f"\n  {finding}" for finding in list(self.findings)[-10:]]
        return (
            text + _count(len(self.findings), "finding") + (":" if found else ".") + "".join(found)
        )

    # ---- inside

    def _settle(self, *, wait: bool) -> None:
        """Judges the steps whose collectives have ended, and raises what is to be raised."""
        with self._judging:
            self._collect(wait=wait)
            wrong, self._unraised = self._unraised, []
        if wrong and self.action == "raise":
            text = "\n  ".join(map(str, wrong[:20]))
            raise VerificationError(
                f"verification of step {wrong[0].step}:\n  {text}\nTraining cannot be trusted from "
                f"this step on. verify='warn' goes on; hook.switch('none') does without the scheme"
            )

    def _collect(self, *, wait: bool) -> None:
        """Judges the steps whose collectives have ended, and raises none of their findings."""
        with self._judging:
            while self._pending and (wait or self._pending[0].ready()):
                pending = self._pending.popleft()
                for number, work in enumerate(pending.works):
                    _finish(work, self._lent, pending.step, number)
                found, rows = _judge(pending)
                self.findings += found
                self._rows += rows
                self._latest = rows
                self.steps, self._last = self.steps + 1, pending.law.name
                self._unraised += [one for one in found if one.kind != "not finite"]
                assert self._group is not None
                _warn(found, self._group.rank(), self.action, self._warned)


def attach(hook: Any, verification: Verification) -> None:
    """Makes a hook that has not met the other ranks yet verify its steps."""
    hook.verification = hook._engine.observer = verification


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


def _judge(pending: _Pending) -> tuple[list[Finding], list[Verified]]:
    """Returns findings and rows of a step; the same on every rank."""
    ranks = pending.table.cpu().view(torch.float64)
    begin = 0
    findings: list[Finding] = []
    rows: list[Verified] = []
    for one in pending.measured:
        end = begin + len(one.layout)
        error, balance = one.errors()
        judged, found = judge(
            pending.law, pending.step, one, ranks[:, :, begin:end], error, balance
        )
        rows += judged
        findings += found
        begin = end
    return findings, rows


def _worst(rows: list[Verified]) -> str:
    """Returns a sentence on the parameter with the largest error of a step."""
    known = [row for row in rows if row.error == row.error]
    if not known:
        return ""
    worst = max(known, key=lambda row: row.error)
    return (
        f", the last is {worst.step}. Its largest error is {worst.error:.3g} of the dense mean, of "
        f"{worst.parameter!r}, at a cosine of {worst.cosine:.5g}"
    )


def _numbers(rows: list[Verified], findings: int) -> dict[str, float]:
    found = {"verify/findings": float(findings)}
    if errors := [row.error for row in rows if row.error == row.error]:
        found["verify/error"] = max(errors)
    if cosines := [row.cosine for row in rows if row.cosine == row.cosine]:
        found["verify/cosine_min"] = min(cosines)
    return found


def _warn(found: list[Finding], rank: int, action: Verify, warned: set[_Told]) -> None:
    """Warns of the first finding of each kind, once for a parameter and its ranks."""
    for kind in dict.fromkeys(one.kind for one in found):
        same = [one for one in found if one.kind == kind]
        first = same[0]
        told = (kind, first.parameter, first.ranks)
        raised = action == "raise" and kind != "not finite"
        # On a thousand ranks one warning is enough, and those of the ranks that are concerned.
        elsewhere = rank != 0 and (rank not in first.ranks or kind == "error")
        if raised or elsewhere or told in warned:
            continue
        warned.add(told)
        more = f" (and {len(same) - 1} more, see hook.verification)" if len(same) > 1 else ""
        warnings.warn(f"commhooks: {first}{more}", RuntimeWarning, stacklevel=2)


def need_verifiable(device: torch.device) -> None:
    """Raises while a CUDA graph is captured: replays would not compare what they compute."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RegistrationError(
            "register(verify_every=...): this step is being captured in a CUDA graph, and replays "
            "would be verified by nobody; register without verify_every, or run without capture"
        )


def _nothing() -> None:
    return


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
