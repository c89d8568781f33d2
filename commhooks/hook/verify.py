"""Defines ``Verification``: every k steps the scheme's result is compared with the dense mean."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.core.scheme import Scheme
from commhooks.core.settings import fitting
from commhooks.errors import CollectiveError, OptionError, RegistrationError
from commhooks.hook.equal import hashes_of, keeps_equal, local_part
from commhooks.hook.measurement import Measurement
from commhooks.hook.verdict import Finding, Verified, law_of
from commhooks.hook.verified import (
    Told,
    Verify,
    VerifyWith,
    in_words,
    need_right,
    numbers_of,
    warn_of,
)
from commhooks.hook.verified_step import VerifiedStep
from ddp_core import LaneGroup, borrow, host_backend, is_gloo, needs

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Verification", "Verify", "VerifyWith", "attach", "need_verifiable"]

_AT_CLOSE = 5.0  # seconds that ``close`` waits for what is under way


class Verification:
    """Compares the scheme's result of some steps with the dense mean, and across ranks.

    The ranks exchange sketches or gradients after the step, in a process group of its own on Gloo,
    while training goes on. The result is looked at when a later step begins and it has come; with
    ``action="raise"`` the next step waits for it. A second verified step waits for the first.
    When the hook ends or the program does, what was found in the last steps is a warning.

    Before a verified step the ranks' parameters have to be equal, too, if the scheme keeps them so;
    hashes of them are compared. After a scheme that does not (local steps, gossip) they are not.

    Args:
        every: verifies the steps that are multiples of this number.
        action: what a finding is: "warn": a warning; "raise": :class:`VerificationError` on every
            rank. A gradient that is not finite is a warning in any case, as loss scalers want it.
        history: number of parameters' rows, and of findings, that are kept.
        reference: "sketch": compares with a sketch of the dense mean, which is a small part of its
            bytes. Errors of parameters of up to 61 entries are exact; those of others are estimates
            with a standard deviation of 9 % (up to 8,000 entries) to 2 % (from 65,000 on).
            "dense": with the dense mean itself, an all-reduce in float32 (float64 if they are).

    Attributes:
        steps: number of steps that were verified.

    Example:
        >>> hook = commhooks.register(ddp_model, "int8", verify_every=100)
        >>> print(hook.verification)  # after some steps
        int8: 3 steps verified, the last is 200. ...
    """

    def __init__(
        self,
        every: int,
        action: Verify = "warn",
        history: int = 100_000,
        reference: VerifyWith = "sketch",
    ) -> None:
        self.every, self.action = _checked(every, action, reference)
        self.reference, self.dense = reference, reference == "dense"
        self._findings: deque[Finding] = deque(maxlen=history)
        self.steps = 0
        self._rows: deque[Verified] = deque(maxlen=history)
        self._latest: list[Verified] = []  # of the last verified step
        self._pending: deque[VerifiedStep] = deque()
        self._judging = threading.RLock()
        self._warned: set[Told] = set()
        self._group: dist.ProcessGroup | None = None
        self._lent: LaneGroup | None = None
        self._join: Callable[[], None] = _nothing
        self._disarm: Callable[[], object] = _nothing
        self._unraised: list[Finding] = []
        self._beside: Sequence[dist.ProcessGroup] = ()
        self._untold = False  # a step was verified, and the ranks beside have not heard of it
        self._values: Callable[[], Mapping[str, Tensor]] = dict
        self._names: tuple[str, ...] = ()
        self._noted: tuple[int, Tensor] | None = None  # a step, and hashes of parameters before it
        self._apart = False  # a scheme has run that lets parameters differ
        self._last = ""

    def open(
        self,
        group: dist.ProcessGroup,
        devices: Set[str],
        join: Callable[[], None],
        beside: Sequence[dist.ProcessGroup] = (),
        values: Callable[[], Mapping[str, Tensor]] = dict,
        *,
        owner: object,
    ) -> None:
        """Takes the ranks to compare; a collective.

        Args:
            group: the hook's.
            devices: types of those that the model is on.
            join: makes the caller's stream wait for the exchanges.
            beside: groups of ranks that have other parts of the gradients, and raise as well.
            values: returns the parameters that ranks have in common, by name; no other names later.
            owner: the hook; with it, or at exit, the last verified step is looked at.
        """
        self._beside = beside
        if self._group is not None:
            return
        self._group, self._join = group, join
        self._values, self._names, self._apart = values, tuple(values()), False
        # Its own group: on the hook's, the next step's messages would queue behind this one's. On a
        # GPU the order of collectives of one group is that of the host, the same on all ranks.
        if devices <= {"cpu"} and is_gloo(host_backend(group)):
            (self._lent,) = borrow(group, 1)
            self._group = self._lent.group
        # At interpreter exit before Gloo's threads lose the interpreter.
        self._disarm = weakref.finalize(owner, self.close).detach

    @property
    def findings(self) -> list[Finding]:
        """Returns what was found, the oldest first."""
        return list(self._findings)

    # ---- what the engine calls

    def wants(self, step: int, scheme: Scheme) -> bool:
        """Whether a step is verified."""
        return step % self.every == 0 and self._group is not None

    def first_bucket_comes(self, step: int, scheme: Scheme) -> None:
        """Notes hashes of the parameters: no optimizer steps any before the first average comes."""
        self._apart = self._apart or not keeps_equal(scheme)
        if self.wants(step, scheme) and not self._apart:
            values, none = self._values(), torch.zeros(0, dtype=torch.float32, device="cpu")
            parts = [local_part(values.get(name, none)) for name in self._names]
            self._noted = step, hashes_of(parts)

    def step_over(self, step: int, scheme: Scheme, measured: list[Measurement]) -> None:
        """Starts the all-reduces of a verified step; waits for nothing."""
        group = self._group
        if group is None:
            return
        self._join()
        law = law_of(scheme, group.size(), step)
        noted, self._noted = self._noted, None
        if noted is None or noted[0] != step:  # of as many parameters, since others may have some
            noted = step, torch.zeros(len(self._names), dtype=torch.int64, device="cpu")
        compared = (measured, self._names, noted[1])
        self._pending.append(VerifiedStep(step, law, *compared, group, self._lent))
        self._untold = True

    # ---- what the hook calls

    def step_begins(self, step: int) -> None:
        """Looks at what has come since; waits for it where the user or the memory wants that.

        Raises:
            VerificationError: a step broke its law, and ``action`` is "raise".
            CollectiveError: the verification failed, since a peer did.
        """
        raises = self.action == "raise"
        if self._pending or self._unraised or self._untold:
            untold, self._untold = self._untold, False
            self._collect(wait=raises or step % self.every == 0)
            wrong, self._unraised = self._unraised, []
            if raises:
                # All ranks beside this one come here in the same step, and raise as well.
                need_right(wrong, self._beside if untold else ())

    def close(self) -> None:
        """Warns of what was found, and gives back the process group.

        What has not come in some seconds is dropped, also where a peer has failed.
        """
        self._disarm()
        end = time.monotonic() + _AT_CLOSE
        while self._pending and not self._pending[0].ready() and time.monotonic() < end:
            time.sleep(1e-3)
        with contextlib.suppress(CollectiveError):
            self._collect(wait=False)
        if self._group is not None:
            warn_of(self._unraised, self._group.rank(), "warn", self._warned)
        if self._lent is not None:
            works = [work for one in self._pending for work in one.works]
            self._lent.give_up(works) if works else self._lent.give_back()  # waits for no peer
        self._pending.clear()
        self._group = self._lent = None

    def abandon(self) -> None:
        """Leaves the ranks without waiting for them, which may be gone; ``open`` takes others.

        The result of a step that is under way is dropped.
        """
        works = [work for one in self._pending for work in one.works]
        self._pending.clear()
        if self._lent is not None:
            self._lent.give_up(works)
        self._disarm()
        self._group = self._lent = None

    # ---- results

    def report(self) -> pd.DataFrame:
        """Returns a row per verified step, bucket and parameter; waits for what is under way.

        ``error`` is the norm of the averaged gradient minus the dense mean, over that of the dense
        mean; ``cosine`` is of the angle between the two; ``norm`` is the dense mean's. With error
        feedback the error of a step is what later steps send. No finding is raised here.
        """
        with needs("hook.verification.report()", "pandas"):
            import pandas as pd
        self._collect(wait=True)
        frame: pd.DataFrame = pd.DataFrame(list(self._rows), columns=list(Verified._fields))
        return frame

    def latest(self, *, wait: bool = False) -> list[Verified]:
        """Returns the report's rows of the last verified step.

        Args:
            wait: for what is under way; False: of the last step whose result was looked at.
        """
        if wait:
            self._collect(wait=True)
        return self._latest

    def metrics(self) -> dict[str, float]:
        """Returns numbers of the last verified step, see :meth:`HookState.metrics`."""
        self._collect(wait=False)
        return numbers_of(self._latest, len(self._findings))

    def __str__(self) -> str:
        self._collect(wait=False)
        if not self.steps:
            return "no step was verified yet"
        return in_words(self._last, self.steps, self._latest, self.findings)

    # ---- inside

    def _collect(self, *, wait: bool) -> None:
        """Judges the steps whose collectives have ended, and raises none of their findings."""
        with self._judging:
            while self._pending and (wait or self._pending[0].ready()):
                pending = self._pending.popleft()
                pending.wait()
                found, rows = pending.judge()
                self._findings += found
                self._rows += rows
                self._latest = rows
                self.steps, self._last = self.steps + 1, pending.law.name
                self._unraised += [one for one in found if one.kind != "not finite"]
                assert self._group is not None
                warn_of(found, self._group.rank(), self.action, self._warned)


def attach(hook: Any, verification: Verification, *, further_rounds: int = 0) -> None:
    """Makes a hook that has not met the other ranks yet verify its steps.

    Args:
        further_rounds: collectives within an exchange that a verified step has besides.
    """
    hook.verification = hook._engine.observer = verification
    hook._further_rounds = further_rounds
    hook._drivers.ensure(hook.scheme.traits.rounds + further_rounds)


def _checked(every: int, action: Verify, reference: VerifyWith) -> tuple[int, Verify]:
    every = fitting("register", "verify_every", every, int)
    if every < 1:
        raise OptionError(
            f"register(verify_every=...) is a number of steps, 1 or more, or None; got {every}"
        )
    if action not in ("warn", "raise"):
        raise OptionError(f"register(verify=...) is 'warn' or 'raise', got {action!r}")
    if reference not in get_args(VerifyWith):
        raise OptionError(f"register(verify_with=...) is 'sketch' or 'dense', got {reference!r}")
    return every, action


def need_verifiable(device: torch.device) -> None:
    """Raises while a CUDA graph is captured: replays would not compare what they compute."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RegistrationError(
            "register(verify_every=...): this step is being captured in a CUDA graph, and replays "
            "would be verified by nobody; register without verify_every, or run without capture"
        )


def _nothing() -> None:
    return
