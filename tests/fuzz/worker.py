"""Plays a case on one rank, and reports."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

import commhooks
from tests.fuzz.case import Case
from tests.fuzz.hosts import HOSTS
from tests.fuzz.model import Boom, batch, used
from tests.fuzz.run import Plan, Record, Run, digest
from tests.fuzz.schemes import build

__all__ = ["Leg", "Report", "play"]


@dataclass(frozen=True)
class Leg:
    """A part of a case on one number of ranks.

    Attributes:
        number: 0 begins; later ones continue from ``saved``, all ranks' states.
    """

    case: Case
    number: int = 0
    saved: tuple[bytes, ...] = ()


@dataclass
class Report:
    """The observations of a rank.

    Attributes:
        stage: where it is, or stopped: "construct", "register", "step 3", ..., "done".
        error: type and text of what was raised there; ``broken`` what it found wrong by itself.
        bits: by what must be equal on all ranks, a digest.
        counts: by step, whether it goes into the sums; ``shares`` of ranks with input.
        state: to continue from.
    """

    stage: str = "construct"
    error: tuple[str, str] | None = None
    broken: list[tuple[str, str]] = field(default_factory=list)
    bits: dict[str, str] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    before: Any = None
    after: Any = None
    spacings: Any = None
    entries: list[int] = field(default_factory=list)
    idle: bool = False
    state: bytes = b""
    trace: str = ""


def play(rank: int, size: int, leg: Leg) -> Any:
    """Runs a leg of a case on one rank."""
    case, report = leg.case, Report()
    plan = _Player(leg, rank, report)
    try:
        plan.play()
    except Exception as error:  # a verdict is made of it, with those of the other ranks
        report.error = (type(error).__name__, str(error))
        report.trace = _trace(error)
    finally:
        plan.close()
    if report.error is None and "part" not in case.setting:
        dist.barrier()  # nobody is still in a collective
    return report


class _Player:
    def __init__(self, leg: Leg, rank: int, report: Report) -> None:
        self.leg, self.case, self.rank, self.report = leg, leg.case, rank, report
        self.runs: list[Run] = []  # the second one resumed from the first
        self.switched: list[Any] = []
        self.first = leg.number * leg.case.steps
        self.least = self.most = 0  # steps to skip: not finite for sure, or as it may be

    def play(self) -> None:
        case, report = self.case, self.report
        group = self._group()
        if group is None:
            report.idle, report.stage = True, "done"
            return
        run = self._start(group)
        report.entries, report.spacings = run.sizes(), run.spacings()
        if "late" in case.setting:
            self._step(0, no_hook=True)
        if "plain" not in case.setting:
            report.stage = "register"
            run.register()
        if self.leg.saved:
            report.stage = "load"
            self.switched = [event[2:] for event in case.events if event[1] == "switch"]
            self._switches(run, self.switched)
            run.load(run.saved([_unpack(value)["hook"] for value in self.leg.saved]))
            run.steps = run.hook.step
        report.before = run.residuals()
        if case.join is None:
            for number in range(case.steps):
                self._events(number)
                self._step(number)
        else:
            self._join(run)
        report.stage = "end"
        self._finish(run)
        report.stage = "done"

    def _group(self) -> Any:
        size = dist.get_world_size()  # of this leg
        names = {"group": range(size), "part": range(size - 1)}
        for name, ranks in names.items():
            if name in self.case.setting:
                group: Any = dist.new_group(list(ranks))
                return group if self.rank in ranks else None
        return dist.group.WORLD

    def _start(self, group: Any, like: Run | None = None) -> Run:
        run = HOSTS.get(self.case.host, Run)(self.case, group.rank(), group)
        self.runs.append(run)
        if like is not None:
            run.net.load_state_dict(like.weights())
        elif self.leg.saved:
            run.net.load_state_dict(_unpack(self.leg.saved[0])["model"])
        run.wrap()
        return run

    # ---- steps

    def _step(self, number: int, *, no_hook: bool = False, share: float = 1.0) -> None:
        """A step of each run; a resumed one does what the first does, bit for bit."""
        case, report = self.case, self.report
        report.stage = f"step {number}"
        plan = self._plan(number, no_hook)
        records = [run.step(self.first + number, plan) for run in self.runs]
        record = records[0]
        if record is None and case.micro > 1:
            # A pass that raised before any gradient came has not begun: the next one is averaged
            # in its place, also where that is under no_sync, as in PyTorch.
            for run in self.runs:
                run.counts = False
        if record is not None:
            record.share = share
            report.records.append(record)
            if case.averages:
                name = f"gradients of step {number}" if share == 1 else f"{self.rank}/{number}"
                report.bits[name] = record.digest
            self._check_bad(number, plan, record)
            self.runs[0].settle(record)
        for other, again in zip(self.runs[1:], records[1:], strict=True):
            if not other.is_exact or record is None or again is None:
                continue
            if record.digest != again.digest:
                off = float((record.applied - again.applied).abs().max())
                text = f"step {number} differs by {off:.3g} from that without a stop"
                report.broken.append(("resume", text))
        for value in self.runs:
            self._count(value, f"in step {number}")

    def _count(self, run: Run, when: str) -> None:
        if run.hook is not None and run.counts and run.hook.step != run.steps:
            text = f"hook.step is {run.hook.step} after {run.steps} steps, {when}"
            self.report.broken.append(("steps", text))
            run.counts = False

    def _plan(self, number: int, no_hook: bool) -> Plan:
        gates, rank, flags = {}, 0, {}
        for at, kind, *more in () if no_hook else self.case.events:
            if at != number:
                continue
            if kind in ("raise", "poison"):
                gates[more[0]] = "raise" if kind == "raise" else more[1]
                rank = self.runs[0].world - 1
            elif kind in ("two", "penalty"):
                flags[kind] = True
        return Plan(gates, rank=rank, no_hook=no_hook, **flags)

    def _check_bad(self, number: int, plan: Plan, record: Record) -> None:
        """Checks that all ranks see a gradient that is not finite on one, and skip the step.

        Not at every place where it was: a sparse scheme sends some of the entries.
        """
        run = self.runs[0]
        if not plan.gates or not self.case.averages:
            self.most += not record.applied.isfinite().all()
            return
        bad = (~record.wanted.isfinite()).to(torch.int32)
        dist.all_reduce(bad, group=run.group)
        self.least += bool(bad.any())
        self.most += bool(bad.any()) or not record.applied.isfinite().all()
        if bad.any() and run.leaves_bad_steps:
            record.counts = False
            if record.applied.any():
                self.report.broken.append(("bad", f"step {number}: is not finite, and was taken"))
        elif bad.any() and record.applied.isfinite().all():
            text = (
                f"step {number}: {int((bad > 0).sum())} entries are not finite, all that arrive are"
            )
            self.report.broken.append(("bad", text))

    def _join(self, run: Run) -> None:
        case, world = self.case, run.world
        less = case.join or 0
        counts = [max(case.steps - less * rank, 1) for rank in range(world)]
        begun = run.steps
        # PyTorch's class divides by the ranks that have input where there is no hook, ours always.
        by_input = "join_divides" in case.setting
        divides = by_input and (case.host == "core" or run.hook is None)
        with run.ddp.join(divide_by_initial_world_size=not by_input):
            for number in range(counts[run.rank]):
                active = run.active = sum(count > number for count in counts)
                self._step(number, share=active / world if divides else 1.0)
                if run.hook is not None:
                    run.steps = run.hook.step
        run.steps = begun + max(counts)
        for _ in range(counts[run.rank], case.steps):  # others' steps, for the sums
            zero = torch.zeros(sum(self.report.entries), dtype=torch.float64)
            sizes = torch.zeros(len(run.trained), dtype=torch.float64)
            self.report.records.append(Record(zero, zero, sizes, "", [], [], counts=False))

    # ---- between steps

    def _events(self, number: int) -> None:
        for at, kind, *more in self.case.events:
            if at == number:
                self.report.stage = f"event {kind}"
                handler = getattr(self, f"_on_{kind}", None)
                if handler is not None:
                    handler(number, *more)

    def _on_switch(self, number: int, name: str, options: dict[str, Any]) -> None:
        self.switched.append((name, options))
        for run in self.runs:
            run.hook.switch(build(name, options, ()))

    def _on_resume(self, number: int, form: str = "torch") -> None:
        run = self.runs[0]
        state = run.state(gather=form == "gathered")
        if form == "flat":
            tensors, metadata = commhooks.checkpoint.flatten_state(state)
            state = commhooks.checkpoint.unflatten_state(tensors, metadata)
        state = _unpack(_pack(state))
        again = self._start(run.group, like=run)
        for (_, value), (_, before) in zip(
            again.net.named_parameters(), run.net.named_parameters(), strict=True
        ):
            value.requires_grad_(before.requires_grad)
            value.grad = None if before.grad is None else before.grad.detach().clone()
        again.register()
        self._switches(again, self.switched)
        again.load(state)
        again.steps, again.counts = run.steps, run.counts
        if self.case.host in ("torch", "replicate"):  # the same class inside
            # A state of the first steps cannot know the buckets to come, see docs/design/steps.md.
            again.is_exact = run.steps >= (3 if "static_graph" in self.case.ddp else 2)
            if run.hook.runner.regrouping.target_layout:  # it was loaded itself, a step ago
                again.is_exact = False
        if not run.counts:  # the first one averages its next pass in place of the one that raised
            again.is_exact = False
        if "compiled" in self.case.setting and run.steps < 2:
            again.is_exact = False  # where the compiler splits the graph is known a step later
        if not all(build(name, options, ()).traits.averages for name, options in self.switched):
            again.is_exact = False  # the ranks' parameters differ, and wrapping makes them equal

    def _switches(self, run: Run, switches: list[Any]) -> None:
        """Switches a job that goes on from a checkpoint to the scheme that ran."""
        for name, options in switches:
            run.hook.switch(build(name, options, ()))

    def _on_save(self, number: int) -> None:
        for run in self.runs:
            run.load(_unpack(_pack(run.state())))

    def _on_freeze(self, number: int) -> None:
        for run in self.runs:
            run.net.parts["extra"].requires_grad_(False)

    def _on_thaw(self, number: int) -> None:
        for run in self.runs:
            run.net.parts["extra"].requires_grad_(True)

    def _on_assign(self, number: int) -> None:
        """All parameters are other objects: the hook's own have no gradients from now on."""
        for run in self.runs:
            state = {name: value.clone() for name, value in run.ddp.state_dict().items()}
            run.ddp.load_state_dict(state, assign=True)

    def _on_cast(self, number: int, how: str) -> None:
        for run in self.runs:
            getattr(run.ddp, how)()

    def _on_eval(self, number: int) -> None:
        for run in self.runs:
            run.ddp.eval()
            with torch.no_grad():
                self._forward(run, number)
            run.ddp.train()

    def _on_discard(self, number: int) -> None:
        for run in self.runs:
            self._forward(run, number)

    def _on_trip(self, number: int) -> None:
        for run in self.runs:
            try:
                self._forward(run, number, {"forward": "raise"})
            except Boom:
                continue
            raise AssertionError("a forward pass that raises has not raised")

    def _forward(self, run: Run, number: int, gates: dict[str, str] | None = None) -> None:
        use = used(self.case, number, 77, self.rank)
        run.call(batch(self.case, number, 77, self.rank), use, gates or {}, self.rank)

    def _on_group(self, number: int) -> None:
        group: Any = dist.new_group(list(range(dist.get_world_size())))
        for run in self.runs:
            # PyTorch's class tells nobody; ours takes the hook along.
            if run.hook is not None and self.case.host != "core":
                run.hook.change_group(group)
            else:
                run.ddp._update_process_group(group)
            run.group = group

    def _on_unregister(self, number: int) -> None:
        for run in self.runs:
            commhooks.unregister(run.ddp)
            run.counts = False

    # ---- the end

    def _finish(self, run: Run) -> None:
        report, case = self.report, self.case
        report.after = run.residuals()
        if case.averages:
            report.bits["parameters"] = digest(run.shown())
        if run.hook is None:
            return
        for element in self.runs:
            self._count(element, "at the end")
        report.bits["step"] = str(run.hook.step)
        for key, name, value, equal in run.memory():
            if value.is_floating_point() and not value.isfinite().all():
                report.broken.append(("memory", f"{key} of {name} is not finite"))
            if equal:
                report.bits[f"memory {key} {name}"] = digest([value])
        plain = all(
            event[1] not in ("switch", "save", "raise", "unregister") for event in case.events
        )
        counts = plain and case.averages and not self.leg.number
        most = self.most * run.calls()
        if counts and not self.least <= run.skipped() <= most:
            text = f"{run.skipped()} steps were skipped, not {self.least} to {most}"
            report.broken.append(("skipped", text))
        report.state = _pack({"model": run.weights(), "hook": run.state(gather=run.gathers)})

    def close(self) -> None:
        for run in self.runs:
            if run.hook is not None and self.report.error is None:
                run.hook.close()
        self.runs.clear()


def _pack(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _unpack(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def _trace(error: BaseException) -> str:
    import traceback

    lines = traceback.format_exception(error)
    return "".join(lines[-4:])
