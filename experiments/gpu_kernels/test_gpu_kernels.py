"""The study of CUDA kernels on a GPU, as far as it goes without one."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from commhooks.cli import _doctor as _doctor
from commhooks.cli._doctor import one_launch
from commhooks.kernels.runtime import nvrtc
from experiments.gpu_kernels import __main__ as study
from experiments.gpu_kernels import (
    copy_ratio,
    cubins,
    exchange,
    predictions,
    programs,
    summary,
    training,
    versions,
)
from experiments.gpu_kernels import table as tables
from experiments.gpu_kernels.dry_run import Launches, rehearsed
from experiments.gpu_kernels.table import Setting, Step, Table, run_steps
from tests.device.host_cases import HOSTS

FOREVER = 1e12
PROGRAMS = ("check", "connect", "nccl", "sanitize", "profile")
all_steps = copy_ratio.steps


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> tuple[Launches, dict[str, list[Any]]]:
    """Rows of every case of the parts that run in this process."""
    launches, rows = Launches(), {}
    out = tmp_path_factory.mktemp("out")
    with rehearsed(launches) as small:
        for name, columns, steps in (
            ("share", copy_ratio.COLUMNS, copy_ratio.steps),
            ("exchange", exchange.COLUMNS, exchange.steps),
            ("training", training.COLUMNS, training.steps),
        ):
            table = Table(out / f"{name}.csv", columns)
            run_steps(table, steps(small(out)), until=FOREVER)
            rows[name] = table.rows()
    return launches, rows


@pytest.mark.parametrize(("part", "least"), [("share", 80), ("exchange", 31), ("training", 7)])
@pytest.mark.slow
def test_every_case_builds_its_arguments(rehearsal: Any, part: str, least: int) -> None:
    rows = rehearsal[1][part]
    assert len(rows) >= least
    failed = [row for row in rows if row["error"]]
    assert [row["case"] for row in failed if "BF16 all reduce" not in row["error"]] == []


def test_the_files_of_tests_that_run_on_a_gpu_launch_every_kernel() -> None:
    named = {step.name for step in programs.check_steps(Setting(Path()))}
    launched = set()
    for name in named:
        with suppress(ImportError):  # those of tests/device
            launched |= getattr(import_module(f"tests.kernels.{name}"), "KERNELS", {}).keys()
    assert launched == cubins.kernels().keys()


@pytest.mark.slow
def test_what_cases_launch_is_compiled_beforehand(rehearsal: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(copy_ratio, "steps", lambda setting: iter(list(all_steps(setting))[:2]))
    monkeypatch.setattr(exchange, "SCHEMES", {"onebit": exchange.SCHEMES["onebit"]})
    kernels = cubins.all_kernels()
    assert {"quantize<Sign, float, 2048>", "requantize<Sign, 2048>"} <= set(kernels["blockwise.cu"])
    # Of schemes that tests/device runs in blocks of 64 entries.
    assert {"requantize<Int4, 64>", "requantize<Sign, 64>"} <= set(kernels["blockwise.cu"])
    assert "dequantize_rotated<Int4, float, 64>" in kernels["rotated.cu"]
    for file, names in cubins.kernels().items():
        assert set(names) <= set(kernels[file])
    assert rehearsal[0].kernels.keys() <= kernels.keys()


@pytest.mark.slow
def test_a_prediction_is_of_a_case_that_there_is(rehearsal: Any) -> None:
    ops = [row["op"] for row in rehearsal[1]["share"]]
    for begin in predictions._EXPECTED:
        assert any(op.startswith(begin) for op in ops), begin
    assert predictions.predicted("int8 encode, feedback", "256 MiB") == 0.92
    assert predictions.predicted("int8 encode, stochastic", "256 MiB") == 0.90
    assert predictions.predicted("cosines, 32 of 4096", "25 MiB") is None


def steps_of(log: list[str], names: str, failing: str = "") -> list[Step]:
    def run(name: str) -> dict[str, Any]:
        log.append(name)
        if name in failing:
            raise ValueError(f"{name} is wrong\nmore")
        return {"value": 1 / 3}

    return [Step(name, lambda name=name: run(name)) for name in names]


@pytest.mark.parametrize("workers", [1, 3])
def test_a_run_goes_on_where_the_last_one_stopped(tmp_path: Path, workers: int) -> None:
    log: list[str] = []
    path = tmp_path / "part.csv"
    steps = steps_of(log, "abc", failing="b")
    assert not run_steps(Table(path, ["value"]), steps[:2], until=FOREVER, workers=workers)
    run_steps(Table(path, ["value"]), steps, until=FOREVER, workers=workers)
    assert sorted(log) == ["a", "b", "c"]
    rows = {row["case"]: row for row in Table(path, ["value"]).rows()}
    assert rows["a"]["value"] == "0.3333"
    assert rows["b"]["error"] == "ValueError: b is wrong"


def test_no_case_begins_after_the_minutes_are_over(tmp_path: Path) -> None:
    log: list[str] = []
    table = Table(tmp_path / "part.csv", ["value"])
    left_out = run_steps(table, steps_of(log, "ab"), until=time.monotonic() - 1)
    assert (log, left_out) == ([], ["a", "b"])


def test_a_case_in_which_the_process_ended_is_not_begun_again(tmp_path: Path) -> None:
    path, log = tmp_path / "part.csv", []
    Table(path, ["value"]).begin("a")  # and then a crash, without any exception
    run_steps(Table(path, ["value"]), steps_of(log, "ab"), until=FOREVER)
    assert log == ["b"]
    (row, _) = Table(path, ["value"]).rows()
    assert row["error"] == "its process ended, or was ended, in it"


def test_the_table_is_written_row_by_row(tmp_path: Path) -> None:
    path = tmp_path / "part.csv"
    seen: list[str] = []
    steps = [
        Step("a", lambda: {"value": 1}),
        Step("b", lambda: seen.append(path.read_text()) or {}),
    ]
    run_steps(Table(path, ["value"]), steps, until=FOREVER)
    assert "a,1,," in seen[0]


def test_an_error_that_stays_ends_the_process_after_its_row(tmp_path: Path, monkeypatch) -> None:
    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    table, log = Table(tmp_path / "part.csv", ["value"]), []
    with pytest.raises(tables.LostDeviceError, match="since 'b': CUDA error"):
        run_steps(table, steps_of(log, "abc", failing="b"), until=FOREVER)
    assert (log, len(table.rows())) == (["a", "b"], 2)


def test_a_new_process_goes_on_until_the_run_ends(monkeypatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(study.os, "execv", lambda program, arguments: started.append(arguments))
    monkeypatch.setattr(study.sys, "argv", ["x", "--run", "2"])
    monkeypatch.setenv(study._RESTARTS, "19")
    monkeypatch.setenv(study._ENDS, "")
    ends = time.monotonic() + 90
    study._restart("lost", ends)
    assert started[0][1:] == ["-m", "experiments.gpu_kernels", "--run", "2"]
    assert float(study.os.environ[study._ENDS]) == ends
    with pytest.raises(SystemExit):  # not for ever
        study._restart("lost", ends)


def test_rows_and_summary_have_time_after_programs_were_ended(tmp_path: Path, monkeypatch) -> None:
    seen: list[float] = []
    monkeypatch.setattr(
        study.faulthandler, "dump_traceback_later", lambda after, exit: seen.append(after)
    )
    monkeypatch.setattr(study.faulthandler, "cancel_dump_traceback_later", lambda: None)
    left = lambda plan, setting: seen.append(setting.ends - time.monotonic())  # noqa: E731
    monkeypatch.setattr(study, "_run_all", left)
    study.main(part=["cubins"], out=tmp_path)
    assert seen[0] > seen[1] + 10


def test_programs_get_what_they_need_and_say_how_they_ended(tmp_path: Path, monkeypatch) -> None:
    called: list[tuple[list[str], dict[str, str]]] = []

    class Program:
        pid, returncode = 2**22 + 1, 1  # above the largest number of a process

        def __init__(self, command: list[str], *, stdout: Any, env: dict[str, str], **_: Any):
            called.append((command, env))
            stdout.write("...\n3 passed, 1 failed in 2 s\n")

        def wait(self, limit: float = 0.0) -> None:
            pass

    setting = Setting(tmp_path)
    listed = {name: list(study.PARTS[name].steps(setting)) for name in PROGRAMS}
    monkeypatch.setattr(programs.subprocess, "Popen", Program)
    for steps in listed.values():
        assert len({step.name for step in steps}) == len(steps)
        rows = [step.run() for step in steps]
        assert all(row["failed"] == 1 and "exit 1" in row["error"] for row in rows)
    assert len(listed["nccl"]) == len(HOSTS) + 5
    assert sum("gloo" in step.name for step in listed["nccl"]) == 3
    assert all(environment["COMMHOOKS_TEST_MACHINES"] == "gpu" for _, environment in called)
    checked = [command for command, environment in called if "compute-sanitizer" in command[0]]
    # Blocks of torch's allocator would hide what is out of bounds.
    for command, environment in called:
        blind = "PYTORCH_NO_CUDA_MEMORY_CACHING" not in environment
        assert blind == (not {"memcheck", "initcheck"} & set(command))
    assert [command[2] for command in checked] == sorted(
        (command[2] for command in checked), reverse=True
    )
    raced = {command[-1] for command in checked if "racecheck" in command}
    assert {"sparse", "orthonormal", "dct"} <= raced
    assert "momentum" not in raced


def test_a_program_ends_with_the_processes_that_it_has_started(tmp_path: Path) -> None:
    text = "import subprocess as s; p = s.Popen(['sleep', '9']); print(p.pid, flush=True); p.wait()"
    row = programs._run(Setting(tmp_path), "a case", [sys.executable, "-c", text], 3.0)
    assert row["error"] == "ended after 3 s, see log_a_case.txt"
    for _ in range(100):
        if not Path(f"/proc/{row['result']}/cmdline").exists():
            return
        time.sleep(0.05)
    assert "sleep" not in Path(f"/proc/{row['result']}/cmdline").read_text()


def test_a_kernel_is_profiled_again_though_its_case_has_a_row(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "profiled").mkdir()
    monkeypatch.setattr(programs, "_run", lambda *_: {"result": [*tmp_path.iterdir()]})
    assert next(programs.profile_steps(Setting(tmp_path))).run() == {"result": []}


def test_without_nccl_only_the_cases_of_gloo_are_run(tmp_path: Path, monkeypatch) -> None:
    listed = "".join(f"{programs.TWO_RANKS}::test_a[{name}]\n" for name in ("gloo", "nccl"))
    monkeypatch.setattr(programs.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=listed))
    table = Table(tmp_path / "connect.csv", programs.COLUMNS)
    table.add({"case": programs.PROBE, "error": "exit 1, see log.txt"})
    assert [step.name for step in programs.nccl_steps(Setting(tmp_path))] == ["test_a[gloo]"]


def test_a_run_says_in_a_hundred_lines_what_failed_and_where_logs_are(tmp_path: Path) -> None:
    table = Table(tmp_path / "check.csv", programs.COLUMNS)
    (tmp_path / "log_b.txt").write_text("x\nE   wrong bits\nFAILED b\n" + "y\n" * 50)
    table.add({"case": "a", "result": "5 passed", "passed": 5, "error": ""})
    table.add({"case": "b", "result": "y", "error": "exit 1, see log_b.txt"})
    facts = Table(tmp_path / "versions.csv", versions.COLUMNS)
    facts.add({"case": "torch", "value": "2.13", "error": ""})
    assert summary.summary(tmp_path, ["versions", "check"]) == [
        "versions: 1 cases, 0 failed",
        "check: 2 cases, 1 failed; tests: 5 passed, 0 skipped",
        "! check, b: exit 1, see log_b.txt",
        "    E   wrong bits",
        "    FAILED b",
        "torch: value 2.13",
    ]
    summary.pack_logs(tmp_path)
    for number in range(300):
        table.add({"case": str(number), "error": "exit 1"})
    lines = summary.summary(tmp_path, ["versions", "check"])
    assert len(lines) <= summary.LINES
    assert lines[-2:] == ["! and more failures: see check.csv", "torch: value 2.13"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "check.csv",
        "logs.zip",
        "versions.csv",
    ]


def test_every_part_is_in_a_run_or_named_in_the_help() -> None:
    in_runs = {part for run in study.RUNS.values() for part in run.parts}
    assert set(study.PARTS) - in_runs == {"compiled", "cubins"}
    assert all(sum(run.parts.values()) < run.minutes < 10 for run in study.RUNS.values())


def test_cubins_are_compiled_without_a_gpu(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("COMMHOOKS_CACHE", str(tmp_path / "cache"))
    table = Table(tmp_path / "cubins.csv", cubins.COLUMNS)
    which = {"finite.cu": ["finite<float>", "nonsense<float>"]}
    run_steps(
        table, cubins.steps(Setting(tmp_path, architecture="90"), which), until=FOREVER, workers=2
    )
    right, wrong = sorted(table.rows(), key=lambda row: row["case"])
    assert int(right["bytes"]) > 1000
    assert "CudaCompileError" in wrong["error"]
    assert len(list((tmp_path / "cache").glob("*.cubin"))) == 1
    monkeypatch.setattr(nvrtc, "compile_cubin", None)  # found, not compiled again
    assert len(nvrtc.cached_cubin("finite.cu", "finite<float>", "90").code) == int(right["bytes"])


def test_the_command_refuses_other_parts_and_machines_without_a_gpu(tmp_path: Path) -> None:
    app = study.typer.Typer()
    app.command()(study.main)
    for wrong in (["--part", "nonsense"], ["--run", "6"], [], ["--run", "1", "--part", "share"]):
        assert CliRunner().invoke(app, wrong).exit_code == 2
    if not torch.cuda.is_available():
        done = CliRunner().invoke(app, ["--part", "share", "--out", str(tmp_path)])
        assert (done.exit_code, "no CUDA device" in done.output) == (1, True)


@pytest.mark.parametrize("part", ["share", "versions", "cubins"])
def test_without_cupy_or_nvrtc_nothing_begins(part: str, tmp_path: Path, monkeypatch) -> None:
    def load() -> None:
        raise OSError("NVRTC is not there")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(study.cuda, "missing", lambda: "CuPy is not there")
    monkeypatch.setattr(study.faulthandler, "dump_traceback_later", lambda *_, **__: None)
    monkeypatch.setattr(nvrtc, "load_nvrtc", load)
    app = study.typer.Typer()
    app.command()(study.main)
    done = CliRunner().invoke(app, ["--part", part, "--out", str(tmp_path / "out")])
    assert (done.exit_code, "is not there" in done.output) == (1, True)
    assert not (tmp_path / "out").exists()


def test_a_rehearsal_writes_no_row_that_a_run_would_take_for_its_own(
    tmp_path: Path, capsys: Any
) -> None:
    for _ in range(2):
        study.main(part=["versions"], only="torch", rehearse=True, out=tmp_path)
        assert "torch: done" in capsys.readouterr().out  # again, not what the last one has found
    assert [path.name for path in tmp_path.iterdir()] == ["rehearsal"]
    study.main(part=["versions"], only="nonsense", rehearse=True, out=tmp_path)
    assert "versions: no case has 'nonsense' in its name" in capsys.readouterr().out


def test_cubins_of_another_source_are_compiled_though_there_is_a_table(
    tmp_path: Path, monkeypatch
) -> None:
    log: list[str] = []
    part = study.PARTS["cubins"]._replace(steps=lambda setting: iter(steps_of(log, "a")))
    monkeypatch.setitem(study.PARTS, "cubins", part._replace(columns=("value",)))
    for _ in range(2):
        study.main(part=["cubins"], out=tmp_path)
    assert log == ["a", "a"]


def test_facts_have_a_row_each_also_without_a_gpu(tmp_path: Path) -> None:
    table = Table(tmp_path / "versions.csv", versions.COLUMNS)
    run_steps(
        table, versions.steps(Setting(tmp_path, device="cpu", small=10, large=10)), until=1e12
    )
    rows = {row["case"]: row for row in table.rows()}
    assert rows["torch"]["value"] == torch.__version__
    if not torch.cuda.is_available():
        assert rows["one launch"]["value"].startswith("failed: ")


def test_doctor_launches_a_kernel_where_it_can(monkeypatch) -> None:
    assert one_launch("cpu").startswith("right ")
    assert one_launch("meta").startswith("failed: ")
    monkeypatch.setattr("commhooks.cli._doctor.all_finite", lambda inputs: torch.tensor(True))
    assert one_launch("cpu").startswith("wrong: ")
    monkeypatch.setattr(_doctor.cuda, "missing", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cells = _doctor._facts().columns[0]._cells
    assert "a launch" in cells
