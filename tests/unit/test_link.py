"""The fit of ``commhooks link`` to planted times, and the file that it writes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commhooks.cli._link import _show
from commhooks.errors import RegistrationError
from commhooks.predict import Fabric, Link, load_fabric, save_fabric
from commhooks.predict._link import (
    COLLECTIVES,
    Layout,
    LinkReport,
    Part,
    Timing,
    fit_fabric,
    measure_link,
    model_seconds,
    overlap_of,
)
from tests.tools.command_line import run_cli

SIZES = [2**power for power in range(10, 27, 2)]


def ring(collective: str, nbytes: int, ranks: int, link: Link) -> float:
    """Gloo's rings and pairs, written down once more (Thakur et al., 2005)."""
    rounds = 2 * (ranks - 1) if collective == "all_reduce" else ranks - 1
    part = nbytes if collective == "all_gather" else nbytes / ranks
    return rounds * (link.latency + part / link.bandwidth)


def rings(part: Part, ranks: int, link: Link) -> list[Timing]:
    return [
        Timing(part, name, nbytes, seconds, seconds, seconds)
        for name in COLLECTIVES
        for nbytes in SIZES
        for seconds in [ring(name, nbytes, ranks, link)]
    ]


def assert_near(link: Link | None, planted: Link, *, rel: float = 0.02) -> None:
    assert link is not None
    assert link.latency == pytest.approx(planted.latency, rel=rel)
    assert link.bandwidth == pytest.approx(planted.bandwidth, rel=rel)


@pytest.mark.parametrize("latency", [2e-6, 5e-5, 1e-3])
@pytest.mark.parametrize("bandwidth", [1e6, 1.17e8, 1e10])
def test_a_planted_link_is_found(latency: float, bandwidth: float) -> None:
    planted = Link(latency, bandwidth)
    fit = fit_fabric(Layout(4, 1), rings("between", 4, planted), "gloo")
    assert_near(fit.between, planted)
    assert fit.inside is None
    assert fit.ranks_per_node == 1


@pytest.mark.parametrize(
    ("factor", "warns"), [(1.0, False), (1.2, False), (1.5, True), (0.5, True)]
)
def test_a_poor_fit_is_named_below_the_table(
    factor: float, warns: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    layout, link = Layout(4, 1), Link(1e-4, 1e8)
    times = [ring._replace(seconds=ring.seconds * factor) for ring in rings("between", 4, link)]
    report = LinkReport(Fabric("x", link, library="gloo"), layout, tuple(times), "cpu", 3, 1.0)
    assert report.fit_error == pytest.approx(max(factor, 1 / factor))
    _show(report)
    shown = " ".join(capsys.readouterr().out.split())
    assert "spread:" not in shown
    assert "latency 100 us, bandwidth 0.1 GB/s" in shown
    _show(report, full=True)
    assert "spread:" in " ".join(capsys.readouterr().out.split())
    assert (f"off by a factor of {report.fit_error:.1f} or more" in shown) is warns


def test_a_narrow_terminal_cuts_no_measurement(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    link = Link(1e-4, 1e8)
    times = tuple(rings("between", 4, link))
    fabric = Fabric("x", link, library="gloo")
    _show(LinkReport(fabric, Layout(4, 1), times, "cpu", 3, 1.0), full=True)
    shown = capsys.readouterr().out
    assert shown.count("all_reduce") == len(SIZES)
    assert "…" not in shown


def test_ranks_of_one_node_have_a_link_inside_and_a_copy_of_it_between() -> None:
    planted = Link(2e-5, 3e9)
    fit = fit_fabric(Layout(4, 4), rings("inside", 4, planted), "gloo")
    assert_near(fit.inside, planted)
    assert fit.between == fit.inside
    assert fit.ranks_per_node == 4
    assert "copy" in fit.source


def test_links_inside_and_between_nodes_are_distinguished() -> None:
    layout, inside, between = Layout(8, 4), Link(2e-6, 5e10), Link(4e-5, 1e9)
    fabric = Fabric("planted", between, inside=inside, ranks_per_node=4, library="gloo")
    cells = [Timing(part, name, nbytes, 0.0, 0.0, 0.0) for part in ("inside", "between", "all")
             for name in COLLECTIVES for nbytes in SIZES]  # fmt: skip
    times = [cell._replace(seconds=model_seconds(layout, cell, fabric)) for cell in cells]
    fit = fit_fabric(layout, times, "gloo")
    assert_near(fit.inside, inside)
    assert_near(fit.between, between)
    # Several network cards need several ranks: those of all tell the bandwidth, if they reach more.
    wide = replace(fabric, between=Link(4e-5, 4e9))
    times = [
        timing._replace(seconds=model_seconds(layout, timing, wide))
        if timing.part == "all"
        else timing
        for timing in times
    ]
    assert_near(fit_fabric(layout, times, "gloo").between, Link(4e-5, 4e9))


def test_a_few_odd_times_move_nothing() -> None:
    planted = Link(5e-5, 1.17e8)
    times = rings("between", 2, planted)
    for place, factor in ((0, 30.0), (8, 0.1), (13, 9.0)):
        times[place] = times[place]._replace(seconds=factor * times[place].seconds)
    assert_near(fit_fabric(Layout(2, 1), times, "gloo").between, planted)


def test_sizes_that_were_left_out_are_not_needed() -> None:
    planted = Link(5e-5, 1e8)
    times = [ring for ring in rings("between", 2, planted) if ring.nbytes <= 2**20]
    assert_near(fit_fabric(Layout(2, 1), times, "gloo").between, planted)


@pytest.mark.parametrize(
    ("pairs", "overlap"),
    [
        ([(0.081, 0.0818), (0.081, 0.082), (0.081, 0.4)], 0.99),  # a long line, and an odd time
        ([(0.003, 0.0076), (0.0002, 0.004), (0.003, 0.006)], 0.0),  # work of a processor
        ([(0.004, 0.006)] * 3, 0.5),
        ([(0.004, 0.003)] * 3, 1.0),
    ],
)
def test_two_messages_at_once_show_what_share_of_the_latency_they_have_in_common(
    pairs: list[tuple[float, float]], overlap: float
) -> None:
    assert overlap_of(pairs) == pytest.approx(overlap, abs=0.01)
    fabric = fit_fabric(Layout(2, 1), rings("between", 2, Link(1e-4, 1e8)), "gloo", overlap=overlap)
    assert fabric.overlap == overlap


# ---- the file


def test_the_measurements_are_in_the_file_beside_the_fabric(tmp_path: Path) -> None:
    layout, times = Layout(4, 4), rings("inside", 4, Link(2e-5, 3e9))
    report = LinkReport(fit_fabric(layout, times, "gloo"), layout, tuple(times), "cpu", 3, 1.0)
    save_fabric(report.fabric, tmp_path / "link.json", measured=report.measured)
    assert load_fabric(tmp_path / "link.json") == report.fabric
    saved = json.loads((tmp_path / "link.json").read_text())["measured"]
    assert [Timing(**time) for time in saved["times"]] == times
    assert (saved["ranks"], saved["per_node"], saved["rounds"]) == (4, 4, 3)


GOOD: dict[str, Any] = {"name": "x", "between": {"latency": 1e-5, "bandwidth": 1e9}}
BAD = {
    "empty": "",
    "binary": bytes(range(256)).decode("latin"),
    "no JSON": "latency: 3",
    "a list": "[1, 2]",
    "no link": json.dumps({"name": "x"}),
    "a link of words": json.dumps(GOOD | {"between": {"latency": "a", "bandwidth": 1e9}}),
    "no bandwidth": json.dumps(GOOD | {"between": {"latency": 1e-5, "bandwidth": 0}}),
    "another key": json.dumps(GOOD | {"speed": 3}),
    "another library": json.dumps(GOOD | {"library": "carrier pigeons"}),
    "no link inside": json.dumps(GOOD | {"ranks_per_node": 4}),
    "a latency without end": json.dumps(GOOD | {"between": {"latency": 1e400, "bandwidth": 1e9}}),
    "no number": json.dumps(GOOD | {"between": {"latency": float("nan"), "bandwidth": 1e9}}),
    "a name that is a number": json.dumps(GOOD | {"name": 3}),
    "core seconds in words": json.dumps(GOOD | {"cpu_s_per_byte": "few"}),
    "negative core seconds": json.dumps(GOOD | {"cpu_s_per_byte": -1.0}),
    "a switch without a rate": json.dumps(GOOD | {"multicast": 0}),
    "a tree in words": json.dumps(GOOD | {"tree_nbytes": "x"}),
    "more than the whole latency": json.dumps(GOOD | {"library": "gloo", "overlap": 1.5}),
    "a stream on which messages overlap": json.dumps(GOOD | {"overlap": 1.0}),
    "half a rank": json.dumps(GOOD | {"ranks_per_node": 0.5}),
    "no ranks": json.dumps(GOOD | {"ranks_per_node": 0}),
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_a_bad_file_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "link.json"
    file.write_text(text, encoding="latin")
    with pytest.raises(ValueError, match=r"link\.json"):
        load_fabric(file)


@pytest.mark.parametrize("text", [None, BAD["no JSON"], BAD["another library"]])
def test_simulate_refuses_a_bad_file_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path("link.json")
    if text is not None:
        file.write_text(text)
    words = ("simulate", "--model", "resnet18", "--network", file, "--ranks", 2)
    assert "link.json" in run_cli(*words, "--schemes", "none,bf16", code=2)


# ---- refusals that need no other rank


def test_without_a_process_group_there_is_nothing_to_measure() -> None:
    with pytest.raises(RegistrationError, match="init_process_group"):
        measure_link()


@pytest.mark.parametrize(
    ("version", "devices", "message"),
    [(None, 0, "this torch has no CUDA: "), ("13.0", 1, "2 ranks need a GPU each, torch sees 1")],
)
def test_the_command_says_what_is_missing_for_cuda(
    version: str | None, devices: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.version.cuda", version)
    monkeypatch.setattr("torch.version.hip", None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: devices)
    assert f"--device cuda: {message}" in run_cli("link", "--device", "cuda", code=2)


RANK_0 = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
RANK_0 |= {"MASTER_PORT": "0"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"LOCAL_RANK": None}, "LOCAL_RANK is a whole number, 0 or more, .* it is not set"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE is a whole number, 1 or more, .* it is not set"),
        ({"RANK": ""}, "RANK is a whole number, .* got ''"),
        ({"MASTER_PORT": "-1"}, "MASTER_PORT is a whole number, .* got '-1'"),
        ({"LOCAL_WORLD_SIZE": "x"}, "LOCAL_WORLD_SIZE is a whole number, 1 or more, .* got 'x'"),
        ({"RANK": None, "LOCAL_WORLD_SIZE": "x"}, "LOCAL_WORLD_SIZE is .* got 'x'"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE is a whole number, 1 or more, .* got '0'"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is where ranks meet: it is not set"),
        ({"RANK": "2"}, "RANK is below WORLD_SIZE, 2: got 2"),
        ({"GLOO_SOCKET_IFNAME": "lo,no9"}, r"GLOO_SOCKET_IFNAME is .* \(lo.*\), got 'no9'"),
        ({"RANK": None, "GLOO_SOCKET_IFNAME": "no9"}, "GLOO_SOCKET_IFNAME is .* got 'no9'"),
        ({"MASTER_PORT": "99999"}, "the ranks do not meet, by RANK, .* MASTER_PORT: "),
    ],
)
def test_the_command_names_what_is_wrong_in_the_environment_of_a_launcher(
    wrong: dict[str, str | None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for name, value in {**RANK_0, **wrong}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    output = re.sub(r"[\s│]+", " ", run_cli("link", code=2))
    assert re.search(message, output), output
    assert re.search("[Ss]tart by torchrun", output)


def test_the_command_looks_for_the_folder_before_it_measures(tmp_path: Path) -> None:
    assert "there is no folder" in run_cli(
        "link", "--out", tmp_path / "nowhere" / "link.json", code=2
    )
    assert "is a folder" in run_cli("link", "--out", tmp_path, code=2)
    run_cli("link", "--budget", "inf", code=2)
