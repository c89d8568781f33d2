"""Studies begin, and the names of the packages that they replace or look into exist."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
import typer
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from typer.testing import CliRunner

import commhooks
import experiments
from experiments.gpu_kernels import copy_ratio, exchange
from experiments.gpu_kernels.dry_run import rehearsed
from experiments.gpu_launches import __main__ as gpu_launches
from experiments.sharded import memory, speed
from experiments.slow_line.cells import Cell
from experiments.slow_line.ranks import _LocalRun
from experiments.step_cost import hooks, hosts, reducer, schemes, verify
from experiments.tools.fake_gpu import counts_of
from experiments.tools.processes import Send, named, run_ranks, worker_named

FOLDER = Path(experiments.__file__).parent
MODULES = [
    module.name
    for module in pkgutil.walk_packages([str(FOLDER)], "experiments.")
    if ".test_" not in module.name
]
STUDIES = [name.split(".")[1] for name in MODULES if name.endswith(".__main__")]
WIDTH = 32  # of models


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# ---- all of them


def test_every_module_is_imported() -> None:
    for name in MODULES:
        import_module(name)


def test_every_study_says_what_its_options_are() -> None:
    assert len(STUDIES) > 15
    for name in STUDIES:
        module = import_module(f"experiments.{name}.__main__")
        app = getattr(module, "app", None)
        if app is None:
            app = typer.Typer()
            app.command()(module.main)
        parts = [
            [part.name] for part in app.registered_commands if len(app.registered_commands) > 1
        ]
        for part in ([], *parts):
            ran = CliRunner().invoke(app, [*part, "--help"])
            assert ran.exit_code == 0, f"{name} {part}: {ran.output}"


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_has_a_short_page_with_its_command_and_its_result(name: str) -> None:
    text = (FOLDER / name / "README.md").read_text()
    assert f"python -m experiments.{name}" in text
    assert "](../../docs/results/" in text
    assert len(text.splitlines()) <= 16


def test_a_worker_is_found_by_its_name() -> None:
    assert worker_named(named(hooks.compare)) is hooks.compare


# ---- names that studies replace


def test_host_time_is_measured_without_a_gpu() -> None:
    ranks = SimpleNamespace(size=lambda: 8)
    assert gpu_launches.host_times("int8", {}, 8, 1)[0] > 0
    assert gpu_launches.torch_host_times(default_hooks.allreduce_hook, ranks, 1)[0] > 0


def test_launches_are_counted_without_a_gpu() -> None:
    assert counts_of(commhooks.make("int8"), [(64, 64)], world_size=8).launches > 0


@pytest.mark.parametrize("part", [pytest.param(copy_ratio, marks=pytest.mark.slow), exchange])
def test_a_step_of_a_part_is_rehearsed(part: Any, tmp_path: Path) -> None:
    with rehearsed() as small:
        assert next(part.steps(small(tmp_path))).run()


# ---- names that studies look into


class _Nothing:
    """Stands for the counter of allocations, which is loaded before the C library."""

    def begin(self) -> int:
        return 0

    live = most = peak = begin


def _on_two_ranks(rank: int, world_size: int, send: Send) -> None:
    with mock.patch.object(memory, "_Counter", _Nothing):
        memory._run_rank(rank, world_size, send, "int8", WIDTH, 1)
    case = speed._Case("int4, feedback", speed.Settings(WIDTH, 1, 1))
    with mock.patch.object(speed, "sent_nbytes", return_value=0):
        case.step()
    if rank == 0:
        send(case.kept_nbytes())
    with mock.patch.dict(hosts.HOSTS, {"FSDP2": hosts.HOSTS["FSDP2"]}, clear=True):
        hosts.time_hosts(rank, world_size, send, 2)


@pytest.mark.slow
@pytest.mark.distributed
def test_fsdp2_is_watched_and_timed() -> None:
    results, kept, row = run_ranks(_on_two_ranks, 2)
    assert results["modules"]
    assert kept > 0
    assert row["host"] == "FSDP2"


def test_the_outer_optimizer_is_timed(group: None) -> None:
    run = _LocalRun(Cell("overlapped", "none", 2), compute_s=0.0)
    for _ in range(2):
        run.period()
    run.finish()
    assert run.outer_s > 0


# ---- parts whose workers run in one process


def test_turns_of_hooks(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "PAIRS", hooks.PAIRS[:1])
    sent: list[Any] = []
    hooks.compare(0, 1, sent.append, "tiny layers", 2, 1)
    assert sent[0]["turns"] == 2


def test_turns_of_schemes(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: schemes.SCHEMES[name] for name in (schemes.NOOP, schemes.BASE)}
    monkeypatch.setattr(schemes, "SCHEMES", few)
    sent: list[Any] = []
    schemes.measure(0, 1, sent.append, turns=2, block=1)
    assert [set(times) for times in sent] == [set(few)] * 2


def test_turns_with_verification(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "SCHEMES", {"int8": {}})
    sent: list[Any] = []
    verify.compare(0, 1, sent.append, "small CNN", 2)
    assert sent[0]["turns"] == 2


def test_turns_of_reducers(group: None) -> None:
    sent: list[Any] = []
    cases = ["torch, views", "ours, torch's buckets"]
    task = {"model": "tiny layers", "cases": cases, "rounds": 2, "block": 1}
    reducer.compare(0, 1, sent.append, **task)
    assert [set(times) for times in sent[0]["turns"]] == [set(cases)] * 2
