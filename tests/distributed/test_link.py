"""``measure_link`` and ``commhooks link`` between real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import commhooks
from commhooks.predict import load_fabric
from commhooks.predict.fabric import Fabric
from commhooks.predict.link import link_report, measure_link
from tests.distributed.harness import run_ranks

ROOT = Path(__file__).parents[2]


def _measure(rank: int, world_size: int) -> tuple[Fabric, float]:
    group = dist.group.WORLD
    assert group is not None
    under_way = torch.full((10,), float(rank))
    work = dist.all_reduce(under_way, async_op=True)  # of the job: it is not disturbed
    found = link_report(group, budget_s=0.3)
    work.wait()
    assert {time.collective for time in found.times} == {"all_reduce", "all_gather", "all_to_all"}
    assert all(time.seconds > 0 for time in found.times)
    return found.fabric, float(under_way[0])


def test_all_ranks_have_the_same_fabric() -> None:
    ranks = run_ranks(_measure, 3)
    fabrics = [fabric for fabric, _ in ranks]
    assert fabrics[0] == fabrics[1] == fabrics[2]
    assert fabrics[0].library == "gloo"
    assert fabrics[0].between.latency > 0
    assert fabrics[0].between.bandwidth > 0
    assert [value for _, value in ranks] == [3.0, 3.0, 3.0]


def _alone(rank: int, world_size: int) -> None:
    with pytest.raises(commhooks.Error, match="one rank has no link"):
        measure_link()
    with pytest.raises(ValueError, match="seconds above 0"):
        measure_link(budget_s=0)


def test_one_rank_has_no_link() -> None:
    run_ranks(_alone, 1)


def _missing(rank: int, world_size: int) -> str:
    if rank == 1:
        return ""
    with pytest.raises(commhooks.Error, match="did not come within 1 s") as caught:
        measure_link(budget_s=0.2, timeout_s=1)
    return type(caught.value).__name__


def test_a_rank_that_does_not_come_is_an_error() -> None:
    assert run_ranks(_missing, 2)[0] == "MissingRankError"


def test_the_command_measures_two_processes_and_others_take_its_file(tmp_path: Path) -> None:
    file = tmp_path / "link.json"
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "commhooks", "link", "--budget", "0.5", "--out", str(file)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=100, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "inside a node: latency" in done.stdout
    assert "GB/s" in done.stdout
    assert load_fabric(file).inside is not None
    simulated = subprocess.run(
        [
            *(sys.executable, "-m", "commhooks", "simulate", "--model", "resnet18"),
            *("--fabric", str(file), "--ranks", "2", "--schemes", "int8"),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert simulated.returncode == 0, simulated.stdout + simulated.stderr
    assert "int8" in simulated.stdout
