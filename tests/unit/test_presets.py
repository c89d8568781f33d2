"""The presets of fabrics: those of the guide are those of the package, and each has a source."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from commhooks.cli._app import app
from commhooks.cli._simulate import preset_rows
from commhooks.predict import PRESETS

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "simulate.md"


def test_the_table_of_the_guide_has_the_presets() -> None:
    table = GUIDE.read_text().partition("## Networks")[2].partition("\n## ")[0]
    rows = [
        tuple(cell.strip() for cell in row.strip("|").split("|"))
        for row in re.findall(r"^\|.*\|$", table, flags=re.MULTILINE)[2:]
    ]
    assert rows == [(f"`{name}`", *cells) for name, *cells in preset_rows()]


def test_rows_have_the_numbers_of_the_presets() -> None:
    rows = {name: cells for name, *cells in preset_rows()}
    assert list(rows) == list(PRESETS)
    assert rows["wan-4g"][:2] == ["15 ms, 0.47 GB/s", ""]
    assert rows["dgx-h100"][:2] == [
        "27.5 us, 406 GB/s, 3.2 us per chunk",
        "8 ranks, 3.4 us, 370 GB/s, switch 274 GB/s",
    ]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_says_where_its_numbers_are_from(name: str) -> None:
    assert PRESETS[name].name == name
    # A page, a program, a table of this project, or that nobody has said it.
    known = "assumed|docs/results|experiments|NCCL's source|nccl-tests|S72583|MG-WFBP|data sheet"
    assert re.search(known, PRESETS[name].source)


def test_simulate_prints_the_presets_without_a_model() -> None:
    done = CliRunner().invoke(app, ["simulate", "--list-networks"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    listed = re.findall(r"^(\S+)  ", done.output, flags=re.MULTILINE)
    assert listed[1:] == list(PRESETS)
