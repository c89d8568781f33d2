"""Declares the commands of ``commhooks``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from commhooks import scheme_names
from commhooks.cli import _advise as _advise
from commhooks.cli import _catalogue as _catalogue
from commhooks.cli import _commands as _commands
from commhooks.cli import _headroom as _headroom
from commhooks.cli import _link as _link
from commhooks.cli import _simulate as _simulate
from commhooks.cli._arguments import load_files
from commhooks.cli._simulate import print_presets
from commhooks.core._settings import printable
from commhooks.errors import Error, MissingPackageError
from commhooks.predict._step import MAX_RANKS

__all__ = ["app", "load_files"]

_MOST = 10**9  # of samples and of passes: more would not fit into the arithmetic


class _Commands(TyperGroup):
    """Reports errors in the user's arguments, files and schemes as a sentence, without a traceback.

    Errors that are no ``Error`` of this package show their traceback: they are bugs here.
    """

    def invoke(self, ctx: Any) -> Any:
        """Runs a command; turns errors in its arguments into usage errors."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # an OSError, but no mistake: `commhooks schemes | head`
            raise
        # Before Error, its base class: a missing package is not a wrong argument.
        except MissingPackageError as error:
            typer.echo(error, err=True)
            raise typer.Exit(1) from error
        except (OSError, Error) as error:
            raise typer.BadParameter(printable(str(error))) from error
        except typer.BadParameter as error:
            error.message = printable(error.message)  # which quotes files
            raise


app = typer.Typer(no_args_is_help=True, cls=_Commands)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(_commands.version())
        raise typer.Exit


def _complete(incomplete: str) -> list[str]:
    """Returns the schemes and Python files whose names begin with ``incomplete``, for the shell."""
    files = sorted(str(path) for path in Path().glob("*.py"))
    return [word for word in [*scheme_names(), *files] if word.startswith(incomplete)]


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Prints the release and what runs."
        ),
    ] = False,
) -> None:
    """Gradient communication hooks with compression for PyTorch data-parallel training."""


@app.command()
def doctor() -> None:
    """Prints what this installation uses: versions, back ends, which kernels run, or why not."""
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
    """Lists the registered schemes, or describes some: what they send, which options they have."""
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
        list[Path] | None,
        typer.Option(
            help="Folder of gradients that commhooks.wrappers.Traced recorded; more of them with "
            "the option again."
        ),
    ] = None,
    ranks: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Takes the first ranks of a trace, this many; may be given again."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the table, and a picture with matplotlib.")
    ] = None,
) -> None:
    """Compares the errors of schemes with their bits, on random and on recorded gradients.

    The errors are those of the whole gradient, of the tensor in the middle, of the worst tensor,
    and with every entry divided by Adam's denominator.
    """
    _commands.tradeoff(which or [], _commands.recorded(trace or [], ranks or []), out)


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Name of the scheme, such as half_topk.")],
    out: Annotated[Path | None, typer.Option(help="The file; NAME.py by default.")] = None,
) -> None:
    """Writes a file with a scheme to start from, which passes all checks."""
    _commands.new(name, out or Path(f"{name}.py"))


@app.command()
def check(
    target: Annotated[
        str,
        typer.Argument(help="A file with schemes, or a registered name.", autocompletion=_complete),
    ],
) -> None:
    """Checks a scheme, or all schemes of a file; exits with 1 if a check fails."""
    raise typer.Exit(_commands.check(target))


@app.command(context_settings={"allow_interspersed_args": False})
def headroom(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND...",
            help="A script as it is started, such as python train.py, or torchrun with arguments.",
        ),
    ],
    steps: Annotated[
        int, typer.Option(min=10, help="Steps of each kind of communication that count.")
    ] = 30,
    time_limit: Annotated[
        float,
        typer.Option(min=1, help="Seconds after which the command ends, with or without a result."),
    ] = 600,
    out: Annotated[Path | None, typer.Option(help="File for all numbers, as JSON.")] = None,
) -> None:
    """Says what compression could save in a script: it runs, unmodified, for some steps."""
    raise typer.Exit(_headroom.headroom(command, steps, time_limit, out))


@app.command()
def link(
    out: Annotated[
        Path | None, typer.Option(help="File for the network, which other commands take.")
    ] = None,
    budget: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Seconds of the measurement.")
    ] = 10,
    device: Annotated[
        Literal["cpu", "cuda"] | None,
        typer.Option(help="Of the tensors: CPU over Gloo, CUDA over NCCL (if there is one each)."),
    ] = None,
) -> None:
    """Measures the links between ranks: under torchrun, or with two processes of its own."""
    raise typer.Exit(_link.link(out, budget, device))


@app.command()
def simulate(
    model: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(_simulate.MODELS)}; or FILE.py:FUNCTION of your own."),
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="A recorded step, instead of a model.")
    ] = None,
    fabric: Annotated[
        str, typer.Option("--network", help="Presets, or files of commhooks link, with commas.")
    ] = "10gbe",
    schemes: Annotated[
        str, typer.Option(help="With commas; options after colons: bf16,powersgd:rank=4.")
    ] = "none,bf16,int8,int4,powersgd",
    ranks: Annotated[
        str, typer.Option(help=f"With commas, each from 2 to {MAX_RANKS:,}.")
    ] = "2,8,64,1024",
    device: Annotated[
        str, typer.Option(help="That computes model and schemes; here: schemes are timed.")
    ] = "a100",
    batch: Annotated[
        int | None,
        typer.Option(min=1, max=_MOST, help="Samples of a rank's pass; the model's by default."),
    ] = None,
    accumulate: Annotated[
        int, typer.Option(min=1, max=_MOST, help="Forward and backward passes of a step.")
    ] = 1,
    bucket_mb: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=1e6,
            help="MiB of a full bucket (bucket_cap_mb); 1 for the first and 25 by default.",
        ),
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="File for all numbers.")] = None,
    plot: Annotated[Path | None, typer.Option(help="File for a picture, with matplotlib.")] = None,
    list_fabrics: Annotated[
        bool,
        typer.Option(
            "--list-networks",
            callback=print_presets,
            is_eager=True,
            help="Prints the presets, and where their numbers are from.",
        ),
    ] = False,
) -> None:
    """Predicts what schemes save for a model and a network, and where bf16 is as fast."""
    _simulate.simulate(
        _simulate.Options(
            model=model,
            timeline=timeline,
            schemes=schemes,
            ranks=ranks,
            fabric=fabric,
            device=device,
            batch=batch,
            accumulate=accumulate,
            bucket_mb=bucket_mb,
            csv=csv,
            plot=plot,
        )
    )


@app.command()
def advise(
    model: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(_simulate.MODELS)}; or FILE.py:FUNCTION of your own."),
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="A recorded step, instead of a model.")
    ] = None,
    fabric: Annotated[
        str, typer.Option("--network", help="A preset, or a file of commhooks link.")
    ] = "10gbe",
    ranks: Annotated[int, typer.Option(min=2, max=MAX_RANKS)] = 8,
    schemes: Annotated[
        str, typer.Option(help="With commas; options after colons: bf16,powersgd:rank=4.")
    ] = ",".join(_advise.CANDIDATES),
    max_error: Annotated[
        float, typer.Option(min=0, help="Largest relative squared error of an exchange.")
    ] = 0.05,
    device: Annotated[
        str, typer.Option(help="That computes model and schemes; here: schemes are timed.")
    ] = "a100",
    batch: Annotated[
        int | None,
        typer.Option(min=1, max=_MOST, help="Samples of a rank's pass; the model's by default."),
    ] = None,
    accumulate: Annotated[
        int, typer.Option(min=1, max=_MOST, help="Forward and backward passes of a step.")
    ] = 1,
    csv: Annotated[Path | None, typer.Option(help="File for all predictions.")] = None,
) -> None:
    """Says which scheme to take, with which bucket size, or that compression is not worth it."""
    _advise.advise_on(
        model=model,
        timeline=timeline,
        fabric=fabric,
        ranks=ranks,
        schemes=schemes,
        max_error=max_error,
        device=device,
        batch=batch,
        accumulate=accumulate,
        out=csv,
    )
