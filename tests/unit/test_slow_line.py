"""The slow-line study: what its tables are made of."""

import math

import pandas as pd
import pytest

from commhooks import make
from commhooks.predict import Fabric, Link, model, predict_local
from experiments.slow_line import (
    COMPUTE_S,
    HOSTS,
    QUALITY,
    STREAMING,
    _published,
    _Timed,
    _workload,
    gaps,
    plans,
)


def test_the_gap_is_to_the_same_seed() -> None:
    table = pd.DataFrame(
        [
            (0, 1, "synchronous bf16", 1.0),
            (1, 1, "synchronous bf16", 3.0),
            (2, 1, "synchronous bf16", 2.0),
            (0, 8, "int4", 1.1),
            (1, 8, "int4", 3.2),
            (2, 8, "int4", 2.3),
            (0, 32, "none", 1.5),
        ],
        columns=["seed", "every", "plan", "loss"],
    )
    found = list(gaps(table))
    assert found[0][:2] == (8, "int4")
    assert found[0][2] == pytest.approx(0.2)
    # Student's t of 3 values, 0.1 of standard deviation.
    assert found[0][3] == pytest.approx(4.30 * 0.1 / math.sqrt(3), rel=1e-3)
    assert found[1][2] == pytest.approx(0.5)
    assert math.isnan(found[1][3])  # one seed has no interval


def test_published_cells_stand_beside_the_same_plan_only() -> None:
    dense = plans(128)[0]
    assert str(dense) == "none"
    assert _published(50, 128, dense) == pytest.approx(0.114, abs=2e-3)
    assert math.isnan(_published(200, 128, dense))
    assert math.isnan(_published(50, 128, plans(128)[3]))


def test_all_plans_fit_together_and_have_the_published_size() -> None:
    assert sum(layer.numel for layer in model("diloco-30m").layers) == 30_846_720
    line = Fabric("line", Link(1e-4, 1.2e8), library="gloo")
    for plan in (*QUALITY, *(one for some in STREAMING.values() for one in some)):
        step = predict_local(
            make(plan.codec),
            _workload(),
            every=plan.every,
            ranks=HOSTS,
            fabric=line,
            device=_Timed(1e-9),
            fragments=plan.fragments,
            delay=plan.delay,
        )
        assert step.compute_s == pytest.approx(COMPUTE_S)
        assert 0 < step.utilisation <= 1
