"""The study of quality: real ranks, interrupted runs, verdicts, rehearsals."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import typer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.predict._quality import gap_of
from experiments.quality import __main__ as command
from experiments.quality.page import HOME, pages_with, table_of_task
from experiments.quality.pool import Planned, append, missing, planned, read, run_all
from experiments.quality.run import FEEDBACK, Errors, Trainer, schedule, trained
from experiments.quality.setups import BASELINE, NEGATIVE, NULL, POSITIVE, SETUPS, Arm, Setup, small
from experiments.quality.verdicts import (
    FIGURES,
    LOOKS,
    gap,
    predictors,
    sentence,
    summary,
    verdict,
    wanted,
)
from experiments.tools.processes import run_ranks

STEPS = 12
NO_RUNS = read(Path("none.csv"))


def _arm(setup: Setup, name: str) -> Arm:
    return next(arm for arm in setup.arms if arm.name == name)


def _flat(model: nn.Module) -> list[float]:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


# ---- simulated and real ranks


def _real(rank: int, world_size: int, send: Callable[[Any], None], names: list[str]) -> None:
    for name in names:
        setup = SETUPS[name]
        entry = _arm(setup, "int8").entry
        task = setup.task(world_size, batch_size=4, seed=3)
        torch.manual_seed(3)
        # Buckets are rebuilt in another order where DistributedDataParallel knows that all
        # parameters are used; the names of random draws would be those of other parameters.
        model = DistributedDataParallel(
            task.model(), bucket_cap_mb=100, find_unused_parameters=True
        )
        commhooks.register(model, entry.scheme, seed=3, **entry.options_with(None))
        optimizer = task.optimizer(model)
        rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, STEPS))
        for step in range(STEPS):
            optimizer.zero_grad()
            x, target = task.batch(rank, step)
            task.loss(model(x), target).backward()
            optimizer.step()
            rates.step()
        if rank == 0:
            send((name, _flat(model.module), task.evaluate(model.module)))


@pytest.mark.slow
@pytest.mark.distributed
def test_simulated_ranks_train_as_real_ones_bit_for_bit() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in each process: sums are split by threads
    try:
        for name, parameters, judged in run_ranks(_real, 2, ["characters", "digits", "lstm"]):
            setup = SETUPS[name]
            task = setup.task(2, batch_size=4, seed=3)
            trainer = Trainer(task, _arm(setup, "int8"), ranks=2, seed=3, steps=STEPS)
            for _ in range(STEPS):
                trainer.update(trainer.exchange(trainer.gradients()))
            assert _flat(trainer.model) == parameters, name
            assert trainer.evaluate() == judged
    finally:
        torch.set_num_threads(threads)


# ---- runs


@pytest.mark.parametrize(
    "name",
    [
        # The import of scikit-learn takes longer than all other tasks.
        pytest.param(name, marks=pytest.mark.slow if name == "digits" else ())
        for name in SETUPS
        if name not in ("minilm", "gpu")
    ],
)
def test_every_task_is_rehearsed(name: str) -> None:
    setup = small(SETUPS[name])
    row = trained(setup, _arm(setup, "int4"), 1)
    assert math.isfinite(row["loss"])
    assert 0 < row["step_error"] <= row["step_worst"]
    assert row["seed"] == 101
    again = trained(setup, _arm(setup, "int4"), 1)
    assert [again[name] for name in ("loss", *FIGURES)] == [
        row[name] for name in ("loss", *FIGURES)
    ]


@pytest.mark.parametrize(
    ("setup", "arm"),
    [
        # The import of scikit-learn takes longer than all runs.
        pytest.param(setup, arm, id=arm.name, marks=pytest.mark.slow if setup.ranks == 2 else ())
        for setup in map(small, (SETUPS["characters"], SETUPS["first try"]))
        for arm in setup.arms
    ],
)
def test_every_arm_is_rehearsed(setup: Setup, arm: Arm) -> None:
    row = trained(setup, arm, 0)
    assert (row["step_error"] > 0) == (arm.name != "none")
    assert row["ranks"] == (arm.ranks or setup.ranks)
    assert math.isfinite(row["sum_adam"])


def test_what_is_sent_without_loss_has_no_error() -> None:
    setup = small(SETUPS["characters"])
    row = trained(setup, _arm(setup, "none"), 0)
    assert max(row[name] for name in FIGURES) < 1e-12


@pytest.mark.parametrize(
    ("name", "same"), [("int8", True), ("powersgd, rank 4", False), ("sdp4bit", False)]
)
def test_the_error_of_a_step_leaves_out_feedback_alone(name: str, same: bool) -> None:
    setup = SETUPS["characters"].rehearsal
    arm = _arm(SETUPS["characters"], name)
    trainer = Trainer(setup(2, batch_size=2), arm, ranks=2, seed=0, steps=20)
    errors = Errors(trainer)
    for _ in range(15):  # beyond the uncompressed steps
        grads = trainer.gradients()
        alone, mean = errors.without_feedback(grads), trainer.exchange(grads)
        trainer.update(mean)
    assert torch.equal(alone, mean) == same
    kept = {key for key, _, _ in trainer.simulation.engines[0].memory.items()}
    assert bool(kept & set(FEEDBACK)) != same


def test_a_run_that_diverges_ends_without_a_loss() -> None:
    setup = small(SETUPS["digits"])
    wild = replace(setup, task=_wild, steps=40)
    row = trained(wild, BASELINE, 0)
    assert math.isnan(row["loss"])


def _wild(ranks: int, **options: Any) -> Any:
    return replace(SETUPS["digits"].task(ranks, **options), lr=1e30)


# ---- a study that goes on


def _row(arm: str, run: int, **changes: Any) -> dict[str, Any]:
    row = {"task": "characters", "arm": arm, "run": run, "steps": 200, "loss": 2.0, "misses": 0.5}
    return {**row, **dict.fromkeys(FIGURES, 0.1), "seconds": 1.0, "cpu_seconds": 1.0, **changes}


def test_each_beginning_of_the_runs_is_balanced() -> None:
    runs = planned(SETUPS["characters"], NO_RUNS)
    arms = len(SETUPS["characters"].arms)
    assert {run.number for run in runs[:arms]} == {0}
    assert len({run.arm.name for run in runs[:arms]}) == arms
    assert sum(run.arm.name == "int8" for run in runs) == 330
    assert sum(run.arm.name == "int8, 2 ranks" for run in runs) == 20


def test_what_is_there_is_not_run_again(tmp_path: Path) -> None:
    runs, path = planned(SETUPS["characters"], NO_RUNS, 2), tmp_path / "runs.csv"
    append(path, _row("bf16", 0))
    append(path, _row("int4", 1))
    left = missing(runs, read(path), 200)
    assert len(left) == len(runs) - 2
    assert not {("bf16", 0), ("int4", 1)} & {(run.arm.name, run.number) for run in left}
    with pytest.raises(ValueError, match="this plan has 100: a rehearsal"):
        missing(runs, read(path), 100)


def test_half_a_row_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    append(path, _row("bf16", 0))
    append(path, _row("int4", 0))
    path.write_bytes(path.read_bytes()[:-20])
    assert read(path).arm.tolist() == ["bf16"]
    append(path, _row("int4", 0))
    assert read(path).arm.tolist() == ["bf16", "int4"]
    path.write_bytes(b"task,arm")  # half a header
    assert read(path).empty
    append(path, _row("int4", 0))
    assert read(path).arm.tolist() == ["int4"]


def test_a_run_that_is_there_twice_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    append(path, _row("bf16", 3))
    append(path, _row("bf16", 3, seconds=2.0))
    with pytest.raises(ValueError, match=r"runs.csv has runs twice \(3 of bf16\)"):
        read(path)


def test_a_file_with_other_columns_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    append(path, _row("bf16", 0))
    with pytest.raises(ValueError, match="has the columns"):
        append(path, _row("bf16", 1, more=1))
    assert len(read(path)) == 1


def test_no_run_starts_after_the_time_is_over() -> None:
    runs = [Planned(BASELINE, 0)]
    setup = small(SETUPS["digits"])
    soon = time.monotonic() + 60
    assert not list(run_all(setup, runs, jobs=1, device="cpu", until=time.monotonic()))
    assert not list(run_all(setup, runs, jobs=1, device="cpu", until=soon, longest=61.0))


@pytest.mark.slow
@pytest.mark.distributed
def test_the_command_goes_on_where_it_stopped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(**options: Any) -> pd.DataFrame:
        command.main(task="digits", arms="int4", rehearse=True, out=tmp_path, **options)
        return read(tmp_path / "runs_digits.csv")

    first = run(seeds=1, jobs=1)
    assert "2 of 2 runs" in capfd.readouterr().out
    both = run(seeds=2, jobs=2)
    assert "4 of 4 runs" in capfd.readouterr().out
    pd.testing.assert_frame_equal(both[:2], first)
    assert sorted(zip(both.arm, both.run, strict=True)) == [
        ("bf16", 0), ("bf16", 1), ("int4", 0), ("int4", 1),
    ]  # fmt: skip
    assert both["commit"].notna().all()
    assert (tmp_path / "forest.png").stat().st_size > 10_000


def test_what_arms_are_compared_with_is_run_and_other_tasks_are_not() -> None:
    setups = command._chosen("characters,digits", "int4, clipped")
    assert [[arm.name for arm in setup.arms] for setup in setups] == [
        ["bf16, clipped", "int4, clipped"]
    ]


@pytest.mark.parametrize("runs", [{"bf16": 5}, {"bf16": 5, "int8": 4}, {"bf16": 4, "int8": 4}])
def test_too_few_pairs_are_no_error(
    runs: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arm, count in runs.items():
        for run in range(count):
            append(tmp_path / "runs_characters.csv", _row(arm, run))
    command.main(report=True, out=tmp_path)
    enough = max(runs.values()) == 5
    assert ("has 5 pairs of runs yet" in capsys.readouterr().out) == (not enough)
    assert not (tmp_path / "forest.png").exists()


def test_the_terminal_shows_percent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run in range(5):
        append(tmp_path / "runs_characters.csv", _row("bf16", run))
        append(tmp_path / "runs_characters.csv", _row("int8", run, loss=2.02))
    command.main(report=True, out=tmp_path)
    line = capsys.readouterr().out.partition("int8")[2].partition("\n")[0]
    assert line.split()[:6] == ["5", "330", "0", "2.020", "1.000", "1.000"]
    assert "refuted so far" in line


def test_runs_of_a_rehearsal_are_not_taken_for_those_of_the_study(tmp_path: Path) -> None:
    append(tmp_path / "runs_digits.csv", _row("bf16", 0, steps=4))
    with pytest.raises(typer.BadParameter, match=r"runs_digits.csv: it has runs of \[4\] steps"):
        command.main(task="digits", out=tmp_path)


def test_unknown_tasks_and_arms_are_named() -> None:
    with pytest.raises(typer.BadParameter, match="'cats' is not one of"):
        command.main(task="cats")
    with pytest.raises(typer.BadParameter, match="'int5' is not one of"):
        command.main(arms="int5")


# ---- verdicts


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (-0.0019, 0.0019, "proved within 0.2 %"),
        (-0.0021, 0.0019, "proved within 0.5 %"),
        (-0.001, 0.0049, "proved within 0.5 %"),
        (-0.001, 0.0051, "not proved"),
        (0.0049, 0.02, "not proved"),
        (0.0051, 0.02, "refuted"),
        (-0.02, -0.0051, "better"),
        (-0.02, 0.02, "not proved"),
        (math.nan, math.nan, "not proved"),
    ],
)
def test_a_verdict_depends_on_the_interval_alone(low: float, high: float, words: str) -> None:
    assert verdict(low, high) == words


def _made_up(gaps: dict[str, float], noise: float, seeds: int = 30) -> pd.DataFrame:
    """Makes up runs: of one seed all have the same loss, but for the gap and noise."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for run in range(seeds):
        common = 2.0 + 0.1 * float(torch.randn(1, generator=generator))
        for arm, share in {"bf16": 0.0, **gaps}.items():
            loss = common + 2 * share + 2 * noise * float(torch.randn(1, generator=generator))
            rows.append(_row(arm, run, loss=loss, **dict.fromkeys(FIGURES, abs(share))))
    return pd.DataFrame(rows)


def _table(gaps: dict[str, float], noise: float) -> pd.DataFrame:
    table: pd.DataFrame = summary(SETUPS["characters"], _made_up(gaps, noise)).set_index("arm")
    return table


def test_made_up_runs_are_judged_by_their_gaps() -> None:
    gaps = {"int8": 0.0, "fp8": 0.0035, "int4": 0.005, "topk 1 %": 0.02, "sdp4bit": -0.02}
    assert _table(gaps, noise=0.001).verdict.to_dict() == {
        "bf16": "",
        "int8": "proved within 0.2 %",
        "fp8": "proved within 0.5 %",
        "int4": "not proved",
        "topk 1 %": "refuted",
        "sdp4bit": "better",
    }
    assert _table({"int8": 0.0}, noise=0.02).verdict["int8"] == "not proved"


def test_an_arm_ends_after_a_look_at_which_its_verdict_is_sure() -> None:
    setup, (first, second) = SETUPS["characters"], LOOKS
    gaps = {"int8": 0.0, "fp8": 0.0035, "int4": 0.0052, "topk 1 %": 0.02, "sdp4bit": -0.02}
    needed = wanted(setup, _made_up(gaps, noise=0.001))
    assert {name: needed[name] for name in ("bf16", *gaps)} == {
        "bf16": 330, "int8": first, "fp8": 100, "int4": 330, "topk 1 %": first, "sdp4bit": 100,
    }  # fmt: skip
    assert wanted(setup, _made_up(gaps, noise=0.001, seeds=first - 1))["int8"] == 330
    assert wanted(setup, _made_up(gaps, noise=0.002, seeds=second))["int8"] == second
    runs = planned(setup, _made_up(gaps, noise=0.001))
    assert sum(run.arm.name == "int8" for run in runs) == first


def test_an_interval_is_that_of_the_paired_differences() -> None:
    losses = {"bf16": [2.0, 3.0, 4.0], "int8": [2.02, 3.03, 4.01]}
    rows = [
        _row(arm, run, loss=loss) for arm, many in losses.items() for run, loss in enumerate(many)
    ]
    row = summary(SETUPS["characters"], pd.DataFrame(rows), 2).set_index("arm").loc["int8"]
    # Differences 0.02, 0.03, 0.01: mean 0.02, deviation 0.01; t is 4.3027 with 2 degrees.
    half = 4.3027 * 0.01 / math.sqrt(3)
    assert row.gap == pytest.approx(0.02 / 3)
    assert row.low == pytest.approx((0.02 - half) / 3, rel=1e-4)
    assert row.high == pytest.approx((0.02 + half) / 3, rel=1e-4)


def test_a_look_is_at_its_own_runs() -> None:
    base = [2.0] * 30 + [6.0] * 70
    rows = [_row("bf16", run, loss=loss) for run, loss in enumerate(base)]
    rows += [_row("int8", run, loss=loss + 0.014) for run, loss in enumerate(base)]
    assert wanted(SETUPS["characters"], pd.DataFrame(rows))["int8"] == 30  # refuted: 0.7 %


def test_an_arm_that_ended_is_marked_and_its_base_is_not() -> None:
    setup = replace(SETUPS["characters"], arms=SETUPS["characters"].arms[:2])
    page = table_of_task(setup, summary(setup, _made_up({"int8": 0.0}, noise=1e-5)))
    assert "| bf16 | 30 |" in page
    assert "| int8 | 30, ended |" in page


def test_runs_are_paired_by_their_number() -> None:
    rows = [_row("bf16", run, loss=2.0 + run) for run in range(6)]
    rows += [_row("int8", run, loss=2.01 + run) for run in (5, 4, 2, 1, 0)]
    row = summary(SETUPS["characters"], pd.DataFrame(rows)).iloc[1]
    assert row.gap == pytest.approx(0.01 / (2 + 12 / 5))
    assert row.high == pytest.approx(row.gap)


def test_intervals_cover_the_true_gap_in_19_of_20_studies() -> None:
    generator = torch.Generator().manual_seed(1)
    covered = 0
    for _ in range(2000):
        noise, common = torch.randn(2, 8, generator=generator, dtype=torch.float64)
        base = 2 + 0.05 * common  # of a seed both runs have the same
        _, low, high = gap((base + 0.02 + 0.01 * noise).tolist(), base.tolist(), float(base.mean()))
        covered += low < 0.01 < high
    # 1900 are expected, with a standard deviation of 9.7.
    assert 1870 <= covered <= 1930


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_diverged_run_counts_as_a_guess(loss: float) -> None:
    rows = [_row("bf16", run) for run in range(30)]
    rows += [_row("int8", run, loss=loss if run == 7 else 2.0) for run in range(30)]
    row = summary(SETUPS["characters"], pd.DataFrame(rows)).iloc[1]
    assert row.diverged == 1
    page = table_of_task(SETUPS["characters"], summary(SETUPS["characters"], pd.DataFrame(rows)))
    assert "| 30 of 330, 1 diverged |" in page
    assert row.outcome == pytest.approx((29 * 2.0 + math.log(128)) / 30, abs=1e-3)
    assert row.verdict == "not proved"


def test_margins_of_an_accuracy_are_shares_of_it() -> None:
    rows = [_row("bf16", run, misses=0.2) for run in range(10)]
    rows += [_row("int8", run, misses=0.2 + 0.8 * 0.003) for run in range(10)]
    row = summary(SETUPS["minilm"], pd.DataFrame(rows)).iloc[1]
    assert row.gap == pytest.approx(0.003)
    assert row.verdict == "proved within 0.5 %"


def test_equal_counts_prove_no_more_than_their_items_resolve() -> None:
    rows = [_row(arm, run, misses=164 / 347) for arm in ("bf16", "int8") for run in range(10)]
    table = summary(SETUPS["minilm"], pd.DataFrame(rows))
    assert tuple(table.iloc[0][["gap", "low", "high"]]) == (0, 0, 0)  # the base with itself
    row = table.iloc[1]
    # One item more in one of ten runs: deviation 1 / 347 / sqrt(10); t is 2.2622.
    half = 2.2622 / 347 / 10 / (1 - 164 / 347)
    assert (row.gap, row.low, row.high) == pytest.approx((0, -half, half), rel=1e-4)
    few = replace(SETUPS["first try"], seeds=100, items=3)
    rows = [_row(arm, run, misses=1 / 3) for arm in ("bf16", "int8") for run in range(30)]
    assert wanted(few, pd.DataFrame(rows))["int8"] == 100


@pytest.mark.parametrize("name", ["minilm", "first try"])
def test_counts_of_committed_runs_are_of_the_held_out_items(name: str) -> None:
    setup = SETUPS[name]
    path = HOME / command.OUT / f"runs_{name.replace(' ', '_')}.csv"
    counts = setup.items * read(path).misses
    assert math.gcd(*counts.round().astype(int)) == 1  # not a multiple of the items
    assert (counts - counts.round()).abs().max() < 1e-3


def test_other_seeds_are_no_pairs() -> None:
    assert trained(small(SETUPS["digits"]), NULL, 2)["seed"] == 1_000_002


def test_every_task_has_a_place_on_the_page_and_four_runs_no_interval() -> None:
    rows = [_row("bf16", run) for run in range(5)] + [_row("int8", run) for run in range(4)]
    runs = pd.DataFrame(rows)
    tables = {name: summary(setup, runs) for name, setup in SETUPS.items()}
    assert all(list(table.arm) == ["bf16"] for table in tables.values())
    assert not any("nan" in text for text in pages_with(tables).values())


def test_a_verdict_of_fewer_runs_than_planned_is_provisional() -> None:
    setup, gaps = SETUPS["characters"], {"int8": 0.0, "topk 1 %": 0.02}
    early, late = (summary(setup, _made_up(gaps, 0.0003, seeds=seeds)) for seeds in (8, 330))
    results = HOME / "docs/results/quality/README.md", HOME / "docs/schemes/index.md"
    for path in results:
        text = pages_with({"characters": early})[path]
        assert "proved within 0.2 % so far" in text
        assert "refuted so far" in text
        assert "8 of " in text
        text = pages_with({"characters": late})[path]
        assert "so far |" not in text
        assert "so far (" not in text


def test_pages_and_package_have_what_the_runs_say() -> None:
    for path, text in pages_with(command.judged(HOME / command.OUT)).items():
        assert path.read_text() == text, "write it: python -m experiments.quality --report"


def test_the_controls_show_that_the_study_can_tell_a_loss_from_none() -> None:
    table = command.judged(HOME / command.OUT)["characters"]
    assert table[table.role == POSITIVE].verdict.tolist() == ["refuted"] * 2
    assert table[table.role == NEGATIVE].verdict.tolist() == ["not proved"]


def test_the_package_knows_the_gap_of_a_scheme_whatever_its_first_steps_are() -> None:
    gap = gap_of(commhooks.make("powersgd", rank=4))
    assert gap == gap_of(commhooks.make("powersgd", start_step=50))
    assert gap is not None
    assert not gap.is_proved
    assert gap_of(commhooks.make("int8", block=512)) is None
    gap = gap._replace(low=-0.4, high=0.4, runs=30, planned=30)
    assert gap.is_proved
    assert not gap._replace(low=-0.6).is_proved
    assert not gap._replace(runs=29).is_proved
    assert gap._replace(runs=29).counted == "29 of 30 runs"
    assert str(gap._replace(low=-0.04, high=12.3)) == "-0.04 to +12 %"
    assert str(gap._replace(low=9.7, high=9.96)) == "+9.7 to +10 %"
    assert str(gap._replace(low=-0.004, high=0.003)) == "0.00 to 0.00 %"


def test_the_figure_that_orders_gaps_predicts_them() -> None:
    gaps = {"int8": 0.0, "fp8": 0.003, "int4": 0.006, "topk 1 %": 0.02}
    table = _table(gaps, noise=1e-6).reset_index()
    setup = SETUPS["characters"]
    assert predictors(setup, table)["sum_adam"] == pytest.approx(1)
    assert sentence(predictors(setup, table)).startswith("`step_error` predicts the gap")
    table["step_error"] = [0.0, 0.3, 0.1, 0.4, 0.2]
    assert sentence(predictors(setup, table)).startswith("`sum_error` predicts the gap")
    assert not predictors(setup, table[:3])
