"""Reads the arguments of commands: schemes in a user's files, models, timelines, lists."""

from __future__ import annotations

import ast
import math
import re
import runpy
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from torch import nn

from commhooks import Scheme, make, scheme_names
from commhooks.core._settings import shown
from commhooks.errors import Error
from commhooks.predict._device import DEVICES, Device
from commhooks.predict._exchange_plan import PredictionError
from commhooks.predict._fabric import Fabric, fabric
from commhooks.predict._models import MODELS, Model, model, model_of
from commhooks.predict._step import MAX_RANKS
from commhooks.predict._workload import Workload, load_workload
from ddp_core.exchange._errors import raised_in

__all__ = [
    "check_folders",
    "fabrics_of",
    "heading",
    "listed",
    "load_files",
    "made",
    "note_of",
    "numbers_of",
    "schemes_of",
    "sentence",
    "settings_of",
    "short",
    "split",
    "workload_of",
]


def split(which: Sequence[str]) -> tuple[list[str], list[str]]:
    """Runs the Python files in ``which``; returns schemes as in "powersgd:rank=4".

    Options behind a file are those of every scheme that it registers: "my_scheme.py:rank=4".

    Returns:
        The schemes among ``which``, and those that the files register, except where the scheme is
        named with options: "my_scheme.py,name:rank=4".

    Raises:
        typer.BadParameter: a file does not run, or registers no scheme.
    """
    named: list[str] = []
    added: list[str] = []
    names_of: dict[str, list[str]] = {}  # a file may come twice, with other options
    for word in which:
        file = re.fullmatch(r"(.+?\.py)(:.*)?", word)
        if file is None:
            named.append(word)
            continue
        if file[1] not in names_of:
            names_of[file[1]] = load_files([Path(file[1])])
            if not names_of[file[1]]:
                raise typer.BadParameter(
                    f"{file[1]} registers no scheme: see commhooks.register_scheme"
                )
        added += [f"{name}{file[2] or ''}" for name in names_of[file[1]]]
    with_options = {word.partition(":")[0] for word in named if ":" in word}
    return named, [word for word in added if word not in with_options]


def load_files(files: Sequence[Path]) -> list[str]:
    """Runs files that register schemes and returns the names that they add."""
    before = set(scheme_names())
    for path in files:
        if not path.is_file():
            raise typer.BadParameter(f"no file {path}")
        try:
            # Not imported: a file anywhere, whose name may be that of an installed module. Its
            # ``if __name__ == "__main__"`` does not run.
            runpy.run_path(str(path), run_name=path.stem)
        except (Exception, SystemExit) as error:  # a file may call sys.exit
            raise typer.BadParameter(f"{path} does not run: {sentence(error, path)}") from error
    return [name for name in scheme_names() if name not in before]


def made(word: str, **more: Any) -> Scheme:
    """Makes a registered scheme with its options, such as "powersgd:rank=4", and ``more``.

    Raises:
        typer.BadParameter: the scheme raised an exception; the message has its name.
    """
    name, options = settings_of(word)
    try:
        return make(name, **{**options, **more})
    except Exception as error:  # a user's scheme may raise anything
        raise typer.BadParameter(f"{name} cannot be made: {sentence(error)}") from error


def sentence(error: BaseException, path: Path | None = None) -> str:
    """Returns an error of a user's code as a sentence, with the line that raised it.

    Args:
        path: the file whose line is given; None: the file is named, too.
    """
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if path is not None and frame.filename == str(path)
    ]
    where = f"line {lines[-1]}: " if lines else ""
    kind = "" if isinstance(error, Error) else f"{type(error).__name__}: "  # ours say it in words
    line = raised_in(error) if path is None else ""
    return f"{where}{kind}{error}{f' ({line})' if line else ''}"


# ---- what predictions share


def check_folders(*files: Path | None) -> None:
    """Raises if an output file is a folder, or its folder does not exist."""
    for path in files:
        if path is None:
            continue
        if path.is_dir():
            raise typer.BadParameter(f"{path} is a folder; name a file")
        if not path.absolute().parent.is_dir():
            raise typer.BadParameter(f"{path}: there is no folder {path.absolute().parent}")


def listed(option: str, text: str) -> list[str]:
    """Returns the words of a comma-separated list, each once.

    Args:
        option: its name, for the message.
        text: the list.

    Raises:
        typer.BadParameter: there is no word.
    """
    words = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not words:
        raise typer.BadParameter(f"{option} {shown(text)}: give one or more, with commas")
    return words


def numbers_of(text: str) -> list[int]:
    """Returns the numbers of ranks in a list."""
    words = listed("--ranks", text)
    if not all(word.isdecimal() and 2 <= int(word) <= MAX_RANKS for word in words):
        raise typer.BadParameter(
            f"--ranks {shown(text)}: whole numbers from 2 to {MAX_RANKS:,} with commas, as in "
            f"2,8,64"
        )
    return [int(word) for word in words]


def fabrics_of(text: str) -> list[Fabric]:
    """Returns presets and fabrics of files; fabrics with equal names are named as given.

    All files of ``commhooks link`` have the same name inside.
    """
    words = listed("--network", text)
    fabrics = [_fabric_of(word) for word in words]
    names = [network.name for network in fabrics]
    return [
        replace(network, name=word) if names.count(network.name) > 1 else network
        for word, network in zip(words, fabrics, strict=True)
    ]


def _fabric_of(word: str) -> Fabric:
    try:
        return fabric(word)
    except ValueError as error:
        text = str(error).removeprefix(f"fabric({shown(word)}): ")
        raise typer.BadParameter(f"--network {shown(word)}: {text}") from error


def schemes_of(words: Sequence[str]) -> dict[str, Scheme]:
    """Makes schemes by name; loads files with schemes, which are added."""
    named, added = split(words)
    return {word: made(word) for word in [*named, *added]}


def settings_of(word: str) -> tuple[str, dict[str, Any]]:
    """Returns the name and options of a scheme, such as powersgd:rank=4."""
    name, *settings = word.split(":")
    options: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise typer.BadParameter(
                f"{word}: options follow a name or a file as in powersgd:rank=4:start_step=10"
            )
        if key in options:
            raise typer.BadParameter(f"{word}: {key} is given twice")
        options[key] = _value(value)
    return name, options


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text.capitalize() if text in ("true", "false") else text)
    except (ValueError, SyntaxError):
        return text


def workload_of(
    name: str | None,
    timeline: Path | None,
    batch: int | None,
    device: Device,
    *,
    accumulate: int = 1,
) -> tuple[Workload, str]:
    """Returns the step of a model (a built-in name, or ``FILE.py:FUNCTION``) or of a timeline.

    The string says what a rank computes in the step, as far as this is known.

    Args:
        name, timeline: one of both.
        batch: samples of a rank's pass.
        device: computes a model's passes.
        accumulate: forward and backward passes of a step.
    """
    one_pass, samples = _one_pass(name, timeline, batch, device)
    workload = one_pass.accumulated(accumulate)
    if not workload.numel or not workload.compute_s:
        raise typer.BadParameter(
            f"{workload.name}: {workload.numel:,} parameters and {workload.compute_s:g} s of "
            f"computing per step: there is nothing to exchange, or nothing to compare it with"
        )
    return workload, samples + (f" in each of {accumulate:,} passes" if accumulate > 1 else "")


def _one_pass(
    name: str | None, timeline: Path | None, batch: int | None, device: Device
) -> tuple[Workload, str]:
    if (name is None) == (timeline is None):
        raise typer.BadParameter("give either --model or --timeline")
    if timeline is not None:
        if batch is not None:
            raise typer.BadParameter("--batch: a recorded timeline has the batch of its run")
        if not timeline.is_file():
            raise typer.BadParameter(
                f"--timeline {timeline}: no such file; commhooks.predict.save_workload writes one"
            )
        return load_workload(timeline), "the recorded batch"
    source = model(name) if name in MODELS else _model_of_file(name or "")
    if isinstance(source, Workload):
        return source, f"the batch of {name}"
    if math.isnan(device.flops):
        raise typer.BadParameter(
            f"--device here times schemes, not {name}: record a step (commhooks.predict.record) "
            f"and give it as --timeline, or name a device that is known: {', '.join(DEVICES)}"
        )
    samples = source.batch if batch is None else batch
    words = f"{samples:,} sample{'s' * (samples != 1)} of {source.sample} per rank"
    return source.workload(device, batch=batch), words


def heading(workload: Workload, samples: str, where: str) -> str:
    """Returns the line above predictions: what is computed on which device.

    Args:
        workload: the step.
        samples: what a rank computes in the step, as :func:`workload_of` says it.
        where: the device, with what else is equal in all predictions.
    """
    return (
        f"{workload.name}, {workload.numel / 1e6:,.1f} M parameters, {samples}, on {where}: "
        f"{short(1e3 * workload.compute_s)} ms of computing per step"
    )


def short(value: float) -> str:
    """Formats a number with three digits or more, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.{1 if value >= 10 else 2}f}"


def _model_of_file(target: str) -> Model | Workload:
    """Returns the model or workload that ``FILE.py:FUNCTION`` makes."""
    path, colon, name = target.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise typer.BadParameter(
            f"--model {target}: neither FILE.py:FUNCTION nor one of {', '.join(MODELS)}"
        )
    if not Path(path).is_file():
        raise typer.BadParameter(f"--model {target}: no file {path}")
    try:
        factory = runpy.run_path(path, run_name=Path(path).stem)[name]
        result = factory()
    except KeyError as error:
        if error.args != (name,):
            raise typer.BadParameter(f"{target}: {sentence(error, Path(path))}") from error
        raise typer.BadParameter(f"--model {target}: {path} has no {name}") from error
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        raise typer.BadParameter(f"{target}: {sentence(error, Path(path))}") from error
    if isinstance(result, Model | Workload):
        return result
    module, *inputs = result if isinstance(result, tuple) and result else (result,)
    if not isinstance(module, nn.Module) or not inputs:
        raise typer.BadParameter(
            f"--model {target}: {name}() returns (module, example input, ...), or a Workload of "
            f"commhooks.predict, got {type(result).__name__}"
        )
    try:
        return model_of(module, *inputs)
    except PredictionError:
        raise
    except Exception as error:  # a user's forward pass may raise anything
        raise typer.BadParameter(f"{target}: {sentence(error, Path(path))}") from error


def note_of(links: Fabric, ranks: int) -> str:
    """Returns a sentence if a prediction uses a link that was not measured, or nothing."""
    if not links.copied or ranks <= links.ranks_per_node:
        return ""
    # No machine has more GPUs than 16.
    here = ranks if ranks <= 16 else "N"
    return (
        f"{links.name}: measured with {links.ranks_per_node} ranks of one machine. More ranks are "
        f"predicted as several such machines, as if the link between them were the one inside. "
        f"For one machine run torchrun --standalone --nproc-per-node {here} -m commhooks link, and "
        f"for several run commhooks link on all of them."
    )
