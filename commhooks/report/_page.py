"""Builds pages: one HTML file with text, tables and pictures, which needs no other file."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_core import needs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Page"]

_LONG = 60  # letters of a cell that is a sentence

# Wide tables and pictures scroll within the page, so that a phone shows text at its own width;
# shadows at their sides, which stay where they are, show that there is more.
_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1f24; background: #fff;
       max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; line-height: 1.2; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin-top: 2rem; }
.wide { overflow-x: auto; background:
  linear-gradient(to right, #fff 30%, #fff0) left / 2rem 100%,
  linear-gradient(to left, #fff 30%, #fff0) right / 2rem 100%,
  radial-gradient(farthest-side at 0 50%, #1b1f2466, #1b1f2400) left / 0.8rem 100%,
  radial-gradient(farthest-side at 100% 50%, #1b1f2466, #1b1f2400) right / 0.8rem 100%;
  background-repeat: no-repeat; background-attachment: local, local, scroll, scroll; }
.wide svg { width: 100%; height: auto; display: block; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.75rem 0.25rem 0; text-align: left; white-space: nowrap;
         border-bottom: 1px solid #d8dee4; }
td.number, th.number { text-align: right; }
td.long { white-space: normal; min-width: 16rem; }
figure { margin: 1rem 0; } figcaption { color: #57606a; font-size: 0.9rem; }
"""


_PAGE_REM = 60  # width of the page, as above


class Page:
    """Builds a page from top to bottom.

    Args:
        title: heading of the page.

    Example:
        >>> page = Page("Which scheme pays?")
        >>> page.text("On 10 Gbit/s, none does.")
        >>> page.table(("scheme", "ms"), [("none", 101.2), ("int8", 103.9)])
        >>> page.write("schemes.html")
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self._parts: list[str] = []

    def section(self, heading: str) -> None:
        """Begins a section."""
        self._parts.append(f"<h2>{escape(heading)}</h2>")

    def text(self, text: str) -> None:
        """Adds a paragraph."""
        self._parts.append(f"<p>{escape(text)}</p>")

    def table(
        self, columns: Sequence[str], rows: Iterable[Sequence[object]], caption: str = ""
    ) -> None:
        """Adds a table; numbers are on the right, a column's largest one with four digits.

        Args:
            columns: names of the columns, with units.
            rows: values, one per column.
            caption: below the table.
        """
        rows = [tuple(row) for row in rows]
        if wrong := [row for row in rows if len(row) != len(columns)]:
            raise ValueError(
                f"Page.table: {len(columns)} columns ({', '.join(columns)}), and a row of "
                f"{len(wrong[0])}: {wrong[0]}"
            )
        columns_of_text = [_texts(values) for values in zip(*rows, strict=True)]
        numeric = [right for _, right in columns_of_text] or [False] * len(columns)
        head = _row("th", columns, numeric)
        texts = zip(*(texts for texts, _ in columns_of_text), strict=True)
        body = "".join(_row("td", row, numeric) for row in texts)
        self._wide(f"<table><thead>{head}</thead><tbody>{body}</tbody></table>", caption)

    def figure(self, figure: Figure, caption: str = "") -> None:
        """Adds a matplotlib figure, as vectors."""
        with needs("Page.figure()", "matplotlib"):
            import matplotlib as mpl

        buffer = io.StringIO()
        # Letters stay letters: they can be selected, and the file is a tenth as long.
        with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": f"{len(self._parts)}"}):
            figure.savefig(buffer, format="svg", metadata={"Date": None})
        svg = buffer.getvalue()
        # Letters of 8 points stay readable on a phone, on which the picture scrolls.
        least = min(5 * float(figure.get_figwidth()), _PAGE_REM - 2)
        svg = svg[svg.index("<svg") :].replace("<svg", f'<svg style="min-width:{least:.0f}rem"', 1)
        # Identifiers of two pictures on a page must differ.
        mark = f"f{len(self._parts)}-"
        svg = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{mark}", svg)
        self._wide(svg, caption)

    def html(self) -> str:
        """Returns the page."""
        title, parts = escape(self.title), "\n".join(self._parts)
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{title}</title>\n<style>{_STYLE}</style></head>\n"
            f"<body>\n<h1>{title}</h1>\n{parts}\n</body></html>\n"
        )

    def write(self, path: str | Path) -> None:
        """Writes the page as a file."""
        Path(path).write_text(self.html(), encoding="utf-8")

    def _wide(self, content: str, caption: str) -> None:
        below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
        self._parts.append(f'<figure><div class="wide">{content}</div>{below}</figure>')


def _texts(values: Sequence[object]) -> tuple[list[str], bool]:
    """Returns the texts of a column, and whether they are numbers."""
    if not all(isinstance(value, int | float) for value in values):
        return [str(value) for value in values], False
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    largest = max((abs(number) for number in numbers if math.isfinite(number)), default=0.0) or 1.0
    whole = all(number.is_integer() for number in numbers)
    digits = 0 if whole else min(max(3 - math.floor(math.log10(largest)), 0), 9)
    return ["" if math.isnan(number) else f"{number:,.{digits}f}" for number in numbers], True


def _row(tag: str, texts: Sequence[str], numeric: Sequence[bool]) -> str:
    cells = (
        f"<{tag}{_kind(text, number)}>{escape(text)}</{tag}>"
        for text, number in zip(texts, numeric, strict=True)
    )
    return f"<tr>{''.join(cells)}</tr>"


def _kind(text: str, number: bool) -> str:
    """Returns the class of a cell: a sentence breaks into lines, numbers are on the right."""
    if number:
        return ' class="number"'
    return ' class="long"' if len(text) > _LONG else ""
