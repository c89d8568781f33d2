"""The command line."""

from __future__ import annotations

from unittest import mock

from typer.testing import CliRunner

from commhooks._cli import app
from commhooks.kernels import _cpu, use_kernels


def doctor() -> str:
    done = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.output


def row(output: str, name: str) -> str:
    (found,) = (line for line in output.splitlines() if f" {name} " in line)
    return found


def test_doctor_says_which_kernels_run() -> None:
    output = doctor()
    assert _cpu.instruction_set() in row(output, "CPU kernels")
    assert "kernel" in row(output, "quantize")


def test_doctor_says_why_kernels_do_not_run() -> None:
    with mock.patch.object(_cpu, "_library", return_value=None):
        output = doctor()
    assert "install g++" in row(output, "CPU kernels")
    assert "definition" in row(output, "quantize")
    with use_kernels("definition"):
        assert "definition" in row(doctor(), "quantize")
