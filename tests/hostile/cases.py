"""The cases, by kind: each is made of a seed, and raises if what it is given to does not hold."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import random
import struct
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from typer.testing import CliRunner

import commhooks
from commhooks.auto._hook import _read_plan as plan_of_auto
from commhooks.checkpoint._format import checksum
from commhooks.cli._app import app
from commhooks.collectives._calls import _tensors_of as tensors_of
from commhooks.core._scheme import walk
from commhooks.errors import CheckpointError
from commhooks.hook._pickling import sealed as sealed_pickle
from commhooks.local._diloco import add_checksum as add_outer_checksum
from tests.hostile.values import Written, changed, changed_json, damaged

__all__ = ["KINDS", "Target"]

_SCHEMES = [
    ("powersgd", {"rank": 2, "start_step": 1}),
    ("topk", {"ratio": 0.1}),
    ("sdp4bit", {"local_size": 1}),
    ("dgc", {"ratio": 0.1}),
    ("onebit_adam", {"freeze_step": 2}),
    ("acpsgd", {"rank": 2}),
    ("int8", {}),
]
_WORDS = [
    "check",
    "new",
    "schemes",
    "doctor",
    "--out",
    "--help",
    "-h",
    "--",
    "nope",
    "class",
    "a/b",
]
_ALPHABET = [*"aZ_-./\\\0\n\t []{%é\U0001f600\ud800*'\"0=", "\x1b[31m", ".."]


class Target:
    """Takes hostile bytes: hooks with memory, in a process group of one rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hooks = [self._trained(name, options) for name, options in _SCHEMES]
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
        self.outer = commhooks.DiLoCo(model, "topk", every=4, delay=2)
        for _ in range(5):
            self.outer.step()
        self.calls = commhooks.Collectives("topk", ratio=0.1)
        for name in ("a", "b", "b"):
            self.calls.all_reduce(torch.randn(30, 4), name)
        classic = DistributedDataParallel(nn.Linear(12, 9))
        self._keep.append(classic)
        power = commhooks.PowerSGDState(None, 2, start_powerSGD_iter=2, min_compression_rate=0.5)
        classic.register_comm_hook(power, commhooks.powerSGD_hook)
        for _ in range(3):
            classic(torch.randn(4, 12)).square().mean().backward()
        self.pickled = [*self.hooks, power, commhooks.PostLocalSGDState(None, None, 4)]

    def _trained(self, name: str, options: dict[str, Any]) -> commhooks.HookState:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(nn.Linear(12, 9))
        self._keep = [*getattr(self, "_keep", []), self.model]
        hook = commhooks.register(self.model, name, **options)
        for _ in range(3):
            self.model(torch.randn(4, 12)).square().mean().backward()
        return hook


def state(target: Target, rng: random.Random) -> None:
    """A changed state is refused and changes nothing, or is taken up and can be saved again."""
    hook = rng.choice(target.hooks)
    before = hook.state_dict()
    given: Any = changed(before, rng)
    if rng.random() < 0.6 and isinstance(given, dict):
        _seal(given)
    if rng.random() < 0.1:
        given = rng.choice(([given], [given, before], (before, given), [given] * 3))
    _load(hook, given, before, strict=rng.random() < 0.7)


def _seal(given: dict[Any, Any]) -> None:
    for field, part in given.items():
        with contextlib.suppress(Exception):
            values = [value for names in part["memory"].values() for value in names.values()]
            if field.startswith("rank") and all(value.numel() < 10**6 for value in values):
                part["checksum"] = checksum(given, part)


def _load(hook: Any, given: Any, before: Any, **options: Any) -> None:
    refused = ""
    try:
        hook.load_state_dict(given, **options)
    except CheckpointError as error:
        refused = str(error)
    assert len(refused) < 2000, "a message of a page"
    if refused:
        assert _same(hook.state_dict(), before), "refused, but something has changed"
        return
    after = hook.state_dict()
    again = hook.state_dict()
    assert _same(after, again)
    hook.load_state_dict(before)
    assert _same(hook.state_dict(), before)


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        if (left.dtype, left.shape) != (right.dtype, right.shape):
            return False
        # By bytes: a NaN may be on its way to all ranks, who know what to do then.
        return torch.equal(*(value.reshape(-1).view(torch.uint8) for value in (left, right)))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(_same, left, right))
    return bool(left == right)


def torch_file(target: Target, rng: random.Random) -> None:
    """Refuses what torch.load makes of a damaged file, or loads what was saved."""
    hook = rng.choice(target.hooks)
    before = hook.state_dict()
    loaded = _read(lambda data: torch.load(io.BytesIO(data)), _saved(before), rng)
    if loaded is not None:
        _load(hook, loaded, before)


def torch_pickle(target: Target, rng: random.Random) -> None:
    """A pickled hook state loads, or raises torch's error or CheckpointError."""
    hook = rng.choice(target.hooks)
    loaded = _read(lambda data: torch.load(io.BytesIO(data)), _saved(hook), rng)
    if isinstance(loaded, commhooks.HookState):
        repr(loaded)


def pickled_form(target: Target, rng: random.Random) -> None:
    """Refuses what a pickle hands to ``__setstate__``, or makes a state as good as any other."""
    before = rng.choice(target.pickled)
    form = before.__getstate__()
    given = changed(form, rng)
    if "memory" in form and rng.random() < 0.7:
        with contextlib.suppress(Exception):
            given = sealed_pickle(given)
    after = type(before).__new__(type(before))
    refused = ""
    try:
        after.__setstate__(given)
    except CheckpointError as error:
        refused = str(error)
    assert len(refused) < 2000, "a message of a page"
    if refused:
        return
    again = after.__getstate__()
    if isinstance(after, commhooks.HookState):
        assert not any(
            isinstance(value, (Written, commhooks.wrappers.Traced)) for value in walk(after.scheme)
        )
        memory = [value for values in again["memory"].values() for value in values.values()]
        assert all(bool(value.float().isfinite().all()) for value in memory)
        assert again["ranks"] is None or 0 <= again["ranks"][0] < again["ranks"][1] < 2**31
    else:
        assert type(again["iter"]) is int
        assert again["iter"] >= 0


def plan(target: Target, rng: random.Random) -> None:
    """A changed plan in a state is refused and changes nothing, or is followed as it says."""
    before = target.calls.state_dict()
    text = changed_json(json.loads(before["plan"]), rng)
    given = {**copy.deepcopy(before), "plan": text}
    _seal(given)
    _load(target.calls, given, before, strict=rng.random() < 0.7)
    with contextlib.suppress(CheckpointError):
        steps, _, first = tensors_of(text)
        described = json.loads(text)
        assert steps == {name: value[0] for name, value in described.get("tensors", {}).items()}
        assert all(type(step) is int and step >= 0 for step in (*steps.values(), first or 0))
    with contextlib.suppress(CheckpointError):
        assert isinstance(plan_of_auto(changed_json({"name": "x"}, rng)), dict)


def prediction(target: Target, rng: random.Random) -> None:
    """A changed file of a fabric or of a step ends with a message, or with a finite prediction."""
    link = commhooks.predict.Link(1e-5, 1e9)
    fabric = commhooks.predict.Fabric("mine", link, inside=link, ranks_per_node=2)
    layers = [commhooks.predict.Layer(f"{element}.weight", (64, 9), 1e6) for element in "ab"]
    step = commhooks.predict.Workload.of("mine", layers, forward_s=0.01)
    files = {"fabric": asdict(fabric), "timeline": asdict(step)}
    lies = rng.choice(list(files))
    for name, value in files.items():
        text = (
            changed_json(json.loads(json.dumps(value)), rng) if name == lies else json.dumps(value)
        )
        (target.folder / name).write_text(text, encoding="utf-8", errors="surrogatepass")
    words = [rng.choice(("simulate", "advise")), "--ranks", "8", "--schemes", "bf16,int8"]
    for name in files:
        words += [f"--{name}", str(target.folder / name)]
    result = CliRunner().invoke(app, words)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code in (0, 2)
    assert not set(result.output) & {"\x1b", "\x07"}
    assert result.exit_code or "inf" not in result.output.split()


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def safetensors_file(target: Target, rng: random.Random) -> None:
    """Refuses what safetensors makes of a damaged file, or loads what was saved."""
    hook = rng.choice(target.hooks)
    before = hook.state_dict()
    tensors, metadata = commhooks.checkpoint.flatten_state(before)
    data = save_safetensors(tensors, metadata)

    def read(given: bytes) -> Any:
        # As safe_open does, which takes files only.
        (size,) = struct.unpack_from("<Q", given)
        header = json.loads(given[8 : 8 + size]) if size < len(given) else {}
        return load_safetensors(given), header.get("__metadata__")

    loaded = _read(read, data, rng)
    if loaded is None:
        return
    try:
        given = commhooks.checkpoint.unflatten_state(*loaded)
    except CheckpointError:
        return
    _load(hook, given, before)


def flat(target: Target, rng: random.Random) -> None:
    """Changed flat forms are refused or make a state."""
    hook = rng.choice(target.hooks)
    before = hook.state_dict()
    tensors, metadata = commhooks.checkpoint.flatten_state(before)
    metadata["commhooks"] = damaged(metadata["commhooks"].encode(), rng).decode("utf8", "replace")
    tensors = changed(tensors, rng) if rng.random() < 0.5 else tensors
    try:
        given = commhooks.checkpoint.unflatten_state(tensors, metadata)
    except CheckpointError:
        return
    _load(hook, given, before)
    with contextlib.suppress(CheckpointError):
        commhooks.checkpoint.flatten_state(given)


def diloco(target: Target, rng: random.Random) -> None:
    """A changed state of an outer optimizer is refused and changes nothing, or is taken up."""
    before = target.outer.state_dict()
    given = changed(before, rng)
    if rng.random() < 0.6:
        with contextlib.suppress(Exception):
            tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
            if all(tensor.numel() < 10**6 for tensor in tensors):
                given = add_outer_checksum(given)
                _seal(given["hook"])
    _load(target.outer, given, before)


_OURS = {"commhooks", "ddp_core"}


def _read(load: Callable[[bytes], Any], data: bytes, rng: random.Random) -> Any:
    """Returns what a library makes of damaged bytes; None if it, or CheckpointError, refuses."""
    given, ours = damaged(data, rng), []
    try:
        return load(given)
    except CheckpointError:
        return None
    except Exception as error:  # a library's own, unless it comes out of this package
        # By the module: torch lies in the tree as well, whose folder may have any name.
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        names = [str(frame.f_globals.get("__name__")) for frame in frames]
        ours = [f"{error!r} in {name}" for name in names if name.partition(".")[0] in _OURS]
    assert not ours, ours[-1]
    return None


def command_line(target: Target, rng: random.Random) -> None:
    """Hostile arguments end with a message and an exit code, never with a traceback."""
    words = [
        rng.choice(_WORDS) if rng.random() < 0.5 else _word(rng) for _ in range(rng.randrange(4))
    ]
    if [word for word in words if word != "--"] in ([], ["doctor"], ["schemes"]):  # right, and slow
        return
    # A folder of its own: `new nope` leaves a file, for which `check nope.py` rightly takes time.
    with tempfile.TemporaryDirectory(dir=target.folder) as folder, contextlib.chdir(folder):
        result = CliRunner().invoke(app, words)
    assert result.exception is None or isinstance(result.exception, SystemExit), (
        f"{words!r}: {result.exception!r}"
    )
    assert result.exit_code in (0, 1, 2)


def _word(rng: random.Random) -> str:
    if rng.random() < 0.1:
        paths = (".py", "nope.py", "../nope.py", "/", "~", "--out=/")
        return rng.choice(("x" * 5000, "-" * 50, *paths))
    return "".join(rng.choice(_ALPHABET) for _ in range(rng.choice((0, 1, 3, 12))))


KINDS: dict[str, Callable[[Target, random.Random], None]] = {
    "state": state,
    "torch file": torch_file,
    "pickled hook": torch_pickle,
    "pickled form": pickled_form,
    "plan": plan,
    "prediction": prediction,
    "safetensors file": safetensors_file,
    "flat form": flat,
    "diloco": diloco,
    "command line": command_line,
}
