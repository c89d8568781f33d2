"""Adds to pages of the site: the version, whether the search finds them, and a wide page.

Here and not at the head of the pages, which repositories show as a table.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_VERSION = re.search(r'__version__ = "(.+)"', (_ROOT / "commhooks" / "_version.py").read_text())
# How much the search prefers pages, by the beginning of their path; the longest one holds. 0: not
# found. What answers a question comes first; what explains the inside would hide it.
_BOOST = {
    "": 2.0,
    "guides/": 2.0,
    "integrations/": 1.5,
    "integrations/matrix.md": 0.5,
    "schemes/": 1.0,
    "reference/": 0.2,
    "reference/commhooks.md": 1.0,
    "reference/hook.md": 0.5,
    "reference/errors.md": 0.1,
    "results/": 0.5,
    "design/": 0,
    "design/glossary.md": 1.0,
}
# Tables that need the width of both side bars.
_WIDE = {"integrations/matrix.md"}


def on_config(config: Any) -> Any:
    """Shows the version at the foot of every page, and links to its text in the repository."""
    assert _VERSION is not None
    config.copyright = f"commhooks {_VERSION[1]}"
    if config.repo_url:
        config.edit_uri = "edit/main/docs/"
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by MkDocs with the text of every page."""
    path = page.file.src_uri
    boost = _BOOST[max(filter(path.startswith, _BOOST), key=len)]
    page.meta.setdefault("search", {"boost": boost} if boost else {"exclude": True})
    if path in _WIDE:
        page.meta.setdefault("hide", ["navigation", "toc"])
    assert _VERSION is not None
    return markdown.replace("<!-- version -->", f"Version {_VERSION[1]}, alpha.")
