"""Predictions keep to what others measured, and presets to the fits of the study."""

from __future__ import annotations

import pytest

from commhooks.predict import PRESETS
from experiments.predictions.__main__ import judged, summary, wrong_signs
from experiments.predictions.parameters import parameters
from experiments.predictions.studies import STUDIES, tabulated


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
    fitted = parameters()["all_reduce"][cluster]
    for name in ("latency", "bandwidth", "chunk_s"):
        # Three digits.
        assert getattr(PRESETS[preset].between, name) == pytest.approx(fitted[name], rel=0.005)
    # The fit takes the tree for all sizes.
    assert PRESETS[preset].tree_nbytes == PRESETS["dgx-h100"].tree_nbytes == 2**40
