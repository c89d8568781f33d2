"""``commhooks link`` between real processes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from commhooks.errors import MissingRankError, RegistrationError
from commhooks.predict import Fabric, Link, load_fabric
from commhooks.predict._collectives import collective_seconds
from commhooks.predict._link import link_report, measure_link
from tests.tools.command_line import run_cli
from tests.tools.harness import on_ranks

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@on_ranks(2)
def test_all_ranks_get_one_fabric_and_the_jobs_collectives_keep_their_order(rank: int) -> None:
    # A collective of the job is under way: the measurement is beside it, in groups of its own.
    tensor = torch.full((4,), float(rank + 1))
    work = dist.all_reduce(tensor, async_op=True) if rank else None
    report = link_report(budget_s=0.1, timeout_s=30)
    if work is None:
        dist.all_reduce(tensor)
    else:
        work.wait()
    assert tensor.tolist() == [3.0] * 4
    fabrics: list[Any] = [None] * 2
    dist.all_gather_object(fabrics, report.fabric)
    assert fabrics == [report.fabric] * 2
    assert report.fabric.library == "gloo"
    assert report.fabric.ranks_per_node == report.layout.per_node == report.layout.ranks == 2
    assert report.fabric.inside == report.fabric.between
    assert 0 < report.fabric.between.latency < 1
    assert report.fabric.between.bandwidth > 0
    assert report.device == "cpu"
    assert {time.collective for time in report.times} == {"all_reduce", "all_gather", "all_to_all"}
    assert all(0 < time.low_s <= time.seconds <= time.high_s for time in report.times)


LONG = Fabric("far away", Link(20e-3, 125e6), library="gloo")


@on_ranks(2)
def test_a_long_delay_leaves_the_bandwidth_known(rank: int, world_size: int) -> None:
    """A line on which each message takes 20 ms, and a budget of a few messages.

    Rank 0 sees half of it: the slowest rank decides.
    """

    def seconds(self: Any, case: Any, burst: int) -> float:
        some = collective_seconds(case.collective, [case.nbytes], ranks=world_size, fabric=LONG)
        return float(some[0]) if rank else float(some[0]) / 2

    with (
        mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="1"),
        mock.patch("commhooks.predict._link._Measurement._seconds", seconds),
    ):
        fabric = measure_link(budget_s=0.5, timeout_s=30)
    assert fabric.between.latency == pytest.approx(20e-3, rel=0.1)
    assert fabric.between.bandwidth == pytest.approx(125e6, rel=0.1)


@on_ranks(4)
def test_nodes_are_counted_by_torchruns_number_of_local_ranks(rank: int) -> None:
    """Four ranks that torchrun would have started on two machines, and a group of two."""
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
        whole = link_report(budget_s=0.1, timeout_s=30)
        groups = [dist.new_group([first, first + 2]) for first in range(2)]
        across = link_report(groups[rank % 2], budget_s=0.1, timeout_s=30)
    assert (whole.layout.ranks, whole.layout.per_node) == (4, 2)
    assert {time.part for time in whole.times} == {"inside", "between", "all"}
    assert whole.fabric.inside is not None
    # One rank of each node: there is no link inside a node to be seen.
    assert (across.layout.ranks, across.layout.per_node) == (2, 1)
    assert {time.part for time in across.times} == {"between"}
    assert across.fabric.inside is None


@on_ranks(1)
def test_one_rank_has_no_link() -> None:
    with pytest.raises(ValueError, match="seconds above 0"):
        measure_link(budget_s=0)
    with pytest.raises(RegistrationError, match="measure_link: one rank has no link; start two"):
        measure_link()


@on_ranks(2, timeout=20)
def test_a_rank_that_does_not_come_is_an_error_in_time(rank: int) -> None:
    if rank == 0:
        with pytest.raises(MissingRankError, match=r"did not come within 0.5 s(?s:.*)all ranks"):
            measure_link(timeout_s=0.5)


@pytest.mark.slow
def test_the_command_writes_a_file_that_simulate_reads(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, sys.path)]))
    monkeypatch.setenv("COLUMNS", "200")
    file = tmp_path / "link.json"
    run_cli("link", "--budget", "0.3", "--out", file)
    printed = capfd.readouterr().out
    assert "2 ranks on 1 node, cpu tensors over gloo" in printed
    assert "inside a node: latency" in printed
    assert f"wrote {file}" in printed
    fabric = load_fabric(file)
    assert isinstance(fabric, Fabric)
    assert fabric.library == "gloo"
    times = json.loads(file.read_text())["measured"]["times"]
    assert {time["collective"] for time in times} == {"all_reduce", "all_gather", "all_to_all"}
    words = ("simulate", "--model", "resnet18", "--network", file, "--ranks", 2)
    assert "measured" in run_cli(*words, "--schemes", "none,bf16")


def test_the_command_refuses_one_rank_of_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
             "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # fmt: skip
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    assert "one rank has no link" in run_cli("link", "--out", tmp_path / "link.json", code=2)
    assert not (tmp_path / "link.json").exists()
