"""The documentation builds into a site, and its reference has every public name."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import commhooks

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built so that broken links and anchors, and pages outside of the navigation, are errors."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_a_page_for_each_file(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix(".html").as_posix()
        assert (site / name.replace("README", "index")).exists(), name


@pytest.mark.slow
def test_the_reference_has_every_public_class_and_function(site: Path) -> None:
    pages = "".join(page.read_text() for page in (site / "reference").glob("*.html"))
    anchors = set(re.findall(r'id="([\w.]+)"', pages))
    for name in commhooks.__all__:  # of ddp_core the page has the names for users only
        if inspect.isclass(member := getattr(commhooks, name)) or inspect.isfunction(member):
            # Under its own module, to which links to the short name lead.
            ends = [anchor for anchor in anchors if anchor.endswith(f".{name}")]
            assert any(anchor.startswith("commhooks.") for anchor in ends), name


@pytest.mark.slow
def test_no_page_needs_another_host(site: Path) -> None:
    """Scripts, fonts and styles lie beside the pages, which read the same without a network."""
    for page in site.rglob("*.html"):
        elements = re.findall(r"<(?:script|link|img)\b[^>]*>", page.read_text())
        assert not [
            element for element in elements if re.search(r"(?:src|href)=\W?(?:https?:)?//", element)
        ]


@pytest.mark.slow
def test_formulas_are_drawn_by_the_browser_itself(site: Path) -> None:
    assert "<math" in (site / "schemes" / "gossip.html").read_text()
    assert not [page.name for page in site.rglob("*.html") if "arithmatex" in page.read_text()]


@pytest.mark.slow
def test_sessions_in_docstrings_are_shown_as_code(site: Path) -> None:
    """Markdown takes ``>>>`` for a quotation unless it stands in a section of examples."""
    for page in (site / "reference").glob("*.html"):
        assert "<blockquote" not in page.read_text(), page.name
