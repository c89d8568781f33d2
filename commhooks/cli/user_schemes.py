"""Loads schemes of a user's files; a mistake in one is a usage error that names it."""

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
    """Separates names from files, runs the files, and returns the names that they register, too."""
    added = load_files([Path(one) for one in which if one.endswith(".py")])
    return [one for one in which if not one.endswith(".py")], added


def load_files(files: Sequence[Path]) -> list[str]:
    """Runs files that register schemes and returns the names that they add."""
    before = set(scheme_names())
    for path in files:
        if not path.is_file():
            raise typer.BadParameter(f"no file {path}")
        try:
            runpy.run_path(str(path), run_name=path.stem)
        except (Exception, SystemExit) as error:
            raise typer.BadParameter(f"{path} does not run: {sentence(error, path)}") from error
    return [name for name in scheme_names() if name not in before]


def made(name: str, **options: Any) -> Scheme:
    """Makes a scheme; an error is a usage error that names it, since it may be a user's."""
    try:
        return make(name, **options)
    except Exception as error:
        raise typer.BadParameter(f"{name} cannot be made: {sentence(error)}") from error


def sentence(error: BaseException, path: Path | None = None) -> str:
    """Says an error of a user's code in a sentence, with the line of ``path`` that raised it."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if path is not None and frame.filename == str(path)
    ]
    where = f"line {lines[-1]}: " if lines else ""
    return f"{where}{type(error).__name__}: {error}"
