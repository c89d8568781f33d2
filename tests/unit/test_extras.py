"""Errors that name a missing package, and commands in the docs that exist."""

from __future__ import annotations

import inspect
import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import tomllib
import torch

import commhooks
import commhooks.kernels
import commhooks.research.conformance
import commhooks.research.trace
import ddp_core
from commhooks.cli._app import app
from commhooks.kernels.runtime import cuda

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


# Finds no optional package, as in an environment without them.
def test_needs_names_the_call_the_package_and_the_cause() -> None:
    with (
        pytest.raises(commhooks.errors.MissingPackageError) as caught,
        ddp_core.needs("f()", "x", "y"),
    ):
        import no_such_module  # type: ignore[import-not-found]  # noqa: F401
    assert str(caught.value) == (
        "f() needs x and y, which cannot be imported (No module named 'no_such_module'): "
        "pip install x y"
    )
    assert caught.value.name == "no_such_module"
    assert isinstance(caught.value, ImportError)


@pytest.mark.parametrize("major", [12, 13])
def test_what_cuda_kernels_need_is_what_the_extra_installs(
    major: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", f"{major}.0")
    monkeypatch.setitem(sys.modules, "cupy", None)
    message = cuda.missing.__wrapped__()
    assert message.startswith("CuPy cannot be imported (")
    _, command, packages = message.partition(": pip install ")
    assert command
    assert shlex.split(packages) == EXTRAS[f"cuda{major}"]


COMMANDS = {command.name or command.callback.__name__ for command in app.registered_commands}
# Text for users: pages, and all text of what is installed.
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
TEXTS = [
    *PAGES,
    *(file for top in ("commhooks", "ddp_core", "kernels") for file in (ROOT / top).rglob("*.py")),
]


def matches(pattern: str, files: Iterable[Path]) -> list[tuple[str, str]]:
    """Returns the matches of a pattern's group, each with the file's name."""
    regex = re.compile(pattern, re.MULTILINE)
    return [(match, path.name) for path in files for match in regex.findall(path.read_text())]


def test_commands_in_texts_for_users_exist() -> None:
    commands = matches(
        r"(?:^ *|`)(?:python -m )?commhooks ([a-z]+)(?: [A-Za-z_]+(?:\.py)?)?(?:`| --| *#|   |$)",
        TEXTS,
    )
    assert {"check", "doctor", "new", "schemes", "tradeoff"} <= {name for name, _ in commands}
    assert not [(name, where) for name, where in commands if name not in COMMANDS]
    extras = matches(r"pip install [^`\n]*\.\[([\w,]+)\]", TEXTS)
    assert "cli" in [name for listed, _ in extras for name in listed.split(",")]
    assert not [extra for extra in extras if not set(extra[0].split(",")) <= set(EXTRAS)]


def test_nobody_is_sent_to_an_index_or_to_the_studies_of_a_clone() -> None:
    assert not matches(r"(pip install [^`\n]*\bcommhooks\b)", TEXTS)
    assert not matches(r"(python -m experiments)", set(TEXTS) - set(PAGES))


PUBLIC = [
    commhooks,
    commhooks.errors,
    commhooks.research.conformance,
    commhooks.research.trace,
    ddp_core,
]


def exceptions() -> list[type[BaseException]]:
    public = [getattr(module, name) for module in PUBLIC for name in module.__all__]
    classes = {kind for kind in public if inspect.isclass(kind) and issubclass(kind, BaseException)}
    return sorted(classes, key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", exceptions(), ids=lambda kind: kind.__name__)
def test_every_public_exception_is_an_error_of_the_package_and_a_built_in_one(
    kind: type[BaseException],
) -> None:
    assert issubclass(kind, commhooks.Error)
    built_in = {base for base in kind.__mro__ if base.__module__ == "builtins"}
    assert kind is commhooks.Error or built_in - {Exception, BaseException, object}


def test_all_exceptions_are_seen() -> None:
    names = {kind.__name__ for kind in exceptions()}
    assert {"Error", "CheckpointError", "LawBroken", "PeerError", "RoundsError"} <= names
    assert ddp_core.Error is commhooks.Error
