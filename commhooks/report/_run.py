"""Builds the page of a run: what a hook sent, when, and what backward waited for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commhooks.report._page import Page
from commhooks.report._style import BLUE, GREY, RED
from commhooks.report._timeline import draw
from commhooks.wrappers._feedback import unwrap_flush
from commhooks.wrappers._make import short_repr
from ddp_core import needs
from ddp_core.exchange._errors import listed

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from commhooks.hook._state import CandidateResult, HookState
    from commhooks.verify import Finding, Verification, VerifiedRow

__all__ = ["write_page"]

_HAS_MATPLOTLIB = find_spec("matplotlib") is not None
_MOST = 20  # parameters and findings on the page


def write_page(hook: HookState, path: str | Path, title: str = "") -> None:
    """Writes the page of a hook's run.

    Args:
        hook: the hook; one rank's page has that rank's times.
        path: HTML file to write.
        title: heading; the scheme by default.

    Without matplotlib the page has no pictures, and says so.

    Raises:
        MissingPackageError: pandas is not installed.
    """
    summary: Any = hook.summary()
    ranks = "1 rank" if hook.world_size == 1 else f"{hook.world_size} ranks"
    page = Page(title or f"{short_repr(unwrap_flush(hook.scheme))} on {ranks}")
    page.text(summary)
    rows = hook.report()
    if len(rows):
        # The paragraph above has the plan of "auto", in whole sentences.
        page.table(("", ""), [fact for fact in summary.facts[1:] if fact[0] != "plan"])
    if hook.candidates:
        page.section("Candidates")
        _candidates(page, hook.candidates)
    if len(rows):
        if not _HAS_MATPLOTLIB:
            page.text("This page has no pictures, which need matplotlib: pip install matplotlib")
        else:
            page.section("A step over time")
            _timeline(page, hook)
        page.section("Bytes of each bucket")
        _bytes(page, rows)
        if _HAS_MATPLOTLIB:
            page.section("Steps")
            page.figure(_steps(rows), "On a GPU times are known of some steps only.")
    if hook.verification is not None:
        page.section("Error per parameter")
        _errors(page, hook.verification)
    page.write(path)


def _timeline(page: Page, hook: HookState) -> None:
    try:
        figure: Any = draw(hook.ledger).figure
    except ValueError:
        page.text("No step has known times.")
        return
    page.figure(figure, "What comes after the end of backward is exposed.")


def _candidates(page: Page, candidates: Sequence[CandidateResult]) -> None:
    columns: dict[str, list[object]] = {
        "candidate": [candidate.candidate for candidate in candidates],
        "measured (ms)": [1e3 * candidate.measured_s for candidate in candidates],
        "steps": [candidate.steps for candidate in candidates],
        "once more (ms)": [1e3 * candidate.rerun_s for candidate in candidates],
    }
    # Few choices are compared once more.
    known = {
        name: some for name, some in columns.items() if any(number == number for number in some)
    }
    page.table(
        list(known),
        zip(*known.values(), strict=True),
        "Times of a step. Measured: the median of steps that alternated with the others, on the "
        "slowest rank; empty where a candidate was not tried.",
    )


def _bytes(page: Page, rows: pd.DataFrame) -> None:
    last = rows[rows.step == rows.step.max()]
    buckets = last.groupby("bucket")
    table = [
        (
            int(bucket),
            " + ".join(some.collective),
            int(some.dense_bytes.sum()) / 1e6,
            int(some.payload_bytes.sum()) / 1e6,
            float(some.wire_bytes.sum()) / 1e6,
            float(some.dense_wire_bytes.sum()) / 1e6,
        )
        for bucket, some in buckets
    ]
    columns = (
        "bucket",
        "collectives",
        "gradient (MB)",
        "payload (MB)",
        "sent (MB)",
        "uncompressed: sent (MB)",
    )
    page.table(columns, table, f"Step {int(last.step.iloc[0])}, of this rank.")


def _steps(rows: pd.DataFrame) -> Figure:
    with needs("hook.page()", "matplotlib"):
        from matplotlib.figure import Figure

    steps = rows.groupby("step")[["wire_bytes", "dense_wire_bytes", "exposed_s"]].sum(min_count=1)
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    # Points where there are few, and else lines.
    style: dict[str, Any] = {"marker": "." if len(steps) < 60 else "", "linewidth": 1}
    above.plot(steps.index, steps.dense_wire_bytes / 1e6, color=GREY, label="uncompressed", **style)
    above.plot(steps.index, steps.wire_bytes / 1e6, color=BLUE, label="sent", **style)
    above.set(ylabel="sent (MB)", ylim=(0, None))
    above.legend(frameon=False, fontsize=8)
    waits = steps.exposed_s.dropna()
    below.plot(waits.index, 1e3 * waits, color=RED, **style)
    below.set(ylabel="exposed (ms)", xlabel="step", ylim=(0, None))
    for axes in (above, below):
        _plain(axes, ("top", "right"))
    return figure


def _errors(page: Page, verification: Verification) -> None:
    """Adds the parameters with the largest errors, and the findings of verification."""
    rows = verification.latest(wait=True)
    if not verification.steps:
        page.text("No step was verified yet.")
        return
    findings = verification.findings[-_MOST:]
    if rows:
        # Infinite errors (a dense mean of zero) come first, unknown ones last.
        order = sorted(rows, key=lambda row: (row.error != row.error, -row.error))
        worst = order[:_MOST]
        norms = (
            f"Step {worst[0].step}: norm of the averaged gradient minus the uncompressed mean, "
            f"over the norm of that mean. With error feedback, later steps send it."
        )
        if _HAS_MATPLOTLIB:
            page.figure(_error_bars(worst), norms)
        else:
            page.text(norms)
        shown = [
            (row.parameter, row.bucket, f"{row.error:.3g}", f"{row.cosine:.5f}", f"{row.norm:.3g}")
            for row in worst
        ]
        caption = (
            f"{len(worst)} of {len(rows)} parameters, the largest errors first. Errors of "
            f"parameters of more than 64 entries are estimates by sketches, with a standard "
            f"deviation of 2 to 9 %."
        )
        page.table(("parameter", "bucket", "error", "cosine", "norm of mean"), shown, caption)
    else:
        page.text(
            f"{verification.steps} steps verified. There is no error to show: the scheme returns "
            f"no average of gradients."
        )
    # The findings.
    if not findings:
        page.text("Nothing was found to be wrong.")
        return
    columns = ("step", "kind", "ranks", "bucket", "parameter", "what")
    lines = [
        (
            str(finding.step),
            finding.kind,
            listed(finding.ranks, 16),
            _bucket(finding),
            finding.parameter,
            finding.text,
        )
        for finding in findings
    ]
    page.table(
        columns, lines, f"The last {len(findings)} of {len(verification.findings)} findings."
    )


def _bucket(finding: Finding) -> str:
    return str(finding.bucket) if finding.bucket >= 0 else ""


def _error_bars(worst: Sequence[VerifiedRow]) -> Figure:
    with needs("hook.page()", "matplotlib"):
        from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 0.8 + 0.22 * len(worst)), layout="constrained")
    axes = figure.subplots()
    sizes = [row.error if math.isfinite(row.error) else 0.0 for row in worst]
    places = range(len(worst), 0, -1)  # the largest above
    axes.barh(places, sizes, color=BLUE)
    axes.set_yticks(places, [row.parameter for row in worst], fontsize=8, parse_math=False)
    axes.set(xlabel="error over the norm of the uncompressed mean (ratio)")
    positive = [size for size in sizes if size > 0]
    if positive and max(positive) > 100 * min(positive):
        axes.set_xscale("log")
    _plain(axes, ("top", "right"))
    return figure


def _plain(axes: Any, sides: Sequence[str]) -> None:
    for side in sides:
        axes.spines[side].set_visible(False)
