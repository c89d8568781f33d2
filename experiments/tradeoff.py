"""``python -m experiments.tradeoff``: error against bits, for every registered scheme.

The command ``commhooks tradeoff``, with the folder that the results of this repository come from.
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
