"""Examples in the pages run, their links lead somewhere, and the names in them exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest

import commhooks

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("experiments/*/*.md")]
)
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# What docs/index.md says the examples assume. The hook registered last is replaced by the next.
PRELUDE = """
import sys, tempfile
import torch
import torch.distributed as dist
import commhooks
from torch.nn.parallel import DistributedDataParallel

folder = tempfile.mkdtemp()
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
path = f"{folder}/checkpoint.pt"
torch.manual_seed(0)
ddp_model = DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 10))
)
optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.01)

def loss_of_batch():
    return ddp_model(torch.randn(8, 64)).square().mean()

def train(model, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of_batch().backward()
        optimizer.step()
"""


def names(pages: list[Path]) -> list[str]:
    return [page.relative_to(ROOT).as_posix() for page in pages]


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


WITH_EXAMPLES = [page for page in PAGES if BLOCK.search(page.read_text())]


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=names(WITH_EXAMPLES))
def test_examples_run(page: Path, tmp_path: Path) -> None:
    """In a folder of its own, since pages write files, and what they write is not the tree's."""
    before = set(ROOT.rglob("results/**"))
    blocks = BLOCK.findall(page.read_text())
    code = "\n".join(
        [PRELUDE, *blocks, "if dist.is_initialized():\n    dist.destroy_process_group()"]
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert set(ROOT.rglob("results/**")) <= before


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", without_code(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", without_code(page)):
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(file), f"{page.name}: {link}"


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_names_of_the_package_exist(page: Path) -> None:
    for path in re.findall(r"\bcommhooks\.([A-Za-z_]\w*)(?!/)", page.read_text()):
        there = hasattr(commhooks, path) or find_spec(f"commhooks.{path}")
        assert there, f"{page.name}: commhooks.{path}"


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_tables_are_whole(page: Path) -> None:
    """A rule below the heads, and as many cells in every row: else the rows show as pipes."""
    for table in re.findall(r"(?:^\|.*\n)+", without_code(page), flags=re.MULTILINE):
        rows = [re.sub(r"`[^`]*`", "", row) for row in table.splitlines()]
        assert len({row.count("|") for row in rows}) == 1, f"{page.name}: {table[:200]}"
        assert re.fullmatch(r"[| :-]*-[| :-]*", rows[1]), f"{page.name}: {table[:200]}"


def _measured(text: str) -> list[str]:
    """The figures of the row of the README's table that begins with ``text``."""
    (row,) = re.findall(rf"^\| {re.escape(text)}.*? \| (.*) \|$", README, flags=re.MULTILINE)
    found: list[str] = re.findall(r"\d+(?:\.\d+)?", re.sub(r"AVX\S*|\(ResNet.*", "", row))
    return found


README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "docs" / "results"


def test_figures_of_the_readme_are_those_of_the_tables() -> None:
    models = ["resnet", "transformer", "tiny layers"]
    hooks = pd.read_csv(RESULTS / "hook_cost.csv").set_index(["hook", "model"]).step_ratio
    ddp = pd.read_csv(RESULTS / "reducer" / "reducer_cost.csv")
    ours = ddp[ddp.case == "ours"].set_index(["link", "model"]).ratio
    sent = pd.read_csv(RESULTS / "wire_bytes.csv").groupby("hook").ratio.max()
    kernels = [
        pd.read_csv(RESULTS / "kernels" / f"{which}.csv").set_index(["op", "way"]).ratio
        for which in ("v4", "v3")
    ]
    int8 = "int8 encode, feedback"
    expected = {
        "step time, our allreduce hook": [f"{hooks['allreduce', one]:.3f}" for one in models],
        "step time, our PowerSGD": [
            f"{hooks['PowerSGD 4, one bucket', one]:.2f}" for one in models
        ],
        "step time, our `Dist": [f"{ours['unlimited', one]:.3f}" for one in models],
        "the same at 1 Gbit/s": [f"{ours['1 Gbit/s', one]:.3f}" for one in models],
        "bytes an interface sent": [
            f"{sent[one]:.3f}" for one in ("allreduce", "fp16", "PowerSGD 4")
        ],
        "int8 quantisation": [
            *(f"{table[int8, 'kernel']:.2f}" for table in kernels),
            f"{kernels[0][int8, 'definition']:.0f}",
        ],
    }
    assert {text: _measured(text) for text in expected} == expected


def test_every_page_is_reached_from_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {
        (index.parent / link).resolve() for link in re.findall(r"\]\(([^)#]+)\)", index.read_text())
    }
    assert {page for page in PAGES if page.is_relative_to(index.parent)} - {index} <= linked


def test_the_scheme_table_of_the_readme_lists_the_registry() -> None:
    table = (ROOT / "README.md").read_text().partition("## Schemes")[2].partition("\n\nEvery")[0]
    firsts = re.findall(r"^\| (.*?) \|", table, flags=re.MULTILINE)
    listed = [name for first in firsts for name in re.findall(r"`(\w+)`", first)]
    assert sorted(listed) == commhooks.scheme_names()
