"""Runs the command line for ``commhooks`` and ``python -m commhooks``."""

from __future__ import annotations

import sys

from ddp_core import MissingPackageError, needs

__all__ = ["main"]


def main() -> None:
    """Runs the command line; without rich and typer, says that it needs them."""
    try:
        with needs("commhooks: the command line", "rich", "typer"):
            from commhooks.cli._app import app
    except MissingPackageError as error:
        sys.exit(str(error))
    app(prog_name="commhooks")


if __name__ == "__main__":
    main()
