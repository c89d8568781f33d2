"""The command line: ``commhooks doctor``, ``schemes``, ``tradeoff``, ``new`` and ``check``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from commhooks import scheme_names
from commhooks.cli import catalogue as _catalogue
from commhooks.cli import commands as _commands
from commhooks.cli.user_schemes import load_files
from commhooks.errors import Error, MissingPackageError

__all__ = ["app", "load_files"]


class _Commands(TyperGroup):
    """Says in one sentence what a user's argument, file or scheme did wrong."""

    def invoke(self, ctx: Any) -> Any:
        """Runs a command; errors that are about its arguments are usage errors."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # whoever read the output has seen enough
            raise
        except MissingPackageError as error:
            typer.echo(error, err=True)
            raise typer.Exit(1) from error
        except (OSError, Error) as error:
            raise typer.BadParameter(str(error)) from error


app = typer.Typer(no_args_is_help=True, cls=_Commands)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(_commands.version())
        raise typer.Exit


def _complete(incomplete: str) -> list[str]:
    """Names of schemes, and files of Python, that begin so; for the shell."""
    files = sorted(str(path) for path in Path().glob("*.py"))
    return [one for one in [*scheme_names(), *files] if one.startswith(incomplete)]


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Says the release, and what runs."
        ),
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
        typer.Argument(
            metavar="[NAME|FILE]...",
            help="Schemes to describe; files with more.",
            autocompletion=_complete,
        ),
    ] = None,
) -> None:
    """Lists the registered schemes, or says of some what they send and which options they have."""
    _catalogue.schemes(which or [])


@app.command()
def tradeoff(
    which: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME|FILE]...",
            help="Schemes to compare, all by default; files with more.",
            autocompletion=_complete,
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Folder of gradients that commhooks.research.trace recorded."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the table, and a picture with matplotlib.")
    ] = None,
) -> None:
    """Measures the error of schemes against their bits, on gradients that are drawn or recorded."""
    _commands.tradeoff(which or [], trace, out)


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Of the scheme, such as half_topk.")],
    out: Annotated[Path | None, typer.Option(help="The file; NAME.py by default.")] = None,
) -> None:
    """Writes a file with a scheme that obeys all laws as it stands, to begin with."""
    _commands.new(name, out or Path(f"{name}.py"))


@app.command()
def check(
    target: Annotated[
        str,
        typer.Argument(help="A file with schemes, or a registered name.", autocompletion=_complete),
    ],
) -> None:
    """Runs the laws on a scheme, or on all that a file registers; fails if one is broken."""
    raise typer.Exit(_commands.check(target))
