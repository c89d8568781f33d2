"""``commhooks headroom`` on scripts that know nothing of it, and ``commhooks.headroom``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ddp_core import DistributedDataParallel as CoreDDP
from tests.distributed.harness import run_ranks
from tests.distributed.training import mlp

HOSTS = Path(__file__).parents[1] / "hosts"
ROOT = Path(__file__).parents[2]


def headroom(*command: str, steps: int = 10, out: Path | None = None) -> tuple[int, str]:
    """Returns the exit code and all that ``commhooks headroom -- command`` prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment |= {"PYTHONPATH": str(ROOT)}
    options = [f"--steps={steps}", *([] if out is None else [f"--out={out}"])]
    whole = [sys.executable, "-m", "commhooks", "headroom", *options, "--", *command]
    done = subprocess.run(
        whole, env=environment, capture_output=True, text=True, timeout=120, cwd=HOSTS
    )
    return done.returncode, done.stdout + done.stderr


def torchrun(*command: str) -> list[str]:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return [*run, *command]


def test_a_script_of_torchrun_is_measured_unmodified(tmp_path: Path) -> None:
    file = tmp_path / "headroom.json"
    code, text = headroom(*torchrun("trainer.py", "50", "10", "--width=64"), out=file)
    assert code == 0, text
    assert "2 ranks over gloo" in text
    assert "Exposed communication:" in text
    saved: dict[str, Any] = json.loads(file.read_text())
    assert saved["facts"]["world_size"] == 2
    # 64 x 64 weights and 64 biases, and 64 weights and a bias.
    assert saved["facts"]["dense_nbytes"] == 4 * (64 * 64 + 64 + 64 + 1)
    assert all(saved[kind]["steps"] >= 10 for kind in ("dense", "bf16", "one", "noop"))
    assert saved["verdict"] in ("hidden", "latency", "bf16", "compress", "unclear")


@pytest.mark.slow
def test_a_script_that_spawns_its_ranks_is_measured() -> None:
    code, text = headroom("spawned.py")
    assert code == 0, text
    assert "Exposed communication:" in text


def test_accumulation_counts_as_one_step_and_a_bare_except_ends() -> None:
    code, text = headroom(*torchrun("accumulating.py", "200"))
    assert code == 0, text
    assert "Exposed communication:" in text
    assert "Traceback" not in text


ENDS = {
    "no DDP": ("print('nothing to see')", 1, "never built a DistributedDataParallel"),
    "raises": ("raise SystemExit(3)", 3, "ended with exit code 3"),
    "one rank": (
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo', init_method='tcp://localhost:0', rank=0, world_size=1)\n"
        "ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))\n"
        "for _ in range(9): ddp(torch.ones(1, 2)).sum().backward()\n",
        1,
        "trains on one rank",
    ),
}


@pytest.mark.parametrize("case", ENDS)
def test_a_script_that_cannot_be_measured_is_a_sentence(case: str, tmp_path: Path) -> None:
    source, expected, words = ENDS[case]
    script, out = tmp_path / "script.py", tmp_path / "out.json"
    script.write_text(source)
    code, text = headroom(str(script), out=out)
    assert code == expected, text
    assert words in " ".join(text.split())
    assert not out.exists()  # nothing to be taken for an answer


OWN_HOOK_AND_FEW_STEPS = """
import sys, torch, torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
dist.init_process_group("gloo")
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
if sys.argv[1] == "hook":
    ddp.register_comm_hook(None, allreduce_hook)
for _ in range(7):
    ddp(torch.ones(1, 2)).sum().backward()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("hook", "registers a communication hook of its own, allreduce_hook"),
        ("few", "after 7 steps"),
    ],
)
def test_what_stands_in_the_way_is_named(case: str, words: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(OWN_HOOK_AND_FEW_STEPS)
    code, text = headroom(*torchrun(str(script), case))
    assert code == 1, text
    assert words in " ".join(text.split())


# ---- the function


def _call(rank: int, world_size: int, kind: str) -> tuple[str, int, int, str]:
    torch.manual_seed(0)
    ddp: nn.Module = (CoreDDP if kind == "core" else DistributedDataParallel)(mlp())
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        ddp(torch.randn(4, 16)).square().sum().backward()

    found = commhooks.headroom(ddp, step, steps=10)
    return found.verdict, found.facts.world_size, steps, str(found)


@pytest.mark.parametrize("kind", ["core", "torch"])
def test_the_function_gives_all_ranks_the_same_answer(kind: str) -> None:
    ranks = run_ranks(_call, 2, kind)
    assert ranks[0] == ranks[1]
    _, world_size, steps, text = ranks[0]
    assert world_size == 2
    assert steps == 10 + 4 * 12  # warm-up, and 1.2 times ten of each kind
    assert "2 ranks over gloo" in text


def _wrong_step(rank: int, world_size: int) -> str:
    ddp = DistributedDataParallel(mlp())

    def step() -> None:
        for _ in range(2):
            ddp(torch.randn(4, 16)).square().sum().backward()

    with pytest.raises(commhooks.Error, match="one synchronised backward") as caught:
        commhooks.headroom(ddp, step, steps=10)
    return str(caught.value)


def test_a_step_of_two_backward_passes_is_refused() -> None:
    assert all("it ran 2" in text for text in run_ranks(_wrong_step, 2))
