"""The command of the network study: what it refuses before hosts are made, and what it measures."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from experiments.network import __main__ as study

app = typer.Typer()
app.command()(study.main)


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("--models", "nope", "is not one of resnet, transformer"),
        ("--models", "", "give one or more"),
        ("--rates", "abc", "from 0.001"),
        ("--rates", "-5", "from 0.001"),
        ("--rates", "nan", "from 0.001"),
        ("--rates", "1e-5", "from 0.001"),  # tc would be given an exponent
        ("--rates", "", "give one or more"),
        ("--delays", "x", "from 0.001"),
        ("--delays", "-1", "from 0.001"),
        ("--schemes", "", "give one or more"),
        ("--schemes", "nope", "did you mean 'noop'"),
        ("--schemes", "none;powersgd:rank=-1", "whole number, 1 or more"),
        ("--schemes", "powersgd:rank", "options follow a name as in"),
        ("--schemes", "topk in 0 MiB", "is no setup"),
        ("--schemes", "auto;gossip", "no average of gradients"),
    ],
)
def test_an_argument_is_refused_before_anything_is_made(
    option: str, value: str, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "reason_not_to_run", lambda: pytest.fail("makes hosts"))
    out = tmp_path / "new" / "table.csv"
    with pytest.raises(typer.BadParameter, match=f"^{option} ?.*{rule}"):
        study.main(**{option[2:]: value}, out=out)
    done = CliRunner().invoke(app, [f"{option}={value}", "--out", str(out)])
    assert (done.exit_code, option in done.output) == (2, True)
    assert not out.parent.exists()


@pytest.mark.parametrize("hosts", [0, 1, 255])
def test_a_number_of_hosts_without_addresses_or_exchanges_is_refused(
    hosts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "reason_not_to_run", lambda: pytest.fail("makes hosts"))
    done = CliRunner().invoke(app, [f"--hosts={hosts}", "--out", str(tmp_path / "table.csv")])
    assert (done.exit_code, "--hosts" in done.output) == (2, True)
