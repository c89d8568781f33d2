"""Runs a part of the study: ``python -m experiments.sharded loss``, ``memory`` or ``speed``."""

from __future__ import annotations

import typer

from experiments.sharded import loss, memory, speed

app = typer.Typer(help="What schemes cost where parameters are sharded, and what they save.")
for part in (loss, memory, speed):
    app.command(part.__name__.rpartition(".")[2])(part.main)


if __name__ == "__main__":
    app()
