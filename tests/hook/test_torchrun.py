"""The example of an elastic job, started by torchrun, killed and resized."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "elastic.py"
SECONDS = 200.0  # for the whole job: nine processes that import torch
RESUMED = re.compile(r"goes on at epoch (\d+) on 2 workers, saved on (\d+)")


class Job:
    """A torchrun under way, and what its workers have printed."""

    def __init__(self, workers: int, snapshot: Path, epochs: int, restarts: int) -> None:
        self.lines: list[str] = []
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # see docs/guides/elastic.md
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        }
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc-per-node={workers}", f"--max-restarts={restarts}",
            str(EXAMPLE), str(snapshot), f"--epochs={epochs}",
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command, env=environment, cwd=snapshot.parent, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))

    def epochs(self) -> list[tuple[int, int]]:
        """The epochs that have ended, and on how many workers."""
        ended = re.findall(r"^epoch (\d+) on (\d+) workers: loss", self.text(), re.MULTILINE)
        return [(int(epoch), int(workers)) for epoch, workers in ended]

    def text(self) -> str:
        return "".join(self.lines)

    def wait_for_epochs(self, number: int, deadline: float) -> None:
        while len(self.epochs()) < number:
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.05)

    def end(self, deadline: float) -> int:
        """Waits for the end; the exit code."""
        code = self.process.wait(timeout=max(deadline - time.monotonic(), 0.1))
        self._reader.join(timeout=5)
        return code

    def workers(self) -> list[int]:
        """The processes that torchrun has started, rank 0's first."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(number) for number in children.split()]

    def close(self) -> None:
        """Leaves nothing behind."""
        if self.process.poll() is None:
            for process in [*self.workers(), self.process.pid]:
                os.kill(process, signal.SIGKILL)
            self.process.wait()
        self._reader.join(timeout=5)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def job(workers: int, snapshot: Path, epochs: int, restarts: int = 0) -> Iterator[Job]:
    started = Job(workers, snapshot, epochs, restarts)
    try:
        yield started
    finally:
        started.close()


@pytest.mark.timeout(SECONDS + 40)
@pytest.mark.distributed
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds workers in /proc")
@pytest.mark.slow
def test_an_elastic_job_goes_on_when_killed_and_resized(tmp_path: Path) -> None:
    deadline = time.monotonic() + SECONDS
    snapshot = tmp_path / "snapshot.pt"
    with job(3, snapshot, 100_000) as first:
        first.wait_for_epochs(2, deadline)
        os.kill(first.workers()[-1], signal.SIGKILL)
        assert first.end(deadline) != 0
    ended = first.epochs()[-1][0]

    with job(2, snapshot, 100_000, restarts=1) as second:
        second.wait_for_epochs(2, deadline)
        os.kill(second.workers()[-1], signal.SIGKILL)
        while len(RESUMED.findall(second.text())) < 2:  # torchrun has started the workers anew
            second.wait_for_epochs(len(second.epochs()) + 1, deadline)
        second.process.terminate()
        second.end(deadline)
    went_on = RESUMED.findall(second.text())
    # The snapshot of an epoch is there before its line is; that of the killed one may be, too.
    assert went_on[0][0] in (str(ended + 1), str(ended + 2))
    assert [were for _, were in went_on] == ["3", "2"]

    saved = torch.load(snapshot)
    with job(3, snapshot, saved["epoch"] + 3) as third:
        assert third.end(deadline) == 0, third.text()
    assert f"goes on at epoch {saved['epoch'] + 1} on 3 workers, saved on 2" in third.text()
    assert third.epochs() == [(saved["epoch"] + 1, 3), (saved["epoch"] + 2, 3)]
    assert re.search(
        r"on 3 ranks, steps \d+ to \d+: .* where an uncompressed all-reduce", third.text()
    )

    after = torch.load(snapshot)
    # 600 points in batches of 10 on 3 workers are 20 steps an epoch.
    assert after["hook"]["step"] == saved["hook"]["step"] + 2 * 20
    assert {"rank0", "rank1", "rank2"} <= set(after["hook"])
    assert any(bool(value.any()) for value in after["hook"]["rank2"]["memory"]["residual"].values())
