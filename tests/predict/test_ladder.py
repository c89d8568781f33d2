"""Pages and commands name one scheme to begin with on a network: that of the ladder.

``python -m tests.predict.test_ladder`` writes it into the pages.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from commhooks.predict import advise, best_of, device, fabric, model
from commhooks.predict._advise import SAFE_ERROR
from commhooks.predict._ladder import LADDER, MODELS, ladder_lines, ladder_markdown, predicted_speed
from experiments.tools.tables import replaced
from tests.tools.command_line import run_cli

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "docs/index.md",
    "docs/quickstart.md",
    "docs/guides/choosing.md",
    "docs/guides/machines.md",
)


def with_ladder(page: str) -> str:
    return replaced(page, "first-scheme", f"{ladder_markdown()}\n")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_the_ladder(page: str) -> None:
    text = (ROOT / page).read_text()
    assert text == with_ladder(text), "write it: python -m tests.predict.test_ladder"


def test_the_command_schemes_ends_with_the_ladder() -> None:
    text = " ".join(run_cli("schemes").split())
    assert all(" ".join(line.split()) in text for line in ladder_lines())
    assert "(loss over bf16's, with start_step=10: +2.6 to +3.1 %)" in text


@pytest.mark.parametrize("rung", [rung for rung in LADDER if rung.preset], ids=lambda r: r.preset)
def test_the_first_scheme_is_the_safe_one_that_advise_finds(rung) -> None:
    a100 = device("a100")
    options = advise(
        model("resnet50").workload(a100),
        ranks=4,
        fabric=fabric(rung.preset),
        device=a100,
        candidates=["int8"],
        max_error=SAFE_ERROR,
        caps_mb=[8.0, 25.0],
    )
    best = best_of(options).name
    assert best == rung.first or (best, rung.first) == ("none", "bf16")


@pytest.mark.slow
def test_predicted_speeds_are_those_of_predict_step() -> None:
    for rung in LADDER:
        for scheme, speeds in zip((rung.first, rung.then), rung.speed, strict=bool(rung.speed)):
            now = [predicted_speed(scheme, rung.preset, name) for name in MODELS]
            assert [f"{value:.3g}" for value in now] == [f"{value:.3g}" for value in speeds]


if __name__ == "__main__":
    for page in PAGES:
        path = ROOT / page
        path.write_text(with_ladder(path.read_text()))
        print(f"wrote the ladder into {page}")
