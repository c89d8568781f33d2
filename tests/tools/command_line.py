"""Runs the command line in this process."""

from __future__ import annotations

from typer.testing import CliRunner

from commhooks.cli._app import app


def run_cli(*words: object, code: int = 0, columns: int = 200) -> str:
    """Returns what it prints in lines of so many columns; it has to end with ``code``."""
    done = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": str(columns)})
    assert done.exit_code == code, done.output
    return done.output
