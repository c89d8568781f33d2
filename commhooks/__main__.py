"""``python -m commhooks``: the command line."""

from commhooks._cli import app

app(prog_name="commhooks")
