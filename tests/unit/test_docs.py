"""Examples in the pages run, their links lead somewhere, and the names in them exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

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
    code = "\n".join([PRELUDE, *blocks, "dist.destroy_process_group()"])
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
    assert sorted(listed) == commhooks.names()
