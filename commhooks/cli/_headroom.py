"""Runs a script with ``commhooks headroom``, and explains why no result came."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from shlex import join
from typing import Any

import typer

import commhooks
from commhooks.cli import site
from commhooks.cli._arguments import check_folders
from commhooks.core._settings import shown
from commhooks.predict._headroom_agent import ORDER
from commhooks.predict._headroom_steps import LEAST_STEPS, most_counted, steps_needed

__all__ = ["TIME_LIMIT", "headroom"]

TIME_LIMIT = 600.0  # seconds, unless the command says another one
_GRACE = 90.0  # seconds after the time limit in which a script may end by itself
_TERM = 10.0  # and after SIGTERM


def headroom(command: Sequence[str], steps: int, time_limit: float, out: Path | None) -> int:
    """Runs a command until enough steps are measured; returns the exit code.

    Args:
        command: a program with its arguments, or a Python file with its.
        steps: steps of each kind of communication that count.
        time_limit: seconds from now on.
        out: file for the numbers, as JSON.
    """
    if not hasattr(os, "killpg"):  # before anything is started
        raise typer.BadParameter(
            "commhooks headroom needs a POSIX system (Linux, macOS): it ends a script's processes "
            "as one group, which this system does not have"
        )
    check_folders(out)
    if out is not None:
        out.touch()  # now: a wrong path costs no measurement
    whole = [sys.executable, *command] if command[0].endswith(".py") else list(command)
    # Under torchrun, each rank has started this command: one of them speaks.
    speaks = os.environ.get("RANK", "0") == "0"
    with tempfile.TemporaryDirectory(prefix="headroom-") as folder:
        status = Path(folder) / "status.json"
        order = {
            "steps": steps,
            "deadline": time.time() + time_limit,
            "out": None if out is None else str(out.resolve()),
            "status": str(status),
        }
        if speaks:
            typer.echo(
                "commhooks headroom: the script trains alternately with and without\n"
                "communication, and is then stopped. Without communication its ranks drift apart:\n"
                "do not use what it saves meanwhile. It may overwrite earlier checkpoints.",
                err=True,
            )
        code, killed = _run(whole, _environment(order), time_limit)
        status_of_script = json.loads(status.read_text()) if status.exists() else {}
        status_of_script["seen"] = Path(f"{status}.seen").exists()
    # The result, or the reason why there is none.
    if out is not None and not out.stat().st_size:
        out.unlink()  # no answer, or one on the machine of rank 0
    if "done" in status_of_script:
        if code and speaks:
            typer.echo(f"(the answer above is complete; the script ended with {code})", err=True)
        return 0
    if not speaks:
        return code
    again = [] if time_limit == TIME_LIMIT else ["--time-limit", f"{time_limit:g}"]
    again += [] if out is None else ["--out", str(out)]
    again += ["--", *command]
    typer.echo(
        f"commhooks headroom: {_reason(status_of_script, code, killed, time_limit, again)}",
        err=True,
    )
    return code or 1


def _environment(order: dict[str, Any]) -> dict[str, str]:
    """Returns the environment in which Python runs ``site/sitecustomize.py`` first."""
    folder = str(Path(site.__file__).parent)
    path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    return os.environ | {
        ORDER: json.dumps(order),
        f"{ORDER}_SEEN": f"{order['status']}.seen",
        f"{ORDER}_PACKAGE": str(Path(commhooks.__file__).parents[1]),
        "PYTHONPATH": path,
    }


def _run(command: list[str], environment: dict[str, str], limit: float) -> tuple[int, bool]:
    """Runs a command; returns its exit code, and whether the time limit ended it."""
    try:
        # A session of its own: the script's processes end with it, also those that it spawned.
        process = subprocess.Popen(command, env=environment, start_new_session=True)
    except OSError as error:
        raise typer.BadParameter(f"cannot run {command[0]}: {error.strerror}") from error
    except ValueError as error:  # a zero byte
        raise typer.BadParameter(f"cannot run {shown(command[0])}: {error}") from error

    def forward(number: int, _: Any) -> None:
        _signal(process, number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return process.wait(timeout=limit + _GRACE), False
    except subprocess.TimeoutExpired:
        _signal(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_TERM)
        return 1, True
    finally:
        _signal(process, signal.SIGKILL)  # what it has left behind
        process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _fewer(steps: int, again: Sequence[str]) -> str:
    """Returns how to measure a script of so few steps, or how many it needs at least.

    Args:
        again: the arguments of the command, without ``--steps``.
    """
    counted = most_counted(steps)
    if counted < LEAST_STEPS:
        return f"At least {steps_needed(LEAST_STEPS)} steps are needed, with --steps {LEAST_STEPS}."
    return f"Or, for a less exact answer: commhooks headroom --steps {counted} {join(again)}"


def _reason(
    status: dict[str, Any], code: int, killed: bool, limit: float, again: Sequence[str] = ()
) -> str:
    """Explains why there is no result."""
    within = f" within {limit + _GRACE:.0f} s; raise --time-limit" if killed else ""
    ended = "was stopped" if killed else f"ended with exit code {code}"
    # The script uses something that cannot be measured, or raised.
    if status.get("fsdp"):
        return (
            "the script uses FSDP, which has no communication hooks for buckets of gradients: only "
            "DistributedDataParallel can be measured. On FSDP2, "
            'commhooks.register(model, "auto") times schemes while it trains.'
        )
    if "own_hook" in status:
        return (
            f"the script registers a communication hook of its own, {status['own_hook']}, and "
            f"DistributedDataParallel takes one: leave it out to measure steps without "
            f"compression, with bf16 and without communication."
        )
    if "failed" in status:
        return str(status["failed"])
    # Steps were measured, and too few.
    if "too_slow" in status:
        return (
            f"the time limit of {limit:.0f} s came after {status['too_slow']} steps, before each "
            f"kind of communication was measured: raise --time-limit."
        )
    if "rewrapped" in status:
        return (
            f"the script wraps its model in another DistributedDataParallel after "
            f"{status['rewrapped']} steps, before the {status['needed']} steps that the "
            f"measurement needs: let it train longer with one. "
            f"{_fewer(status['rewrapped'], again)}"
        )
    if "needed" in status:
        steps = f" after {status['ended']} steps" if "ended" in status else ""
        advice = f" Train longer. {_fewer(status.get('ended', 0), again)}" if code == 0 else ""
        return (
            f"the script {ended}{steps}, before the {status['needed']} steps that the measurement "
            f"needs{within}.{'' if within else advice}"
        )
    # No step was measured.
    if status.get("alone"):
        return (
            "the script trains on one rank, which exchanges no gradients: start it on two or more."
        )
    if status.get("ddp"):
        return (
            f"the script built a DistributedDataParallel and {ended} before a forward pass through "
            f"it in training{within}. A pass counts that calls the DistributedDataParallel and not "
            f"the module inside, in training mode (model.train()), with gradients switched on."
        )
    if not status.get("seen", True):
        return (
            f"the script {ended}{within}, and no Python that it started has looked at PYTHONPATH, "
            f"by which it is measured: it runs on other machines, or ignores the environment "
            f"(python -I, -E), or is no Python program."
        )
    return (
        f"the script {ended} and never built a DistributedDataParallel{within}: there is no "
        f"exchange of gradients to measure."
    )
