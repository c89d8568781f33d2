"""Loads schemes from a user's files; turns an error in a file into a usage error that names it."""

from __future__ import annotations

import runpy
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from commhooks import Scheme, make, scheme_names

__all__ = ["load_files", "made", "sentence", "split"]


def split(which: Sequence[str]) -> tuple[list[str], list[str]]:
    """Runs the files among ``which``.

    Returns:
        The names among ``which``, and the names of the schemes that the files register.
    """
    added = load_files([Path(word) for word in which if word.endswith(".py")])
    return [word for word in which if not word.endswith(".py")], added


def load_files(files: Sequence[Path]) -> list[str]:
    """Runs files that register schemes and returns the names that they add."""
    before = set(scheme_names())
    for path in files:
        if not path.is_file():
            raise typer.BadParameter(f"no file {path}")
        try:
            # Not imported: a file anywhere, whose name may be that of an installed module. Its
            # ``if __name__ == "__main__"`` does not run.
            runpy.run_path(str(path), run_name=path.stem)
        except (Exception, SystemExit) as error:  # a file may call sys.exit
            raise typer.BadParameter(f"{path} does not run: {sentence(error, path)}") from error
    return [name for name in scheme_names() if name not in before]


def made(name: str, **options: Any) -> Scheme:
    """Makes a registered scheme.

    Raises:
        typer.BadParameter: the scheme raised an exception; the message has its name.
    """
    try:
        return make(name, **options)
    except Exception as error:  # a user's scheme may raise anything
        raise typer.BadParameter(f"{name} cannot be made: {sentence(error)}") from error


def sentence(error: BaseException, path: Path | None = None) -> str:
    """Returns an error of a user's code as a sentence, with the line of ``path`` that raised it."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if path is not None and frame.filename == str(path)
    ]
    where = f"line {lines[-1]}: " if lines else ""
    return f"{where}{type(error).__name__}: {error}"
