"""Measures the headroom of an unmodified script, in the process of each rank.

``commhooks headroom`` has DistributedDataParallel's constructor call :func:`ddp_built`. The hook is
registered at the first forward pass that trains: a script with a hook of its own registers it
before. When all steps have run, the next forward pass ends the process.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.nn.parallel import DistributedDataParallel

from commhooks._torch import comm_hooks, forward_pre_hooks
from commhooks.errors import Error
from commhooks.predict._headroom import Headroom
from commhooks.predict._headroom_steps import InterleavedRun, steps_needed

__all__ = ["ORDER", "ddp_built", "fsdp_built"]

ORDER = "COMMHOOKS_HEADROOM"  # the environment variable with what is asked for, as JSON
_REPORT_EVERY_S = 10.0  # between two lines that say how far the measurement is
_MAX_EXITS = 3  # a script that catches SystemExit so often is ended at once


class _Script:
    """Holds the measurement of this process."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.steps, self.deadline = int(order["steps"]), float(order["deadline"])
        self.out, self.status = order["out"], Path(order["status"])
        self.models = 0
        self.measured: DistributedDataParallel | None = None
        self.turns: InterleavedRun | None = None
        self.ends = 0
        self.rank = 0  # of the measured model; the script may destroy its group before it ends
        self.began_at = (0.0, 0)  # time and step of the first of a turn
        self.reported_at = 0.0  # time of the last line

    def write_status(self, **facts: Any) -> None:
        """Writes facts for the command that started this script; one rank per machine does."""
        if torch.distributed.is_initialized():
            self.rank = torch.distributed.get_rank()
        # On a machine that the command does not run on, there is no such folder.
        if int(os.environ.get("LOCAL_RANK", self.rank)) == 0 and self.status.parent.is_dir():
            written = json.loads(self.status.read_text()) if self.status.exists() else {}
            whole = self.status.with_suffix(".new")  # no reader finds half of it
            whole.write_text(json.dumps(written | facts))
            whole.replace(self.status)

    def before_forward(self, ddp: DistributedDataParallel, inputs: Any) -> None:
        """Marks the begin of a step, and ends the process after the last one."""
        if not torch.is_grad_enabled() or not ddp.training:
            return  # an evaluation, which may be one rank's alone
        if self.ends:
            self.end()
        if self.measured is None and not self.begin(ddp, inputs):
            return
        if self.turns is None or self.measured is None:
            return
        if self.measured is not ddp and self.measured.module is ddp.module:
            self.write_status(rewrapped=self.turns.step)
            self.end()
        if self.measured is ddp:
            try:
                if self.turns.step_begins():
                    self.report(self.turns)
                self.report_progress(self.turns)
            except Error as error:
                self.write_status(failed=str(error))
                self.end()

    def begin(self, ddp: DistributedDataParallel, inputs: Any) -> bool:
        """Registers the hook on the first model that trains with others; returns whether it did."""
        if comm_hooks(ddp):
            self.report_own_hook(None, comm_hooks(ddp)[0][0])
        if torch.distributed.get_world_size(ddp.process_group) == 1:
            self.write_status(alone=True)
            if torch.distributed.get_world_size() == 1:
                self.end()
            return False  # perhaps another model is of more ranks
        self.measured, known = ddp, set(forward_pre_hooks(ddp))
        try:
            self.turns = InterleavedRun(ddp, self.steps, deadline=self.deadline)
        except Error as error:
            self.write_status(failed=str(error))
            self.end()
        ddp.register_comm_hook = self.report_own_hook  # type: ignore[method-assign]
        # The pre-hook that came with the communication hook has not seen the pass that begins now,
        # which no_sync() may be around.
        for key, hook in list(forward_pre_hooks(ddp).items()):
            if key not in known:
                hook(ddp, inputs)
        atexit.register(self.at_exit)
        self.write_status(begun=time.time(), needed=steps_needed(self.steps))
        return True

    def report_progress(self, turns: InterleavedRun) -> None:
        """Writes now and then, on rank 0, which round runs and how long the rest takes."""
        now = time.monotonic()
        if self.rank or turns.warms_up or now - self.reported_at < _REPORT_EVERY_S:
            return
        rounds = turns.turns + turns.turns_to_come
        if not self.began_at[1]:
            self.began_at = now, turns.step
        since, first = self.began_at
        if turns.step == first:
            text = f"{rounds} rounds, {steps_needed(self.steps)} steps in all"
        else:
            remaining_s = (now - since) / (turns.step - first) * turns.steps_to_come
            text = f"round {turns.turns + 1} of {rounds}, about {remaining_s:.0f} s to go"
        print(f"commhooks headroom: {text}", file=sys.stderr, flush=True)
        self.reported_at = now

    def report_own_hook(self, state: Any, hook: Any) -> NoReturn:
        """Ends a script that registers its own hook, before the first step or later."""
        self.write_status(own_hook=getattr(hook, "__qualname__", repr(hook)))
        self.end()

    def report(self, turns: InterleavedRun) -> NoReturn:
        """Prints the result on rank 0, and ends the process."""
        if not turns.turns:
            self.write_status(too_slow=turns.step)
            self.end()
        headroom = Headroom.of(*turns.results())
        if torch.distributed.get_rank() == 0:
            print(f"\n{headroom}\n", flush=True)
            if self.models > 1:
                print(
                    f"The script has {self.models} DistributedDataParallel models: the first that "
                    f"trained was\nmeasured, the others were not compressed at any time.\n"
                )
            if self.out is not None:
                headroom.save(self.out)
        self.write_status(done=turns.step)
        self.end(done=True)

    def end(self, *, done: bool = False) -> NoReturn:
        """Ends the process, even if the script catches ``SystemExit``."""
        self.ends += 1
        if done and self.turns is not None:
            self.turns.leave()
        if self.ends > _MAX_EXITS:
            os._exit(0)
        # Not a failure of the script's, which torchrun would report: the command says what it was.
        raise SystemExit(0)

    def at_exit(self) -> None:
        """Writes how many steps the script ran by itself."""
        if not self.ends and self.turns is not None:
            self.write_status(ended=self.turns.step)


_script: _Script | None = None


def _this_script() -> _Script:
    global _script
    if _script is None:
        _script = _Script(json.loads(os.environ[ORDER]))
    return _script


def ddp_built(ddp: DistributedDataParallel) -> None:
    """Measures a model once it trains; called when its constructor has returned."""
    script = _this_script()
    script.models += 1
    script.write_status(ddp=True)
    ddp.register_forward_pre_hook(torch.compiler.disable(partial(_before_forward, script)))


def _before_forward(script: _Script, ddp: DistributedDataParallel, inputs: Any) -> None:
    script.before_forward(ddp, inputs)


def fsdp_built(model: Any) -> None:
    """Ends a script that uses FSDP, whose gradients are no buckets of a hook."""
    script = _this_script()
    script.write_status(fsdp=True)
    script.end()
