"""The command line: ``commhooks doctor``, ``schemes``, ``new`` and ``check``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from commhooks import errors as _errors
from commhooks._version import __version__
from commhooks.cli import commands as _commands
from commhooks.cli.commands import load_files

__all__ = ["app", "load_files"]

_PACKAGE = tuple(getattr(_errors, name) for name in _errors.__all__)


class _Commands(TyperGroup):
    """Says in one sentence what a user's argument, file or scheme did wrong."""

    def invoke(self, ctx: Any) -> Any:
        """Runs a command; errors that are about its arguments are usage errors."""
        try:
            return super().invoke(ctx)
        except (OSError, TypeError, ValueError, RuntimeError) as error:
            if not isinstance(error, (OSError, *_PACKAGE)):
                raise
            raise typer.BadParameter(str(error)) from error


app = typer.Typer(no_args_is_help=True, cls=_Commands)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"commhooks {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Says the release.")
    ] = False,
) -> None:
    """Gradient communication hooks with compression for PyTorch data-parallel training."""


@app.command()
def doctor() -> None:
    """Says what this installation uses: versions, back ends, and which kernels run, or why not."""
    _commands.doctor()


@app.command()
def schemes(
    which: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME|FILE]...", help="Schemes to describe; files with more."),
    ] = None,
) -> None:
    """Lists the registered schemes, or says of some what they do and which options they have."""
    _commands.schemes(which or [])


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Of the scheme, such as half_topk.")],
    out: Annotated[Path | None, typer.Option(help="The file; NAME.py by default.")] = None,
) -> None:
    """Writes a file with a scheme that obeys all laws as it stands, to begin with."""
    _commands.new(name, out or Path(f"{name}.py"))


@app.command()
def check(
    target: Annotated[str, typer.Argument(help="A file with schemes, or a registered name.")],
) -> None:
    """Runs the laws on a scheme, or on all that a file registers; fails if one is broken."""
    raise typer.Exit(_commands.check(target))
