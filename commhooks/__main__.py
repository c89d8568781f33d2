"""``python -m commhooks``: the command line."""

from commhooks.cli.app import app

app(prog_name="commhooks")
