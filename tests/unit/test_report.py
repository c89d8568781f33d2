"""Tests pictures, traces and pages of what a hook sent."""

from __future__ import annotations

import json
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import commhooks
from commhooks.auto._trials import Candidate, CandidateTimings
from commhooks.core._dense import Dense
from commhooks.hook._ledger import Ledger
from commhooks.report import Page, _run
from commhooks.report._style import spread
from commhooks.report._timeline import chrome_trace, draw, spans
from commhooks.verify import Finding, Verification, VerifiedRow
from ddp_core import RoundRecord


def row(step: int, bucket: int, number: int, begin: float, *, last: bool) -> RoundRecord:
    """Encodes for 1 s, waits 1 s for its lane, travels 2 s, and decodes for 1 s if last."""
    return RoundRecord(
        *(step, bucket, number, "all_reduce", 400, 100, 100.0),
        resumed=begin,
        yielded=begin + 1,
        issued=begin + 2,
        done=begin + 4,
        finished=begin + 5 if last else begin + 4,
        dense_wire_bytes=400.0,
    )


@pytest.fixture
def ledger() -> Ledger:
    filled = Ledger()
    for step in (0, 1):
        zero = 100.0 * step
        filled.add(row(step, 0, 0, zero, last=False))
        filled.add(row(step, 0, 1, zero + 4, last=True))
        filled.add(row(step, 1, 0, zero + 3, last=True))
        filled.record_last_launch(step, zero + 3)
    return filled


@pytest.mark.usefixtures("one_rank")
def test_a_page_shows_the_plan_of_auto(tmp_path: Path) -> None:
    ddp = DistributedDataParallel(nn.Linear(8, 8))
    hook = commhooks.register(ddp, "auto", candidates=["int8"])
    for _ in range(3):
        ddp(torch.randn(2, 8)).sum().backward()
    assert ("plan", "auto: nothing is decided yet") in hook.summary().facts  # type: ignore[attr-defined]
    hook.page(tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text()
    assert page.count("auto: nothing is decided yet") == 1  # not in a table's cell as well
    assert page.count("<td>plan</td>") == 0


def _raced(*medians: tuple[str, float]) -> CandidateTimings:
    race = CandidateTimings([Candidate(name, Dense(), 0.0) for name, _ in medians])
    for _, seconds in medians:
        race.add([seconds] * 8)
    return race


def _rows_of(page: str) -> list[list[str]]:
    """The cells of the first table."""
    body = page.partition("<tbody>")[2].partition("</tbody>")[0]
    return [re.findall("<td[^>]*>(.*?)</td>", row) for row in body.split("</tr>")[:-1]]


@pytest.mark.usefixtures("one_rank")
def test_a_page_shows_what_was_measured_of_candidates(tmp_path: Path) -> None:
    hook: Any = commhooks.register(DistributedDataParallel(nn.Linear(8, 8)), "auto")
    hook._trials._timings = _raced(("int8", 0.0245), ("none", 0.022))
    hook.page(tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text()
    assert "once more" not in page
    assert _rows_of(page) == [["none", "22.00", "8"], ["int8", "24.50", "8"]]
    hook._trials._before, hook._trials._timings = (
        hook._trials._timings.entries,
        _raced(("int8", 0.0265)),
    )
    hook.page(tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text()
    assert "once more (ms)" in page
    assert [row[-1] for row in _rows_of(page)] == ["", "26.50"]


@pytest.mark.usefixtures("one_rank")
def test_a_run_without_auto_has_tried_nothing(tmp_path: Path) -> None:
    hook = commhooks.register(DistributedDataParallel(nn.Linear(8, 8)), "int8")
    assert not hook.candidates
    hook.page(tmp_path / "run.html")
    assert "Candidates" not in (tmp_path / "run.html").read_text()


def test_a_sentence_in_a_cell_breaks_into_lines() -> None:
    page = Page("findings")
    page.table(("what", "step"), [("a word or two", 1), ("many " * 20, 2)])
    html = page.html()
    assert "<td>a word or two</td>" in html
    assert '<td class="long">many ' in html


class _Tags(HTMLParser):
    """Checks that every tag is closed, and collects links to other files."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        self.links += [value or "" for name, value in attrs if name == "xlink:href"]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def links_of(html: str) -> list[str]:
    tags = _Tags()
    tags.feed(html)
    assert tags.open == []
    return tags.links


def test_spans_are_the_rounds_without_waiting_for_a_lane(ledger: Ledger) -> None:
    drawn = spans(ledger.rows_by_step()[0])
    bucket = [(span.kind, span.begin, span.end) for span in drawn if span.bucket == 0]
    assert bucket == [
        ("encode", 0, 1),
        ("collective", 2, 4),
        ("encode", 4, 5),
        ("collective", 6, 8),
        ("decode", 8, 9),
    ]


def test_times_that_are_not_known_are_left_out() -> None:
    unknown = row(0, 0, 0, float("nan"), last=True)
    assert spans([unknown]) == []
    ledger = Ledger()
    ledger.add(unknown)
    with pytest.raises(ValueError, match="no step with known times"):
        draw(ledger)


def test_a_picture_has_a_line_per_bucket(ledger: Ledger, tmp_path: Path) -> None:
    axes = draw(ledger, tmp_path / "step.svg", step=1)
    assert (tmp_path / "step.svg").stat().st_size > 1000
    assert [label.get_text() for label in axes.get_yticklabels()] == ["bucket 0", "bucket 1"]
    assert "step 1" in axes.get_xlabel()
    bars = sorted((bar.get_x(), bar.get_width()) for bar in axes.patches if bar.get_width())
    assert_close(bars[:2], [(0.0, 1000.0), (2000.0, 2000.0)])
    with pytest.raises(ValueError, match=r"step=7.*steps 0 to 1 are"):
        draw(ledger, step=7)


def test_a_trace_is_what_perfetto_reads(ledger: Ledger, tmp_path: Path) -> None:
    chrome_trace(ledger, tmp_path / "trace.json", rank=3)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spoken = [event for event in events if event["ph"] == "M"]
    assert {event["args"]["name"] for event in spoken} == {"rank 3", "bucket 0", "bucket 1"}
    parts = [event for event in events if event["ph"] == "X"]
    assert len(parts) == 2 * 8
    assert parts[0]["dur"] == pytest.approx(1e6)  # microseconds
    assert {event["pid"] for event in parts} == {3}


def test_a_page_needs_no_other_file_and_escapes_what_it_is_given() -> None:
    from matplotlib.figure import Figure

    page = Page("<b>title")
    page.section("a & b")
    page.text("<script>")
    page.table(("name", "ms"), [("<i>", 1.0), ("none", 12.5)], "caption")
    page.table((), [])
    for _ in range(2):
        figure = Figure()
        figure.subplots().plot([1, 2], [3, 4])
        page.figure(figure)
    html = page.html()
    assert all(link.startswith("#") for link in links_of(html))
    assert "<script>" not in html
    assert "<i>" not in html
    assert "<td>&lt;i&gt;</td>" in html
    assert '<td class="number">12.50</td>' in html
    ids = [part.split('"')[0] for part in html.split(' id="')[1:]]
    assert len(ids) == len(set(ids))


@pytest.mark.usefixtures("one_rank")
def test_a_run_has_a_page_a_picture_and_numbers(tmp_path: Path) -> None:
    ddp = DistributedDataParallel(nn.Linear(64, 64))
    hook = commhooks.register(ddp, "int8")
    hook.page(tmp_path / "early.html")
    assert "there is no other rank" in (tmp_path / "early.html").read_text()
    for _ in range(3):
        ddp(torch.randn(2, 64)).sum().backward()
    hook.page(tmp_path / "run.html", "My <run>")
    html = (tmp_path / "run.html").read_text()
    assert "<h1>My &lt;run&gt;</h1>" in html
    assert all(link.startswith("#") for link in links_of(html))
    assert html.count("<svg") == 2
    hook.plot(tmp_path / "step.png")
    hook.chrome_trace(tmp_path / "trace.json")
    numbers = hook.metrics("comm/")
    assert numbers["comm/dense_bytes"] == 4 * 65 * 64
    assert {name.removeprefix("comm/") for name in numbers} >= {"exposed_s", "skipped_steps"}


@pytest.mark.usefixtures("one_rank")
def test_a_page_without_matplotlib_has_no_pictures_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_run, "_HAS_MATPLOTLIB", False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    hook = _verified([], [VerifiedRow(0, 0, "w", 0.1, 0.5, 1.0)])
    hook.page(tmp_path / "run.html")
    html = (tmp_path / "run.html").read_text()
    assert "This page has no pictures, which need matplotlib" in html
    assert "<svg" not in html
    assert "Bytes of each bucket" in html
    assert "norm of the averaged gradient" in html
    assert "are exposed" not in html  # one rank waits for nobody


@pytest.mark.usefixtures("one_rank")
def test_the_metrics_are_the_documented_ones() -> None:
    ddp = DistributedDataParallel(nn.Linear(8, 8))
    hook = commhooks.register(ddp, "int8", verify=1)
    ddp(torch.randn(2, 8)).sum().backward()
    assert hook.verification is not None
    hook.verification.report()
    documented = commhooks.HookState.metrics.__doc__
    assert documented is not None
    verified = {"verify/error", "verify/error_median", "verify/cosine_min", "verify/findings"}
    assert verified <= set(hook.metrics())
    for name in hook.metrics():
        assert f"``{name}``" in documented


def _verified(findings: list[Finding], rows: list[VerifiedRow]) -> commhooks.HookState:
    """A hook of which one step was verified, with these results."""
    ddp = DistributedDataParallel(nn.Linear(8, 8))
    hook = commhooks.register(ddp, "int8", verify=Verification(1, "raise"))
    ddp(torch.randn(2, 8)).sum().backward()
    assert hook.verification is not None
    hook.verification.latest(wait=True)
    hook.verification._findings += findings
    hook.verification._latest = rows
    return hook


@pytest.mark.usefixtures("one_rank")
def test_a_verified_run_shows_the_parameters_of_largest_error(tmp_path: Path) -> None:
    rows = [VerifiedRow(0, 0, f"layer{k}.$w_{k}", k / 100, 0.5, 1.0) for k in range(1, 31)]
    rows += [VerifiedRow(0, 1, "<zero>", math.inf, math.nan, 0.0)]
    findings = [Finding(0, 0, "layer3.w", "ranks differ", (1,), "it <differs>")]
    hook = _verified(findings, rows)
    hook.page(tmp_path / "run.html")
    html = (tmp_path / "run.html").read_text()
    section = html.partition("Error per parameter")[2]
    assert links_of(html)
    assert "<td>&lt;zero&gt;</td>" in section
    assert "<td>layer30.$w_30</td>" in section
    assert section.index("<td>&lt;zero&gt;") < section.index("<td>layer30.$w_30")
    assert "layer11.$w_11" not in section  # the 20 largest
    assert "it &lt;differs&gt;" in section
    assert section.count("<svg") == 1
    numbers = hook.metrics()
    assert numbers["verify/findings"] == 1
    assert numbers["verify/error"] == math.inf
    assert numbers["verify/error_median"] == pytest.approx(0.155)  # of 0.01 to 0.30
    assert "the median of all parameters is 0.155." in str(hook.verification)
    assert numbers["verify/cosine_min"] == 0.5


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["int8", "demo"])
def test_a_page_of_a_run_without_errors(name: str, tmp_path: Path) -> None:
    ddp = DistributedDataParallel(nn.Linear(8, 8))
    hook = commhooks.register(ddp, name, verify=10)
    hook.page(tmp_path / "early.html")
    assert "No step was verified yet" in (tmp_path / "early.html").read_text()
    ddp(torch.zeros(2, 8)).sum().backward()  # a gradient of zero, whose cosine is not known
    hook.page(tmp_path / "run.html")
    assert "Nothing was found" in (tmp_path / "run.html").read_text()


def test_a_column_without_a_known_number_is_a_column() -> None:
    page = Page("title")
    page.table(("zero and infinite", "unknown"), [(0.0, math.nan), (math.inf, math.nan)])
    assert "inf" in page.html()


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ([], []),
        ([0.1, 0.9], [0.1, 0.9]),
        ([0.5, 0.5], [0.4, 0.6]),
        ([0.0, 0.0, 0.9], [0.0, 0.2, 0.9]),
        ([1.0, 0.95, 0.1], [1.0, 0.8, 0.1]),
        ([0.5] * 11, [round(0.1 * place, 12) for place in range(11)]),  # closer, to fit
    ],
)
def test_labels_are_apart_and_near_their_points(wanted: list[float], expected: list[float]) -> None:
    assert spread(wanted, 0.2, 0.0, 1.0) == pytest.approx(expected)
