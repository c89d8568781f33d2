"""Prints the table of a study, and writes it as CSV and into pages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

__all__ = ["markdown", "printed", "replaced"]


def printed(
    rows: pd.DataFrame | Sequence[Mapping[str, Any]], out: Path, *, digits: int = 3
) -> pd.DataFrame:
    """Prints a table, writes it as CSV, and returns it."""
    table = rows if isinstance(rows, pd.DataFrame) else pd.DataFrame(rows)
    print(table.to_string(index=False, float_format=f"{{:.{digits}f}}".format, na_rep=""))
    out.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(out, index=False)
    print(f"wrote {out}")
    return table


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a table as Markdown: numbers between the first column and the last."""
    lines = [head, ("---", *["--:"] * (len(head) - 2), "---"), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def replaced(text: str, name: str, content: str) -> str:
    """Returns a text with other lines between the lines that have ``<name>`` and ``</name>``.

    Raises:
        ValueError: there are no such lines.

    Example:
        >>> replaced("a\\n# <b>\\nold\\n# </b>\\n", "b", "new\\n")
        'a\\n# <b>\\nnew\\n# </b>\\n'
    """
    lines = re.compile(rf"(.*<{name}>.*\n)(?:.*\n)*?(.*</{name}>)")
    if not lines.search(text):
        raise ValueError(f"no lines <{name}> and </{name}>")
    return lines.sub(lambda match: match[1] + content + match[2], text, count=1)
