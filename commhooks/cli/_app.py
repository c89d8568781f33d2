"""Declares the commands of ``commhooks``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from commhooks import scheme_names
from commhooks.cli import _advise as _advise
from commhooks.cli import _catalogue as _catalogue
from commhooks.cli import _commands as _commands
from commhooks.cli import _doctor as _doctor
from commhooks.cli import _headroom as _headroom
from commhooks.cli import _link as _link
from commhooks.cli import _simulate as _simulate
from commhooks.cli._arguments import load_files
from commhooks.cli._simulate import print_presets
from commhooks.core._settings import printable, shown
from commhooks.errors import Error, MissingPackageError
from commhooks.predict._device import DEFAULT_DEVICE, DEVICES
from commhooks.predict._headroom_steps import LEAST_STEPS, steps_needed
from commhooks.predict._models import BATCHES
from commhooks.predict._step import MAX_RANKS

__all__ = ["app", "load_files"]

_MOST = 10**9  # of samples and of passes: more would not fit into the arithmetic
_WORTH, _SCHEMES, _INSTALLATION = "Is it worth it", "Schemes", "Installation"


class _PlainHelp:
    """Leaves out the types of flags and arguments, such as ``<bool>``, in the help of a command."""

    def get_params(self, ctx: Any) -> Any:
        """Returns all options and arguments of a command."""
        params = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
            elif param.param_type_name == "argument":
                param.display_type_rich = lambda ctx: None  # typer 0.29 asks for it
        return params


class _Command(_PlainHelp, TyperCommand):
    """Runs one command."""


class _Commands(_PlainHelp, TyperGroup):
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
# In the help, commands are in the order in which they are declared here.
_command = partial(app.command, cls=_Command)


# ---- values of options, with messages in the words of this package


def _number(kind: type[int] | type[float], least: float, most: float) -> Callable[[Any], Any]:
    """Returns a function that reads a number from ``least`` to ``most``."""
    bounds = f" from {least:,} to {most:,}" if most < _MOST else f", {least:,} or more"
    rule = f"a {'whole ' * (kind is int)}number{bounds}"

    def number(given: Any) -> Any:
        try:
            value = kind(given)
        except (ValueError, OverflowError):
            value = None
        if value is None or not least <= value <= most:
            raise typer.BadParameter(f"{rule}, got {shown(given)}")
        return value

    return number


def _one_of(*words: str) -> Callable[[Any], Any]:
    """Returns a function that takes one of some words."""

    def word(given: Any) -> Any:
        if given not in words:
            raise typer.BadParameter(f"{' or '.join(words)}, got {shown(given)}")
        return given

    return word


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(_doctor.version())
        raise typer.Exit


def _complete(incomplete: str) -> list[str]:
    """Returns the schemes and Python files whose names begin with ``incomplete``, for the shell."""
    files = sorted(str(path) for path in Path().glob("*.py"))
    return [word for word in [*scheme_names(), *files] if word.startswith(incomplete)]


# Options that several commands have.
_Model = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help=f"{', '.join(_simulate.MODELS)}; or FILE.py:FUNCTION of your own."
    ),
]
_Timeline = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A recorded step, instead of a model.")
]
_Device = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        show_default=DEFAULT_DEVICE,
        help=f"That computes model and schemes: {', '.join(DEVICES)}; two figures of a data sheet, "
        f"TFLOPS:GB/s, as in 120:600; or here: schemes are timed.",
    ),
]
_Batch = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        parser=_number(int, 1, _MOST),
        show_default=False,
        help=f"Samples of a rank's pass, which decide the answer; by default "
        f"{', '.join(f'{name} {batch}' for name, batch in BATCHES.items())}.",
    ),
]
_Accumulate = Annotated[
    int,
    typer.Option(
        metavar="N",
        parser=_number(int, 1, _MOST),
        help="Forward and backward passes of a step.",
    ),
]


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
    _doctor.check_environment()


# ---- is it worth it


@_command(rich_help_panel=_WORTH, context_settings={"allow_interspersed_args": False})
def headroom(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND",
            help="A script as it is started, such as python train.py, or torchrun with arguments.",
        ),
    ],
    steps: Annotated[
        int,
        typer.Option(
            metavar="N",
            parser=_number(int, LEAST_STEPS, _MOST),
            help=f"Steps of each kind of communication that count, {LEAST_STEPS} or more. For 30 "
            f"the script needs {steps_needed(30)} steps, for {LEAST_STEPS} "
            f"{steps_needed(LEAST_STEPS)}.",
        ),
    ] = 30,
    time_limit: Annotated[
        float,
        typer.Option(
            metavar="S",
            parser=_number(float, 1, _MOST),
            help="Seconds after which the command ends, with or without a result.",
        ),
    ] = _headroom.TIME_LIMIT,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File for all numbers, as JSON.")
    ] = None,
) -> None:
    """Says what compression could save in a script: it runs, unmodified, for some steps."""
    raise typer.Exit(_headroom.headroom(command, steps, time_limit, out))


@_command(rich_help_panel=_WORTH)
def link(
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File for the network, which other commands take."),
    ] = None,
    budget: Annotated[
        float,
        typer.Option(
            metavar="S", parser=_number(float, 0.1, 3600), help="Seconds of the measurement."
        ),
    ] = 10,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="cpu|cuda",
            parser=_one_of("cpu", "cuda"),
            help="Of the tensors: CPU over Gloo, CUDA over NCCL (if there is one each).",
        ),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Prints each measurement beside the fit as well.")
    ] = False,
) -> None:
    """Measures the links between ranks: under torchrun, or with two processes of its own."""
    raise typer.Exit(_link.link(out, budget, device, full=full))


@_command(rich_help_panel=_WORTH)
def advise(
    model: _Model = None,
    timeline: _Timeline = None,
    fabric: Annotated[
        str,
        typer.Option("--network", metavar="NAME", help="A preset, or a file of commhooks link."),
    ] = "10gbe",
    ranks: Annotated[
        int,
        typer.Option(
            metavar="N", parser=_number(int, 2, MAX_RANKS), help="Number of ranks of the job."
        ),
    ] = 8,
    schemes: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            show_default=False,
            help=f"With commas; options after colons: bf16,powersgd:rank=2. By default "
            f"{', '.join(_advise.CANDIDATES)}.",
        ),
    ] = ",".join(_advise.CANDIDATES),
    max_error: Annotated[
        float,
        typer.Option(
            metavar="X",
            parser=_number(float, 0, float("inf")),
            help="Largest relative squared error of an exchange.",
        ),
    ] = 0.05,
    device: _Device = None,
    batch: _Batch = None,
    accumulate: _Accumulate = 1,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File for all predictions.")
    ] = None,
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


@_command(rich_help_panel=_WORTH)
def simulate(
    model: _Model = None,
    timeline: _Timeline = None,
    fabric: Annotated[
        str,
        typer.Option(
            "--network", metavar="NAMES", help="Presets, or files of commhooks link, with commas."
        ),
    ] = "10gbe",
    schemes: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            show_default=False,
            help="With commas; options after colons: bf16,powersgd:rank=2. By default none, bf16, "
            "int8, int4, powersgd.",
        ),
    ] = "none,bf16,int8,int4,powersgd",
    ranks: Annotated[
        str, typer.Option(metavar="N,...", help=f"With commas, each from 2 to {MAX_RANKS:,}.")
    ] = "2,8,64,1024",
    device: _Device = None,
    batch: _Batch = None,
    accumulate: _Accumulate = 1,
    bucket_mb: Annotated[
        float | None,
        typer.Option(
            metavar="MIB",
            parser=_number(float, 0.001, 1_000_000),
            help="MiB of a full bucket (bucket_cap_mb); 1 for the first and 25 by default.",
        ),
    ] = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="File for all numbers.")] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File for a picture, with matplotlib.")
    ] = None,
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


# ---- schemes


@_command(rich_help_panel=_SCHEMES)
def schemes(
    which: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME|FILE",
            help="Schemes to describe, or files with schemes; options after colons: "
            "powersgd:rank=2, mine.py:rank=2.",
            autocompletion=_complete,
        ),
    ] = None,
) -> None:
    """Lists the registered schemes, or describes some: what they send, which options they have."""
    _catalogue.schemes(which or [])


@_command(rich_help_panel=_SCHEMES)
def tradeoff(
    which: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME|FILE",
            help="Schemes to compare, all by default; files with more; options after colons: "
            "powersgd:rank=2, mine.py:rank=2.",
            autocompletion=_complete,
        ),
    ] = None,
    trace: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FOLDER",
            help="Gradients that commhooks.wrappers.Traced recorded; more of them with the option "
            "again.",
        ),
    ] = None,
    ranks: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N",
            parser=_number(int, 1, _MOST),
            help="Takes the first ranks of a trace, this many; may be given again.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="For the table, and a picture with matplotlib."),
    ] = None,
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help="Measures Laplace and t(3) gradients as well, and draws every figure of the error "
            "of recorded ones.",
        ),
    ] = False,
) -> None:
    """Compares the errors of schemes with their bits, on random and on recorded gradients.

    The errors are those of the whole gradient, of the tensor in the middle,
    of the worst tensor, and with every entry divided by Adam's denominator.
    """
    _commands.tradeoff(which or [], _commands.recorded(trace or [], ranks or []), out, full=full)


@_command(rich_help_panel=_SCHEMES)
def new(
    name: Annotated[str, typer.Argument(help="Name of the scheme, such as half_topk.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The file; NAME.py by default.")
    ] = None,
) -> None:
    """Writes a file with a scheme to start from, which passes all checks."""
    _commands.new(name, out or Path(f"{name}.py"))


@_command(rich_help_panel=_SCHEMES)
def check(
    target: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FILE",
            help="A file with schemes, or a registered name; options after colons: mine.py:rank=2.",
            autocompletion=_complete,
        ),
    ],
) -> None:
    """Checks a scheme, or all schemes of a file; exits with 1 if a check fails."""
    raise typer.Exit(_commands.check(target))


# ---- installation


@_command(rich_help_panel=_INSTALLATION)
def doctor() -> None:
    """Prints what this installation uses, and whether two processes can exchange gradients."""
    raise typer.Exit(_doctor.doctor())
