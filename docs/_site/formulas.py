"""Formulas become MathML while the site is built, so that no script has to draw them."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def _as_mathml(match: re.Match[str]) -> str:
    element, bracket, formula = match.groups()
    shown = convert(html.unescape(formula), display="block" if bracket == "[" else "inline")
    return f'<{element} class="formula">{shown}</{element}>'


def on_page_content(content: str, **_: Any) -> str:
    """Called by MkDocs with the HTML of every page."""
    return _FORMULA.sub(_as_mathml, content)
