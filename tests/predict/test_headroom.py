"""``commhooks headroom`` and scripts that know nothing of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import typer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.cli import _headroom as command
from commhooks.cli._headroom import headroom
from commhooks.errors import RegistrationError
from tests.tools.as_script import HOSTS, run_script
from tests.tools.harness import on_ranks
from tests.tools.training import equal_on_all_ranks, everyone, gradients, mlp, parameters

ROOT = Path(__file__).parents[2]
RUNS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
# The numbers of a table's line, and what follows it.
ROW = re.compile(
    r"^(uncompressed|bf16|latency only \(1 value per bucket\)|no communication \(noop\)) +"
    r"[\d.]+ +[\d.]+ to [\d.]+ +10$",
    re.M,
)
WORDS = ("Do not compress", "Use bf16", "Compression may be worth it", "No answer")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, sys.path)]))


def assert_answer(output: str) -> None:
    assert len(ROW.findall(output)) == 4, output
    assert output.count("The most that compression can save:") == 1
    assert sum(word in output for word in WORDS) == 1


# ---- through the command


@pytest.mark.slow
def test_a_script_under_torchrun_is_measured_and_stopped(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "commhooks", "headroom", "--steps=10", "--out", str(out), "--",
               *RUNS, "-m", "tests.predict.scripts.shapes", "trainer", "8000"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert_answer(done.stdout)
    assert "commhooks headroom: 2 ranks over gloo, 2.1 MB of gradients" in done.stdout
    assert "epoch 0 | loss" in done.stdout  # the script's own words come through
    assert "is then stopped" in done.stderr
    assert "Traceback" not in done.stderr
    answer = json.loads(out.read_text())
    assert answer["facts"]["dense_nbytes"] == 4 * 2 * (512 * 512 + 512)
    kinds = ("dense", "bf16", "one_value", "noop")
    assert [answer[kind]["steps"] for kind in kinds] == [10] * 4


@pytest.mark.slow  # ``as_script`` stands for it
def test_a_script_that_spawns_its_ranks_is_measured(capfd: pytest.CaptureFixture[str]) -> None:
    assert headroom([str(HOSTS / "spawned.py")], 10, 100.0, None) == 0  # a Python file is enough
    output = capfd.readouterr().out
    assert_answer(output)
    assert "Finished running" not in output


@pytest.mark.parametrize(("code", "expected"), [(0, 1), (7, 7)])
def test_a_script_without_a_model_keeps_its_exit_code(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], code: int, expected: int
) -> None:
    out, handler = tmp_path / "out.json", signal.getsignal(signal.SIGTERM)
    script = f"import os, sys; print(os.environ['MINE']); sys.exit({code})"
    with mock.patch.dict(os.environ, MINE="from the environment"):
        assert headroom([sys.executable, "-c", script], 10, 100.0, out) == expected
    printed = capfd.readouterr()
    assert f"ended with exit code {code} and never built a DistributedDataParallel" in printed.err
    assert printed.out == "from the environment\n"
    assert not out.exists()
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_start_file_of_the_users_own_runs_as_well(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine runs')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    headroom([sys.executable, "-c", "print('so does the script')"], 10, 100.0, None)
    assert capfd.readouterr().out == "mine runs\nso does the script\n"


def test_a_script_that_never_ends_is_stopped(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_GRACE", 0.0)
    script = "import time; time.sleep(1000)"
    assert headroom([sys.executable, "-c", script], 10, 2.0, None) == 1
    printed = " ".join(capfd.readouterr().err.split())
    assert "was stopped and never built a DistributedDataParallel" in printed
    assert "raise --time-limit" in printed


def test_a_machine_without_rank_0_has_no_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    script = (
        "import json, os, pathlib\n"
        "order = json.loads(os.environ['COMMHOOKS_HEADROOM'])\n"
        "pathlib.Path(order['status']).write_text('{\"done\": 130}')\n"
    )
    assert headroom([sys.executable, "-c", script], 10, 100.0, out) == 0
    assert not out.exists()


def test_a_python_that_ignores_the_environment_is_said_to(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert headroom([sys.executable, "-I", "-c", "print('done')"], 10, 100.0, None) == 1
    printed = capfd.readouterr()
    assert printed.out == "done\n"
    assert "ignores the environment (python -I, -E)" in printed.err


def test_a_command_that_is_none_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match="cannot run no-such-trainer"):
        headroom(["no-such-trainer"], 10, 100.0, None)


# ---- scripts of many shapes


# Those that others do not stand for; the rest before a release.
SHAPES = ["amp", "no_sync", "several_models", "evaluates", "compiled", "ours"]
SLOW = [
    "workers", "several_groups", "closure", "unused", "static_graph", "two_forwards",
    "two_backwards", "joins", "overlapped", "sparse", "doubles", "subclass", "checkpointed",
    "kwargs_only",
]  # fmt: skip


@pytest.mark.parametrize(
    "shape", [*SHAPES, *(pytest.param(shape, marks=pytest.mark.slow) for shape in SLOW)]
)
def test_a_script_of_any_shape_gets_an_answer(shape: str, tmp_path: Path) -> None:
    ran = run_script(tmp_path, "shapes.py", shape, 200)
    assert ran.codes == (0, 0), ran.output
    assert ran.report["done"] == 58
    assert ran.report["needed"] == 59  # the last of which ends the measurement as it begins
    assert_answer(ran.output[0])
    assert ("has 2 DistributedDataParallel models" in ran.output[0]) == shape.startswith("several")
    assert all("the script has ended" not in output for output in ran.output)


def test_a_script_that_catches_everything_is_stopped(tmp_path: Path) -> None:
    ran = run_script(tmp_path, "accumulating.py", 200)
    assert ran.codes == (0, 0), ran.output
    assert_answer(ran.output[0])
    # It catches the exit as often as it is let: no step of its own has failed.
    assert ran.output[0].count("a step failed, going on") == 3


@pytest.mark.parametrize(
    "shape", ["around_the_wrapper", "only_evaluates", "trains_in_eval_mode", "replicated"]
)
def test_a_script_that_never_trains_through_the_wrapper(shape: str, tmp_path: Path) -> None:
    ran = run_script(tmp_path, "shapes.py", shape, 5)
    assert ran.codes == (0, 0)
    assert ran.report == {"ddp": True}
    assert "the script has ended" in ran.output[0]


@pytest.mark.parametrize("shape", ["own_hook", "late_hook"])
def test_a_script_with_a_hook_of_its_own_gets_its_name(shape: str, tmp_path: Path) -> None:
    ran = run_script(tmp_path, "shapes.py", shape, 200)
    assert ran.codes == (0, 0), ran.output
    assert ran.report["own_hook"] == "fp16_compress_hook"
    assert "the script has ended" not in ran.output[0]


def test_a_script_that_wraps_its_model_again_is_reported(tmp_path: Path) -> None:
    ran = run_script(tmp_path, "shapes.py", "rebuilt", 200)
    assert ran.codes == (0, 0), ran.output
    assert ran.report["rewrapped"] == 20
    assert "the script has ended" not in ran.output[0]


def test_ranks_on_machines_without_the_command_answer_as_well(tmp_path: Path) -> None:
    ran = run_script(tmp_path, "shapes.py", "plain", 200, status=tmp_path / "elsewhere" / "status")
    assert ran.codes == (0, 0), ran.output
    assert_answer(ran.output[0])


@pytest.mark.parametrize(("shape", "code", "ended"), [("fails", 1, 13), ("exits", 5, 12)])
def test_a_script_that_ends_early_keeps_its_exit_code_and_says_when(
    shape: str, code: int, ended: int, tmp_path: Path
) -> None:
    ran = run_script(tmp_path, "shapes.py", shape, 200)
    assert ran.codes == (code, code)
    assert ("ArithmeticError: the loss is no number" in ran.output[0]) == (shape == "fails")
    assert ran.report["ended"] == ended
    assert "done" not in ran.report


def test_after_the_time_limit_the_turns_so_far_are_the_answer(tmp_path: Path) -> None:
    ran = run_script(tmp_path, "shapes.py", "plain", 200, time_limit=-1.0)
    assert ran.codes == (0, 0)
    assert ran.report["done"] == 34  # ten steps, and one turn of six steps of four kinds
    assert len(re.findall(r" 5$", ran.output[0], re.MULTILINE)) == 4


# ---- the function


def _trained(rank: int) -> tuple[DistributedDataParallel, Callable[[], Any]]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    torch.manual_seed(1 + rank)

    def step() -> None:
        optimizer.zero_grad()
        ddp(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()

    return ddp, step


@on_ranks(2)
def test_the_function_gives_all_ranks_one_answer_and_averages_again(rank: int) -> None:
    ddp, step = _trained(rank)
    answer = commhooks.headroom(ddp, step, steps=10)
    assert everyone(answer) == [answer] * 2
    assert answer.facts.world_size == 2
    assert answer.facts.turns == 2
    assert_answer(str(answer))
    step()
    assert equal_on_all_ranks(gradients(ddp))


@on_ranks(2)
def test_the_steps_before_the_first_turn_train_as_without_it(rank: int) -> None:
    ends: list[list[Tensor]] = [[], []]
    for measured, end in enumerate(ends):
        ddp, step = _trained(rank)

        def count(step: Callable[[], Any] = step, ddp: nn.Module = ddp, end: Any = end) -> None:
            step()
            end.append(parameters(ddp).clone())

        if measured:
            commhooks.headroom(ddp, count, steps=10)
        else:
            for _ in range(10):
                count()
    assert all(map(torch.equal, ends[0], ends[1]))


@on_ranks(2)
def test_the_function_refuses_in_words(rank: int) -> None:
    ddp, step = _trained(rank)
    wrong: list[tuple[nn.Module, Callable[[], Any], Any, str]] = [
        (ddp.module, step, {}, "not wrapped in DistributedDataParallel"),
        (ddp, step, {"steps": 9}, "10 or more, got 9"),
        (ddp, step, {"steps": 10.0}, "10 or more, got 10.0"),
        (ddp, lambda: None, {}, "one synchronised backward pass.*it ran 0"),
        (ddp, step, {}, "hook"),
    ]
    for model, function, options, words in wrong:
        with pytest.raises((RegistrationError, ValueError), match=words):
            commhooks.headroom(model, function, **options)
    other, its_step = _trained(rank)
    with pytest.raises(RegistrationError, match="it ran 2"):
        commhooks.headroom(other, lambda: (its_step(), its_step()))
