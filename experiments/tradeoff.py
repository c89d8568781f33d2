"""Measures the error and the bits of every registered scheme.

``python -m experiments.tradeoff`` is the command ``commhooks tradeoff``, which writes to the folder
of this repository's results.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from commhooks.cli import commands as _commands


def main(
    which: Annotated[list[str] | None, typer.Argument(metavar="[NAME|FILE]...")] = None,
    trace: Annotated[Path | None, typer.Option(help="Folder of recorded gradients.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the table and the picture.")] = Path(
        "results/tradeoff"
    ),
) -> None:
    """Prints the table, and draws the front."""
    _commands.tradeoff(which or [], trace, out)


if __name__ == "__main__":
    typer.run(main)
