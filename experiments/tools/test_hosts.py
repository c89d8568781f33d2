"""Hosts in network namespaces: they talk over their cables, and nothing of them is left over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from experiments.line_share.__main__ import measure
from experiments.tools import hosts, namespaces

pytestmark = pytest.mark.netns
ROOT = Path(__file__).parents[2]
HOLD = """
import sys
from experiments.tools import namespaces

way = namespaces.Access({kind!r}, "")
with namespaces.made_hosts("1gbit", way=way) as enter:
    print(*(command[command.index("--target") + 1] for command in enter), flush=True)
    sys.stdin.read()
"""
WAYS = [namespaces.AS_ROOT, namespaces.AS_USER]


@pytest.fixture(params=WAYS, ids=[way.kind for way in WAYS])
def way(request: pytest.FixtureRequest) -> namespaces.Access:
    chosen: namespaces.Access = request.param
    if chosen.kind == "root" and os.geteuid() != 0:
        pytest.skip("needs root")
    if reason := namespaces.attempt(chosen):
        pytest.skip(reason)
    return chosen


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_hosts_end_with_the_process_that_made_them(
    way: namespaces.Access, sent: signal.Signals
) -> None:
    maker = subprocess.Popen(
        [sys.executable, "-c", HOLD.format(kind=way.kind)],
        cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    with maker:
        assert maker.stdout is not None
        holders = [int(pid) for pid in maker.stdout.readline().split()]
        assert len(holders) == 2
        assert _alive(holders)
        maker.send_signal(sent)
    deadline = time.monotonic() + 20
    while _alive(holders):
        assert time.monotonic() < deadline, "namespaces are left over"
        time.sleep(0.02)


def _alive(pids: Sequence[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_a_host_reaches_only_the_others(way: namespaces.Access) -> None:
    with namespaces.made_hosts(None, way=way) as (first, _):
        done = subprocess.run(
            [*first, "cat", "/proc/self/net/dev"], capture_output=True, text=True, check=True
        )
    devices = {line.split(":")[0].strip() for line in done.stdout.splitlines()[2:]}
    assert devices >= {"lo", "eth0"}


@pytest.mark.slow
def test_a_rank_that_fails_is_reported_with_its_output() -> None:
    if reason := namespaces.reason_not_to_run():
        pytest.skip(reason)
    with pytest.raises(RuntimeError, match=r"rank [01] ended with 1:(?s:.*)nonsense"):
        hosts.run_on_hosts(measure, {"nonsense": 1})
