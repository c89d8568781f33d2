"""Prints and writes the table of a study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

__all__ = ["printed"]


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
