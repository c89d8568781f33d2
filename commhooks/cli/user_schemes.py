"""Schemes of a user's files: what is wrong with one is a usage error that names it."""

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
    """Names, and those that the files among them register; runs the files."""
    added = load_files([Path(one) for one in which if one.endswith(".py")])
    return [one for one in which if not one.endswith(".py")], added


def load_files(files: Sequence[Path]) -> list[str]:
    """Runs files that register schemes; the names they add."""
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
    """The scheme, or a usage error that names it: it may be a user's."""
    try:
        return make(name, **options)
    except Exception as error:
        raise typer.BadParameter(f"{name} cannot be made: {sentence(error)}") from error


def sentence(error: BaseException, path: Path | None = None) -> str:
    """What an error of a user's code says, and the line of ``path`` that it came from."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if path is not None and frame.filename == str(path)
    ]
    where = f"line {lines[-1]}: " if lines else ""
    return f"{where}{type(error).__name__}: {error}"
