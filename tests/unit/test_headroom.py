"""Verdicts of ``commhooks headroom`` on planted times, and their words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commhooks.cli import _headroom as command
from commhooks.predict import _headroom_agent as agent
from commhooks.predict._headroom import Headroom
from commhooks.predict._headroom_steps import (
    BLOCK,
    VARIANTS,
    WARM_UP,
    BucketTransfer,
    Facts,
    _by_turn,
    _schedule,
    most_counted,
    steps_needed,
)
from tests.tools.command_line import run_cli

FACTS = Facts(2, "gloo", "cpu", 4_000_000, 1, 6)
ONE_BUCKET = (BucketTransfer(ready_s=0.0, dense_s=0.1, fixed_s=0.0),)


def planted(
    dense: float, bf16: float, single: float, noop: float,
    *, differ: float = 0.0, travel: Sequence[BucketTransfer] = ONE_BUCKET,
) -> Headroom:  # fmt: skip
    """Six turns; dense and bf16 are longer and shorter by ``differ`` from turn to turn."""
    turns = []
    for sign in (-1, 1) * 3:
        times = dense + sign * differ, bf16 + sign * differ, single, noop
        turns.append({kind: [s] * 5 for kind, s in zip(VARIANTS, times, strict=True)})
    return Headroom.of(turns, FACTS, travel)


def words(headroom: Headroom) -> str:
    return " ".join(str(headroom).split())


def test_the_gaps_are_those_of_the_medians() -> None:
    headroom = planted(0.2, 0.15, 0.11, 0.1)
    assert headroom.exposed.seconds == pytest.approx(0.1)
    assert headroom.savable_over_dense.seconds == pytest.approx(0.09)
    assert headroom.savable_over_bf16.seconds == pytest.approx(0.04)
    gaps = headroom.exposed, headroom.savable_over_dense, headroom.savable_over_bf16
    assert [gap.noise_s for gap in gaps] == [0.0] * 3


def test_noise_is_twice_the_standard_error_of_the_median_turn() -> None:
    # Gaps of 0.09 -+ 0.01: the median of their distances from the median is 0.01.
    noise = 2 * 1.25 * 1.4826 * 0.01 / 6**0.5
    savable = planted(0.2, 0.15, 0.11, 0.1, differ=0.01).savable_over_dense
    assert savable.noise_s == pytest.approx(noise)


def test_one_turn_of_steps_that_differ_is_not_without_noise() -> None:
    turn = {kind: [0.1, 0.2, 0.3, 0.4, 0.5] for kind in VARIANTS}
    # The median distance from the median, 0.1, of two times five steps.
    noise = 2 * 1.25 * 1.4826 * 0.1 * (2 / 5) ** 0.5
    headroom = Headroom.of([turn], FACTS, ONE_BUCKET)
    assert headroom.exposed.noise_s == pytest.approx(noise)
    assert headroom.verdict == "unclear"


def test_no_compression_where_backward_hides_the_communication() -> None:
    headroom = planted(0.1, 0.1, 0.099, 0.099)
    assert headroom.verdict == "hidden"
    assert "Do not compress. Backward hides the communication" in words(headroom)
    assert "no compression can save more than 1.00 ms, 1 % of a step" in words(headroom)
    assert "register" not in words(headroom)


def test_no_compression_where_what_is_exposed_is_latency() -> None:
    headroom = planted(0.2, 0.2, 0.199, 0.1)
    assert headroom.verdict == "latency"
    exposed = "Exposed communication (not overlapped with backward): 100.00 ± 0.00 ms (95 %), 50 %"
    assert exposed in words(headroom)
    assert "Do not compress" in words(headroom)
    assert "latency" in words(headroom)


def test_bf16_and_no_more_where_it_saves_what_can_be_saved() -> None:
    headroom = planted(0.2, 0.121, 0.12, 0.1)
    assert headroom.verdict == "bf16"
    assert "Use bf16, and do not compress more" in words(headroom)
    assert 'commhooks.register(ddp_model, "bf16")' in words(headroom)


def test_compression_pays_where_links_are_slow() -> None:
    headroom = planted(0.2, 0.16, 0.1, 0.1)
    assert headroom.verdict == "compress"
    text = words(headroom)
    assert "Compression may be worth it. A ratio of 10 saves nine tenths" in text
    # 5 ms of 100: 0.1 + 0.1 / ratio + 0.005 is below 0.2 from 1.053 on, below 0.16 from 1.82 on.
    assert (
        "add 5.00 ms (5 % of the noop step) breaks even with no compression from a ratio of 1.06"
        in text
    )
    assert "with bf16 from a ratio of 1.85 on" in text
    assert "to be faster than bf16, computations may add" in text


def test_compression_is_doubted_where_bf16_saved_nothing() -> None:
    text = words(planted(0.0526, 0.0530, 0.0343, 0.03))
    assert "But bf16, a ratio of 2, saved nothing (-0.40 ± 0.00 ms, 95 %)" in text
    assert "But bf16" not in words(planted(0.2, 0.16, 0.1, 0.1))


def test_a_log_says_now_and_then_which_round_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = agent._Script({"steps": 10, "deadline": 0, "out": None, "status": tmp_path / "s"})
    clock = SimpleNamespace(monotonic=lambda: 100.0 + seconds)
    monkeypatch.setattr(agent, "time", clock)
    for step in range(60):  # each takes 2 s
        seconds = 2.0 * step
        turns: Any = SimpleNamespace(
            warms_up=step < 10, step=step, turns=max(step - 10, 0) // 24, turns_to_come=0
        )
        turns.turns_to_come, turns.steps_to_come = 2 - turns.turns, 58 - step
        script.report_progress(turns)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == [
        "commhooks headroom: 2 rounds, 59 steps in all",
        "commhooks headroom: round 1 of 2, about 86 s to go",
    ]
    assert lines[-1] == "commhooks headroom: round 2 of 2, about 6 s to go"
    assert len(lines) == 10


def test_no_line_of_an_answer_is_longer_than_a_terminal() -> None:
    slow = planted(1.234, 0.987, 0.952, 0.901, differ=0.4)
    assert slow.verdict == "unclear"
    assert max(map(len, str(slow).splitlines())) <= 80


def test_noise_is_no_reason_to_say_do_not_compress() -> None:
    headroom = planted(0.2, 0.15, 0.19, 0.1, differ=0.08)
    assert headroom.verdict == "unclear"
    assert "No answer" in words(headroom)
    assert "Measured savings: 10.00 ± 121.05 ms (95 %), 5 % of a step" in words(headroom)
    assert "Do not compress" not in words(headroom)
    assert "until then use no compression" in words(headroom)


def test_steps_that_send_less_and_take_longer_are_no_answer() -> None:
    headroom = planted(0.2, 0.21, 0.25, 0.24)
    assert headroom.verdict == "unclear"
    assert "Do not compress" not in words(headroom)
    assert "The most that compression can save: nothing (-50.00 ± 0.00 ms" in words(headroom)
    assert planted(0.2, 0.2, 0.201, 0.2).verdict == "hidden"  # as small as what is not told


def test_noise_beside_bf16_is_no_reason_to_say_do_not_compress_more() -> None:
    headroom = planted(0.5, 0.2, 0.19, 0.1, differ=0.08)
    assert headroom.verdict == "bf16"
    text = words(headroom)
    assert "Use bf16: it saves 300.00 ±" in text
    assert "beside it is within the noise: 10.00 ± 121.05 ms (95 %), 5 % of a step. Mea" in text
    assert max(map(len, str(headroom).splitlines())) <= 80


def test_bf16_is_the_answer_if_it_surely_saves_and_one_value_is_noisy() -> None:
    turns = [
        {"none": [6.6] * 5, "bf16": [0.4] * 5, "one": [single] * 5, "noop": [0.3] * 5}
        for single in (0.3, 14.0, 0.3, 14.0, 6.5, 6.5)
    ]
    headroom = Headroom.of(turns, FACTS, ONE_BUCKET)
    assert not headroom.savable_over_dense.is_large(headroom.dense)
    assert headroom.verdict == "bf16"


def test_a_ratio_shortens_what_goes_with_the_bytes() -> None:
    headroom = planted(0.2, 0.15, 0.1, 0.1)
    assert [headroom.step_s(ratio) for ratio in (1, 2, 10)] == pytest.approx([0.2, 0.15, 0.11])


def test_a_bucket_that_backward_hides_costs_nothing() -> None:
    # The first bucket keeps the links from 50 ms before the last one begins until 50 ms after it.
    # At a ratio of 2 it is through when the last one begins, which then takes 20 ms of 90.
    travel = [BucketTransfer(-0.05, 0.1, 0.0), BucketTransfer(0.0, 0.04, 0.0)]
    headroom = planted(0.2, 0.15, 0.11, 0.1, travel=travel)
    assert headroom.step_s(1) == pytest.approx(0.2)
    assert headroom.step_s(2) == pytest.approx(0.11 + 0.09 * 20 / 90)


def test_latency_stays_at_every_ratio() -> None:
    headroom = planted(0.2, 0.17, 0.14, 0.1, travel=[BucketTransfer(0.0, 0.1, 0.04)])
    assert headroom.step_s(2) == pytest.approx(0.17)
    assert headroom.step_s(1e9) == pytest.approx(0.14)


@pytest.mark.parametrize(
    ("cost", "over", "ratio"),
    [(0.0, "none", 1.0), (0.05, "none", 2.0), (0.075, "none", 4.0), (0.025, "bf16", 4.0)],
)
def test_a_scheme_breaks_even_at_the_ratio_that_pays_its_computations(
    cost: float, over: str, ratio: float
) -> None:
    # 0.1 + 0.1 / ratio + cost is below 0.2, or 0.15. Ratios are looked for in steps of 2 %.
    headroom = planted(0.2, 0.15, 0.1, 0.1).break_even(cost, over=over)
    assert headroom is not None
    assert ratio < headroom <= 1.021 * ratio


def test_computations_that_take_what_can_be_saved_break_even_nowhere() -> None:
    headroom = planted(0.2, 0.15, 0.1, 0.1)
    assert headroom.break_even(0.1) is None
    assert headroom.break_even(0.05, over="bf16") is None


def test_buckets_in_any_order_give_one_answer() -> None:
    buckets = ((-0.05, 0.1, 0.0), (0.0, 0.04, 0.01), (-0.02, 0.02, 0.0))
    travel = [BucketTransfer(*bucket) for bucket in buckets]
    headroom = [planted(0.2, 0.15, 0.11, 0.1, travel=some) for some in (travel, travel[::-1])]
    assert headroom[0] == headroom[1]


def test_the_file_has_the_numbers_and_the_verdict(tmp_path: Path) -> None:
    planted(0.2, 0.16, 0.1, 0.1).save(tmp_path / "out.json")
    state = json.loads((tmp_path / "out.json").read_text())
    assert state["verdict"] == "compress"
    assert state["savable_over_dense"]["seconds"] == pytest.approx(0.1)
    assert state["step_s_by_ratio"]["4"] == pytest.approx(0.125)
    assert state["facts"]["world_size"] == 2


def test_the_schedule_of_steps_is_the_one_by_which_they_are_sorted() -> None:
    schedule: Any = _schedule(2)
    begins = [begin for begin, _ in schedule.parts]
    steps = list(range(WARM_UP + 2 * len(VARIANTS) * BLOCK))
    by_turn = _by_turn([float(step) for step in steps], 2)
    blocks = [WARM_UP + BLOCK * block for block in range(2 * len(VARIANTS))]
    assert begins == [0, *blocks, len(steps)]
    for block, begin in enumerate(begins[1:-1]):
        kept = by_turn[block // len(VARIANTS)][VARIANTS[block % len(VARIANTS)]]
        assert kept == steps[begin + 1 : begin + BLOCK]  # the first waits for the slowest rank


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "never built a DistributedDataParallel"),
        ({"ddp": True}, "before a forward pass through it in training"),
        ({"needed": 130, "ended": 20}, "after 20 steps, before the 130 steps"),
        ({"seen": False}, "no Python that it started has looked at PYTHONPATH"),
        ({"needed": 130, "rewrapped": 20}, "another DistributedDataParallel after 20 steps"),
        ({"needed": 130}, "before the 130 steps that the measurement needs"),
        ({"too_slow": 12}, "the time limit of 600 s came after 12 steps"),
        ({"alone": True}, "one rank, which exchanges no gradients"),
        ({"own_hook": "powerSGD_hook"}, "a communication hook of its own, powerSGD_hook"),
        ({"fsdp": True}, 'On FSDP2, commhooks.register(model, "auto") times'),
        ({"failed": "of a rank"}, "of a rank"),
    ],
)
def test_each_reason_for_no_answer_has_words(state: dict[str, Any], message: str) -> None:
    assert message in command._reason(state, 0, False, 600.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "/", "--", "true"], "is a folder"),
        (["--out", "/none/x.json", "--", "true"], "there is no folder"),
        (["--", "a\0b"], "cannot run 'a\\x00b'"),
        (["--", "/none/x"], "cannot run /none/x"),
    ],
)
def test_a_wrong_command_is_a_sentence(arguments: list[str], message: str) -> None:
    assert message in run_cli("headroom", *arguments, code=2)


def test_a_system_without_process_groups_is_reported_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr("os.killpg")
    out = tmp_path / "out.json"
    assert "POSIX" in run_cli("headroom", "--out", out, "--", "nothing", code=2)
    assert not out.exists()


def test_a_short_script_gets_the_command_that_measures_it() -> None:
    again = ["--", "torchrun", "a b.py"]
    reason = command._reason({"needed": 155, "ended": 154}, 0, False, 600.0, again)
    assert (
        "Or, for a less exact answer: commhooks headroom --steps 25 -- torchrun 'a b.py'" in reason
    )
    reason = command._reason({"needed": 155, "ended": 58}, 0, False, 600.0)
    assert reason.endswith("At least 59 steps are needed, with --steps 10.")


def test_the_command_that_is_printed_has_the_options_of_the_one_that_ran(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def runs(words: list[str], environment: dict[str, str], limit: float) -> tuple[int, bool]:
        status = json.loads(environment[command.ORDER])["status"]
        Path(status).write_text(json.dumps({"needed": 155, "ended": 154}))
        return 0, False

    monkeypatch.setattr(command, "_run", runs)
    out = tmp_path / "out.json"
    options = ["--time-limit", "900", "--out", out]
    output = run_cli("headroom", *options, "--", "train", code=1, columns=400)
    assert f"commhooks headroom --steps 25 --time-limit 900 --out {out} -- train" in output


def test_the_steps_that_are_asked_for_are_those_that_are_needed() -> None:
    for steps in (59, 83, 155):
        assert steps_needed(most_counted(steps)) == steps
        assert most_counted(steps - 1) == most_counted(steps) - (BLOCK - 1)


def test_a_script_that_failed_is_not_asked_to_train_longer() -> None:
    state = {"needed": 130, "ended": 20}
    assert "Train longer" in command._reason(state, 0, False, 600.0)
    assert "Train longer" not in command._reason(state, 1, False, 600.0)
    assert "ended with exit code 1 after 20 steps" in command._reason(state, 1, False, 600.0)
