"""Runs the commands of ``commhooks`` that have no module of their own."""

from __future__ import annotations

import keyword
import re
import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from commhooks import make, scheme_names
from commhooks.cli._arguments import made, sentence, settings_of, split
from commhooks.cli._catalogue import one_thread
from commhooks.cli._progress import tracked
from commhooks.cli._table import print_table
from commhooks.cli._tradeoff import (
    FIGURES,
    MAX_STEPS,
    Case,
    Course,
    Point,
    cases_of,
    cell,
    drawn,
    named,
    of_one_tensor,
    page_of,
    random_gradients,
    title_of,
    with_fronts,
    write_csv,
)
from commhooks.cli._tradeoff import SAME as NOT_COMPARED
from commhooks.core._registry import factory_of
from commhooks.errors import MissingPackageError
from commhooks.research.conformance import check_scheme, exemptions_of, laws_of
from commhooks.research.trace import Gradients, Trace, steps_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["TEMPLATE", "check", "new", "recorded", "tradeoff"]


# No annotations: a file to start from is read before it is checked. It obeys every law as written,
# so that a law that breaks later shows what a change has broken.
TEMPLATE = '''"""A gradient compression scheme: NAME.

    commhooks check NAME.py      checks what every scheme has to hold
    commhooks schemes NAME.py    prints its row: bits per entry, collectives, state
    commhooks tradeoff NAME.py   compares its error and bits with those of all others

In training, import this file, then call commhooks.register(ddp_model, "NAME").
"""

from dataclasses import dataclass

import torch

from commhooks.core import Biased, Codec, Traits, register_scheme


@register_scheme("NAME")
@dataclass(frozen=True)
class CLASS(Codec):
    """Sends the sign of every entry, and the mean magnitude of the bucket.

    Args:
        scale: a setting, for ``register(..., scale=...)``.
    """

    scale: float = 1.0

    # Biased: a scheme that is made by name then gets error feedback.
    traits = Traits(error=Biased())

    def __post_init__(self):
        if not 0 < self.scale <= 1:
            raise ValueError(f"CLASS(scale=...): 0 < scale <= 1, got {self.scale!r}")

    def encode(self, gradient, bucket):
        """Returns named tensors; their shapes and dtypes may not depend on values."""
        wide = torch.promote_types(gradient.dtype, torch.float32)  # a sum in 16 bits may overflow
        size = self.scale * gradient.abs().sum(dtype=wide) / max(1, gradient.numel())
        return {"signs": gradient.sign().nan_to_num(0.0).to(torch.int8), "size": size.view(1)}

    def decode(self, payload, like, bucket):
        """Returns the gradient of one rank's payload; ranks are averaged later."""
        return payload["signs"] * payload["size"]
'''


_WIDE = 96  # columns of a terminal that has room for spaces around all figures of error


# ---- new and check


def new(name: str, path: Path) -> None:
    """Writes a file with a scheme to start from.

    Raises:
        typer.BadParameter: the name or the file is not usable; nothing was written.
    """
    # The name becomes the name of a class and, by default, of a file, besides that of the scheme.
    if not re.fullmatch(r"[a-z_]*[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise typer.BadParameter(
            f"a name begins with a small letter or _, has small letters, digits and _, and is no "
            f"word of Python, got {name!r}"
        )
    if name in (*scheme_names(), "auto"):
        raise typer.BadParameter(f"the name {name!r} is taken by a registered scheme")
    if path.suffix != ".py":
        raise typer.BadParameter(f"the file ends in .py, got {path}")
    if path.exists():
        raise typer.BadParameter(f"{path} exists; it is left as it is")
    # A script is run with its folder first in the search path, so imports would find this file.
    if path.stem in sys.stdlib_module_names or path.stem in ("commhooks", "torch", "numpy"):
        raise typer.BadParameter(f"{path} would hide the module {path.stem}; choose another name")
    words = "".join(part.capitalize() for part in name.split("_"))
    path.write_text(TEMPLATE.replace("NAME", name).replace("CLASS", words), encoding="utf-8")
    typer.echo(
        f"wrote {path}; now: commhooks check {path}; then compare it in training, as the guide "
        f'"A scheme of your own" does'
    )


def check(target: str) -> int:
    """Runs the laws on schemes, prints the outcomes, and returns the exit status.

    Args:
        target: a registered name, or a file that registers schemes; options follow after colons.

    Returns:
        1 if a law is broken, else 0.
    """
    named, added = split([target])
    broken = 0
    for word in named or added:
        name, options = settings_of(word)
        factory_of(name)  # raises for an unknown name, with a suggestion
        scheme = made(word)
        if not scheme.traits.averages:
            raise typer.BadParameter(
                f"{word} does not average over ranks: the checks are not for it"
            )
        table, notes = Table("check", "", "counterexample", title=word), list[str]()
        verdicts = check_scheme(partial(make, name, **options))
        for verdict in tracked(verdicts, f"check {word}", len(laws_of(scheme))):
            if verdict.is_last:
                notes.append("All other checks need this to run: they were not made.")
            mark = "[green]passes[/]" if verdict.holds else "[red]fails[/]"
            text = f"{verdict.error} (guide: {verdict.guide})" if verdict.error else ""
            table.add_row(verdict.law, mark, escape(text))
            broken += not verdict.holds
        print_table(Console(), table)
        if not notes:
            notes += [
                f"left out: {count} check{'s' * (count != 1)} {reason}"
                for reason, count in exemptions_of(scheme).items()
            ]
        for note in notes:
            Console().print(note, markup=False, highlight=False, soft_wrap=True)
    if broken:
        Console().print(
            'guide: heading in "A scheme of your own", docs/guides/new-scheme.md', soft_wrap=True
        )
    return 1 if broken else 0


# ---- tradeoff


def tradeoff(
    which: Sequence[str],
    traces: Sequence[Trace],
    out: Path | None,
    picture: Callable[[Sequence[Point]], Figure] | None = None,
    *,
    full: bool = False,
) -> list[Point]:
    """Prints the bits and the errors of schemes, and writes them to a folder.

    Args:
        which: names, and files with more schemes; without names, all schemes are compared.
        traces: recorded gradients, besides random ones.
        out: folder to write to. None: nothing is written.
        picture: draws what was measured; by default all of it.
        full: measures Laplace and t(3) gradients as well, and draws every figure of recorded ones.

    Returns:
        What was measured.
    """
    known = set(scheme_names())
    named, added = split(which)
    some = list(dict.fromkeys([*named, *added]))  # a scheme of a file may be named, too
    compared = some if named else _comparable(scheme_names(), added)
    # All names are checked before the first measurement, which takes seconds per scheme.
    for name in compared:
        factory_of(settings_of(name)[0])
        if made(name).traits.returns == "update":
            raise typer.BadParameter(
                f"{name} gives the optimizer something else than an average of gradients: there is "
                f"no error to measure"
            )
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)  # now: a wrong path costs no measurement
    cases, points = cases_of(compared), list[Point]()
    yours = {case.label for case in cases if case.name not in known}
    for gradients in (*random_gradients()[: None if full else 1], *traces):
        marked = with_fronts(_measured(cases, gradients))
        console = Console()
        title = title_of(gradients.name, gradients.world_size)
        print_table(console, _errors(marked, title, yours, wide=console.width >= _WIDE))
        points += marked
        if out is not None:
            write_csv(points, out / "tradeoff.csv")  # now: a later trace may fail
    if out is not None:
        _write(points, out, picture or partial(drawn, yours=yours, full=full), yours)
    return points


def _measured(cases: Sequence[Case], gradients: Gradients) -> list[Point]:
    """Runs all schemes over each step: of a large model, memory has room for one step."""
    courses = [Course(case) for case in cases]
    title = title_of(gradients.name, gradients.world_size)
    total = min(len(gradients.steps), MAX_STEPS) * len(cases)
    pairs = ((step, course) for step in steps_of(gradients, MAX_STEPS) for course in courses)
    with one_thread():
        for step, course in tracked(pairs, title, total):
            try:
                course.run(step)
            except Exception as error:  # raised by a user's scheme
                raise typer.BadParameter(f"{course.case.label}: {sentence(error)}") from error
    return [course.point(gradients) for course in courses]


def recorded(folders: Sequence[Path], ranks: Sequence[int]) -> list[Trace]:
    """Returns the traces in some folders.

    Args:
        folders: of recorded gradients.
        ranks: numbers of ranks, of which each trace has the first ones; none: all that recorded.

    Raises:
        typer.BadParameter: a trace lacks a rank or a step, or there is none to take ranks of.
    """
    if ranks and not folders:
        raise typer.BadParameter("--ranks takes the first ranks of a trace: give --trace as well")
    try:
        if not ranks:
            return [Trace(folder) for folder in folders]
        return [Trace(folder, ranks=count) for folder in folders for count in ranks]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _comparable(every: Sequence[str], added: Sequence[str]) -> list[str]:
    """Returns the schemes that have an error to measure."""
    yours = {settings_of(word)[0] for word in added}
    names = [*added, *(name for name in every if name not in NOT_COMPARED | yours)]
    compared = [name for name in names if made(name).traits.returns != "update"]
    # If no scheme of the user's file has an error, the caller raises with the name of the first.
    return sorted(compared if not added or set(added) & set(compared) else [*added, *compared])


def _errors(
    points: Sequence[Point], title: str, yours: Collection[str] = (), *, wide: bool
) -> Table:
    caption = (
        "*: Pareto front (no scheme has fewer bits and less of it); "
        "bits: of an all-reduce that sends as many bytes, so that the payload of an all-gather "
        "counts n / 2 times on n ranks"
    )
    noisy = any(point.noise for point in points)
    if noisy:
        caption += "; noise: tensors of zeros that are not zero in the average, per step"
    # One tensor is its own median and its own worst.
    shown = ["error", "adam"] if of_one_tensor(points) else list(FIGURES)
    roomy = wide or len(shown) < len(FIGURES)
    table = Table(title=title, caption=caption, padding=(0, 1 if roomy else 0))
    table.add_column("scheme", no_wrap=True)
    table.add_column("bits", justify="right", no_wrap=True)
    for column in [*(FIGURES[name] for name in shown), *(["noise"] * noisy)]:
        table.add_column(column.replace(" ", "\n"), justify="right", no_wrap=True)
    for point in sorted(points, key=lambda point: (point.bits, point.error)):
        figures = [cell(point, name) for name in shown]
        noise = [f"{point.noise:.3g}" if point.noise else ""] * noisy
        style = "bold" if point.scheme in yours else None
        name = escape(named(point, yours))
        table.add_row(name, f"{point.bits:.3g}", *figures, *noise, style=style)
    return table


def _write(
    points: Sequence[Point],
    folder: Path,
    picture: Callable[[Sequence[Point]], Figure],
    yours: Collection[str],
) -> None:
    try:
        figure = picture(points)
        figure.savefig(folder / "tradeoff.png", dpi=110)
        page_of(points, figure, yours).write(folder / "tradeoff.html")
    except MissingPackageError as error:
        typer.echo(f"wrote {folder / 'tradeoff.csv'}. {error}")
    else:
        typer.echo(f"wrote {folder / 'tradeoff.csv'}, .png and .html")
