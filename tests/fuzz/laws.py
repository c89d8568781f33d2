"""The verdict on a case, from what its ranks saw."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.fuzz.case import Case
from tests.fuzz.hosts import BY_TENSOR
from tests.fuzz.pool import Trouble
from tests.fuzz.schemes import APART, Law, build, law_of
from tests.fuzz.worker import Report

__all__ = ["Verdict", "continues", "judge", "keeps_sums"]

# Most that a random scheme may be off, in what it can be expected to be: blocks of these models
# are few, so that a step's error is far from its mean.
_NOISE = 6.0
# Rounding of sums of products in float32, in norms of what is sent, see tests/contract/cases.py.
_SUMS = 200 * torch.finfo(torch.float32).eps

_UNUSED = {"find_unused_parameters": True}
_TWICE = "marked? .*ready (only once|twice)"
_TORCHS = "cannot remove a hook or take a bucket layout"
_DELAYED = "does not take part in the delayed all-reduce"
# What PyTorch or this package says no to, and the least that a case has then, on any host; on the
# one that is named here it always does. Whatever else is refused is broken.
REFUSALS: tuple[tuple[str, dict[str, Any]], ...] = (
    (_TORCHS, {"setting": ("layout_scheme",)}),
    (_TORCHS, {"setting": ("layout_shape",)}),
    (_TORCHS, {"events": ((2, "unregister"),)}),
    ("already has the hook|AcceleratorError", {"ddp": {"mixed_precision": "bf16_f32"}}),  # 2.11
    ("has no hold", {"setting": ("hold",)}),
    (
        "Expected to have finished reduction",
        {"events": ((1, "raise", "middle"),), "ddp": {"bucket_cap_mb": 0.0005}},
    ),
    (
        "trained without a hook before",
        {"setting": ("late",), "ddp": {**_UNUSED, "skip_all_reduce_unused_params": True}},
    ),
    (
        "join with find_unused_parameters=True",  # with a scheme that has memory
        {"join": 1, "ddp": _UNUSED, "scheme": "onebit"},
    ),
    (_TWICE, {"host": "core", "model": ("reentrant",), "ddp": _UNUSED}),
    (_TWICE, {"host": "core", "model": ("reentrant",), "events": ((1, "two"),)}),
    (
        "training graph has changed",
        {"host": "core", "model": ("branches",), "use": "ranks", "ddp": {"static_graph": True}},
    ),
    (
        "incompatible with .grad",
        {"host": "core", "model": ("reentrant",), "events": ((1, "penalty"),)},
    ),
    (
        "non-empty donated buffers",
        {"host": "core", "setting": ("compiled",), "events": ((1, "penalty"),)},
    ),
    ("run in backward", {"host": "core", "setting": ("delayed", "in_backward")}),
    (_DELAYED, {"host": "core", "setting": ("delayed",), "join": 1}),
)
# What an error says of parameters that were replaced, or cast.
CHANGES = r"assign|replaced|other objects|dtype|float64|bfloat16"


@dataclass(frozen=True)
class Verdict:
    """``status`` is "ok", "refused" or "broken"; then ``law`` says which, ``text`` how."""

    status: str
    law: str = ""
    text: str = ""


def judge(case: Case, reports: Sequence[Report | Trouble]) -> Verdict:
    """Judges one leg of a case."""
    for kind in ("hung", "died", "raised"):
        results = [(r, report) for r, report in enumerate(reports) if isinstance(report, Trouble)]
        texts = [
            f"rank {r} {kind}: {trouble.text}" for r, trouble in results if trouble.kind == kind
        ]
        if texts:
            return Verdict("broken", kind, "\n".join(texts))
    ranks = [report for report in reports if isinstance(report, Report) and not report.idle]
    if case.change is not None and any(report.error for report in ranks):
        return _of_changes(case.change, ranks)
    if any(report.error for report in ranks):
        return _of_errors(case, ranks)
    for rank in ranks:
        for law, text in rank.broken:
            return Verdict("broken", law, text)
    for name in ranks[0].bits:
        values = [report.bits.get(name) for report in ranks]
        if len({value for value in values if value is not None}) > 1 and "/" not in name:
            law = name.split()[0]
            return Verdict("broken", f"equal {law}", f"ranks differ in {name}")
    results = _of_unused(case, ranks)
    return results if results.status == "broken" else _of_sums(case, ranks)


def _of_unused(case: Case, ranks: Sequence[Report]) -> Verdict:
    """A parameter that no rank has used has no gradient afterwards, and the others have one."""
    if case.join is not None or {"in_backward", "delayed"} & set(case.setting):
        return Verdict("ok")
    if not case.averages:  # a rank drops the bad gradient that it kept, the others keep theirs
        return Verdict("ok")
    for step, records in enumerate(zip(*(report.records for report in ranks), strict=True)):
        for index in range(len(records[0].idle)) if records[0].counts else ():
            unused = all(record.idle[index] for record in records)
            for rank, value in enumerate(records):
                if value.missing[index] != unused:
                    used = "no rank uses" if unused else "a rank uses"
                    has = "no gradient" if value.missing[index] else "a gradient"
                    text = f"step {step}: parameter {index}, which {used}, has {has} on rank {rank}"
                    return Verdict("broken", "unused", text)
    return Verdict("ok")


def _refused(case: Case, text: str) -> bool:
    """Returns whether a case with these features may end with an error."""
    for pattern, least in REFUSALS:
        needed = Case(**least).features
        of_any = {name for name in needed if name.startswith(("host=", "scheme=", "use="))}
        if needed - of_any <= case.features and re.search(pattern, text):
            return True
    return False


def _of_errors(case: Case, ranks: Sequence[Report]) -> Verdict:
    errors = [report.error or ("", "nothing") for report in ranks]
    stages = [report.stage for report in ranks]
    first = next(index for index, report in enumerate(ranks) if report.error)
    kind, text = errors[first]
    shown = f"{stages[first]}: {kind}: {text}"
    alike = len({name for name, _ in errors}) == 1 and len(set(stages)) == 1
    if not alike:
        everything = "; ".join(
            f"rank {r} {stage}: {name}: {text[:300]}"
            for r, (stage, (name, text)) in enumerate(zip(stages, errors, strict=True))
        )
        return Verdict("broken", "alike", f"not all ranks end alike: {everything}")
    if _refused(case, text):
        return Verdict("refused", stages[first], f"{kind}: {text}")
    where = "step" if stages[first].startswith("step") else stages[first]
    return Verdict("broken", f"{kind} in {where}", f"{shown}\n{ranks[first].trace}")


def _of_changes(step: int, ranks: Sequence[Report]) -> Verdict:
    """Parameters that are others, or of another type, are an error on every rank in a step.

    Or they are averaged as before, which the other laws look at: a type may be what it was.
    """
    stages = (f"step {step}", f"step {step + 1}")
    for rank, report in enumerate(ranks):
        kind, text = report.error or ("", "no error")
        if report.error is None or report.stage not in stages or not re.search(CHANGES, text):
            return Verdict("broken", "change", f"rank {rank}, {report.stage}: {kind}: {text}")
    return Verdict("ok")


# ---- what was applied


def _of_sums(case: Case, ranks: Sequence[Report]) -> Verdict:
    laws = [law_of(build(case.scheme, case.options, case.wrap))]
    laws += [law_of(build(e[2], e[3], ())) for e in case.events if e[1] == "switch"]
    kinds = {law.kind for law in laws}
    averages_later = any(event[1] == "unregister" for event in case.events)
    if kinds == {"local"} and not averages_later and case.join is None:
        return _of_local(ranks)
    if not kinds <= {"sum", "noisy"} or {"momentum", "packed"} & set(case.setting):
        return Verdict("ok")
    world = len(ranks)
    records = [[record for record in rank.records if record.hooked] for rank in ranks]
    leader = max(range(world), key=lambda r: sum(record.digest != "" for record in records[r]))
    applied = wanted = exact = noise = torch.zeros(())
    names = {case.scheme, *(event[2] for event in case.events if event[1] == "switch")}
    apart = names <= APART or case.host in BY_TENSOR
    for step in range(len(records[0])):
        of_step = [rank[step] for rank in records]
        value = of_step[leader]
        if not value.counts:
            continue
        applied = applied + value.applied * value.share
        wanted = wanted + torch.stack([other.wanted for other in of_step]).sum(0) / world
        sizes = torch.stack([other.sizes for other in of_step]).max(0).values
        if not apart and case.scaled:  # a small gradient has the errors of a large one
            sizes = sizes.norm().expand(len(sizes))
        exact = exact + (sizes * ranks[0].spacings + value.least) * (world + 2)
        norm = sizes if apart else sizes.norm()
        exact = exact + _rounding(norm, laws, world)
        noise = noise + norm * _NOISE * math.sqrt(max(law.noise for law in laws))
    if not applied.shape:
        return Verdict("ok")
    before, after = (
        torch.stack([torch.cat(getattr(report, name)) for report in ranks]).mean(0)
        for name in ("before", "after")
    )
    off = (applied + after - before - wanted).abs()
    entries = torch.tensor(ranks[0].entries)
    bound = torch.repeat_interleave(exact + noise, entries) + 1e-30
    # Noise is bounded as a whole: rounding in each entry, noise in the norm of all.
    most = float(torch.repeat_interleave(exact, entries).norm() + noise.norm()) + 1e-30
    worst = int((off / bound).argmax()) if len(off) else 0
    if off.norm() > most:
        text = f"applied + residual - sum of gradients: {float(off.norm()):.3g}, allowed {most:.3g}"
        return Verdict("broken", "sum", f"{text}; wanted {float(wanted.norm()):.3g}")
    if len(off) and not off[worst] <= bound[worst]:
        text = (
            f"applied + residual - sum of gradients is {float(off[worst]):.3g} at entry {worst}, "
            f"allowed {float(bound[worst]):.3g}; in norms: {float(off.norm()):.3g} of "
            f"{float(wanted.norm()):.3g}"
        )
        return Verdict("broken", "sum", text)
    return Verdict("ok")


def _rounding(norm: torch.Tensor, laws: Sequence[Law], world: int) -> torch.Tensor:
    """Returns the part of a step's rounding that does not depend on a parameter's own type.

    Args:
        norm: of what is sent: by parameter, or of everything where parameters are coded together.
    """
    wire, least = (max(getattr(law, name) for law in laws) for name in ("wire", "least"))
    return norm * (_SUMS + (world + 1) / 2 * wire) + world**2 * least


def _of_local(ranks: Sequence[Report]) -> Verdict:
    for rank, report in enumerate(ranks):
        for record in report.records:
            # Like the gradient of this rank alone, but for buckets that have another type.
            off = (record.applied - record.wanted).abs()
            if (
                record.counts
                and record.hooked
                and float(off.max()) > 1e-6 + 0.01 * float(record.wanted.abs().max())
            ):
                return Verdict("broken", "local", f"rank {rank}: off by {float(off.max()):.3g}")
    return Verdict("ok")


def keeps_sums(case: Case) -> bool:
    """Returns whether residuals are the part of gradients that is not applied yet."""
    built = [build(case.scheme, case.options, case.wrap)]
    built += [build(e[2], e[3], ()) for e in case.events if e[1] == "switch"]
    return all(law_of(value).kind in ("sum", "noisy") for value in built)


def continues(before: Sequence[Report], after: Sequence[Report]) -> Verdict:
    """Holds that a leg begins with the mean over ranks of the residuals before it."""

    def mean(ranks: Sequence[Any], name: str) -> torch.Tensor:
        return torch.stack([torch.cat(getattr(r, name)) for r in ranks if not r.idle]).mean(0)

    left, taken = mean(before, "after"), mean(after, "before")
    off = float((left - taken).abs().max()) if len(left) else 0.0
    if off > 1e-5 * float(left.abs().max()):
        return Verdict(
            "broken",
            "load",
            f"the mean residual was {float(left.norm()):.3g} on {len(before)} ranks, and is "
            f"{float(taken.norm()):.3g} on {len(after)}",
        )
    return Verdict("ok")
