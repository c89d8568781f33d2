"""The command of the network study: what it refuses before hosts are made, and what it measures."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import typer
from typer.testing import CliRunner

from experiments.network import __main__ as study
from experiments.tools.hosts import Message

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "network"
COMMANDS = re.findall(
    r"^python -m experiments\.network (.*?)\n```",
    (RESULTS / "README.md").read_text(),
    flags=re.DOTALL | re.MULTILINE,
)

app = typer.Typer()
app.command()(study.main)


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The cells that were measured, in a study whose ranks, hosts and pictures are none."""
    measured = []

    def ran(run_rank: Any, task: dict[str, Any], **links: Any) -> Iterator[Message]:
        measured.append(task | links)
        for name in ("noop", "one value", *task["schemes"]):
            row = {"scheme": name, "times": [0.5] * task["turns"], "sent": [1e6], "plan": ""}
            yield Message(0, row | {"latency": 1e-3, "bandwidth": 1e8})

    monkeypatch.setattr(study, "messages_from_hosts", ran)
    monkeypatch.setattr(study, "reason_not_to_run", lambda: None)
    monkeypatch.setattr(study, "written", lambda *arguments: None)
    monkeypatch.setattr(study, "has_rates", lambda table: False)
    return measured


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


def test_a_cell_that_is_there_is_not_measured_again(
    cells: list[dict[str, Any]], tmp_path: Path
) -> None:
    out = tmp_path / "table.csv"
    for rates in ("12345,0", "12345,1234.5678,0"):
        study.main(models="words", rates=rates, delays="0.3,12.345", schemes="topk;none", out=out)
    assert [cell["rate"] for cell in cells[::2]] == ["12345mbit", None, "1234.5678mbit"]
    assert len(cells) == 6
    table = pd.read_csv(out, dtype=str)
    assert list(table.mbit.unique()) == ["12345", "0", "1234.5678"]
    assert list(table.delay_ms.unique()) == ["0.3", "12.345"]
    assert len(table) == 6 * 4


@pytest.mark.parametrize("other", [{"schemes": "none"}, {"schemes": "none;topk"}, {"turns": 7}])
def test_a_cell_with_other_schemes_or_turns_is_refused(
    other: dict[str, Any], cells: list[dict[str, Any]], tmp_path: Path
) -> None:
    out = tmp_path / "table.csv"
    same: dict[str, Any] = {"models": "words", "schemes": "none;int8", "turns": 5, "out": out}
    study.main(**same, rates="200")
    before = out.read_text()
    with pytest.raises(typer.BadParameter, match=r"words, 2 hosts, 200 Mbit/s .*another file"):
        study.main(**{**same, **other}, rates="1000,200")
    assert len(cells) == 1
    assert out.read_text() == before


def test_rows_of_unknown_turns_are_not_taken_for_those_asked_for(
    cells: list[dict[str, Any]], tmp_path: Path
) -> None:
    out = tmp_path / "table.csv"
    study.main(models="words", rates="200", schemes="none", out=out)
    pd.read_csv(out).drop(columns="turns").to_csv(out, index=False)
    with pytest.raises(typer.BadParameter, match="turns: unknown"):
        study.main(models="words", rates="200", schemes="none", out=out)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_page_draw_its_tables_without_measuring(
    command: str, cells: list[dict[str, Any]], tmp_path: Path
) -> None:
    words = shlex.split(command.replace("\\\n", ""))
    place = words.index("--out") + 1
    out = tmp_path / Path(words[place]).name
    out.write_text((RESULTS / out.name).read_text())
    done = CliRunner().invoke(app, [*words[:place], str(out), *words[place + 1 :]])
    assert done.exit_code == 0, done.output
    assert cells == []
