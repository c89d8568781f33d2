"""Predictions keep to what others measured, and presets say where their numbers are from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from commhooks.cli._simulate import preset_rows
from commhooks.predict import PRESETS
from experiments.predictions.__main__ import judged, summary, wrong_signs
from experiments.predictions.studies import STUDIES, tabulated
from tests.tools.command_line import run_cli


@pytest.fixture(scope="module")
def tables() -> dict:
    return {study: tabulated(study) for study in STUDIES}


def test_predictions_are_as_near_to_published_measurements_as_promised(tables: dict) -> None:
    table = summary(tables).set_index(["study", "group"])
    assert table["median"]["all_reduce", "dgx-h100-ndr400x8"] <= 0.06
    assert table.judged["all_reduce", "dgx-h100-ndr400x8"] >= 50
    for group in ("ddp", "diloco", "localsgd"):
        assert table.largest["diloco", group] <= 0.10
    assert table["median"]["grace", "none"] <= 0.05
    assert table["median"]["grace", "powersgd"] <= 0.05
    assert table["median"]["grace", "randomk"] <= 0.10


@pytest.mark.parametrize("study", ["grace_signs", "quickreduce"])
def test_no_gain_is_predicted_where_compression_lost(tables: dict, study: str) -> None:
    table = tables[study]
    assert len(judged(table)) >= 12
    assert wrong_signs(table).empty
    # Losses and gains are both among the points, else the sign would be no question.
    assert (table.measured > 1.02).any()
    assert (table.measured < 0.98).any()


@pytest.mark.parametrize(
    ("preset", "cluster"), [("dgx-h100", "dgx-h100-ndr400x8"), ("p6-b200", "p6-b200-efav4")]
)
def test_the_preset_is_what_was_fitted(preset: str, cluster: str) -> None:
    from experiments.predictions.parameters import parameters

    fitted = parameters()["all_reduce"][cluster]
    for name in ("latency", "bandwidth", "chunk_s"):
        # Three digits.
        assert getattr(PRESETS[preset].between, name) == pytest.approx(fitted[name], rel=0.005)
    # The fit takes the tree for all sizes.
    assert PRESETS[preset].tree_nbytes == PRESETS["dgx-h100"].tree_nbytes == 2**40


# ---- presets: those of the guide are those of the package, and each has a source

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
    output = run_cli("simulate", "--list-networks")
    listed = re.findall(r"^(\S+)  ", output, flags=re.MULTILINE)
    assert listed[1:] == list(PRESETS)
