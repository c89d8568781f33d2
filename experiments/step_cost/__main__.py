"""Runs a part of the study: ``python -m experiments.step_cost hooks``, ``hosts`` and so on."""

from __future__ import annotations

import typer

from experiments.step_cost import hooks, hosts, reducer, schemes, verify

app = typer.Typer(help="What hooks, hosts, schemes, verification and ddp_core add to a step.")
for part in (hooks, hosts, schemes, verify, reducer):
    app.command(part.__name__.rpartition(".")[2])(part.main)


if __name__ == "__main__":
    app()
