"""Byte counts, times, and what of them was exposed."""

import pickle
import re
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch

from commhooks import ErrorFeedback, HookState, Simulation, make
from commhooks.hook import Ledger
from commhooks.hook._ledger import COLUMNS
from commhooks.schemes import PowerSGD
from ddp_core import AllReduce, RoundRecord, Task, simulate


def row(step: int, bucket: int = 0, round_: int = 0, **times: Any) -> RoundRecord:
    dense = 100 if round_ == 0 else 0
    return RoundRecord(step, bucket, round_, "all_reduce", dense, 40, 60.0, **times)


def test_totals_are_sums_over_all_rows() -> None:
    ledger = Ledger()
    for step in range(3):
        for round_ in range(2):
            ledger.add(row(step, 0, round_, dense_wire_bytes=50.0))
        ledger.record_last_launch(step, 0.0)
    assert (ledger.dense_bytes, ledger.payload_bytes, ledger.wire_bytes) == (300, 240, 360.0)
    assert ledger.dense_wire_bytes == 300.0
    assert ledger.steps == 3


def test_history_bounds_the_rows_and_not_the_totals() -> None:
    ledger = Ledger(history=4)
    for step in range(10):
        ledger.add(row(step))
        ledger.record_last_launch(step, 0.0)
    assert list(ledger.report()["step"]) == [6, 7, 8, 9]
    assert ledger.dense_bytes == 1000
    assert min(ledger._backward_end) >= 6


def test_steps_that_are_taken_back_leave_no_rows() -> None:
    ledger = Ledger()
    for step in (0, 1, 2, 1, 2):
        if ledger.steps == 3:
            ledger.rewind(1)
        ledger.add(row(step))
        ledger.record_last_launch(step, 0.0)
    assert list(ledger.report()["step"]) == [0, 1, 2]
    assert ledger.dense_bytes == 500
    assert list(ledger._backward_end) == [0, 1, 2]


def test_a_report_without_rows_has_all_columns() -> None:
    assert list(Ledger().report().columns) == list(COLUMNS)
    assert Ledger().last_step() == {}
    assert (
        HookState("int8")
        .summary()
        .startswith("int8 on 1 rank: nothing has been exchanged: there is no other rank")
    )


def test_a_report_is_in_order_of_step_bucket_and_round() -> None:
    ledger = Ledger()
    for place in [(1, 0, 0), (0, 1, 1), (0, 1, 0), (0, 0, 0)]:
        ledger.add(row(*place))
    order = ledger.report()[["step", "bucket", "round"]].to_numpy().tolist()
    assert order == [[0, 0, 0], [0, 1, 0], [0, 1, 1], [1, 0, 0]]


def test_encode_wire_and_decode_are_what_lies_between() -> None:
    ledger = Ledger()
    ledger.add(row(0, resumed=1.0, yielded=1.5, issued=2.0, done=4.0, finished=4.25))
    (line,) = ledger.report().to_dict("records")
    assert (line["encode_s"], line["wire_s"], line["decode_s"]) == (0.5, 2.0, 0.25)


def test_only_waiting_after_the_last_launch_is_exposed_and_counted_once() -> None:
    ledger = Ledger()
    ledger.add(row(0, 0, resumed=0.0, done=3.0, finished=3.0))  # hidden by backward until 2
    ledger.add(row(0, 1, resumed=1.0, done=4.0, finished=4.5))  # overlaps with the first until 3
    ledger.add(row(0, 2, resumed=0.0, done=1.0, finished=1.0))  # hidden
    ledger.record_last_launch(0, 2.0)
    exposed = ledger.report().set_index("bucket")["exposed_s"]
    assert exposed.to_dict() == {0: 1.0, 1: 1.5, 2: 0.0}
    assert ledger.last_step()["exposed_s"] == 2.5


def test_a_step_whose_last_bucket_is_not_launched_exposes_nothing() -> None:
    ledger = Ledger()
    ledger.add(row(0, resumed=0.0, done=3.0, finished=3.0))
    assert ledger.report()["exposed_s"].tolist() == [0.0]


@pytest.mark.parametrize("world_size", [1, 4])
def test_a_task_records_every_collective_once(world_size: int) -> None:
    def exchange():
        total = yield AllReduce(torch.ones(8), "sum")
        return (yield AllReduce(total[:4]))

    ledger = Ledger()
    place = {"step": 3, "bucket": 1, "dense_bytes": 32, "world_size": world_size}
    task = Task(exchange(), **place, max_rounds=2, record=ledger.add)

    def driven():
        request = task.advance()
        while request is not None:
            yield request
            request = task.advance()
        return task.outcome()

    simulate([driven()])
    frame = ledger.report()
    assert frame["dense_bytes"].tolist() == [32, 0]
    assert frame["payload_bytes"].tolist() == [32, 16]
    factor = 2 * (world_size - 1) / world_size
    assert frame["wire_bytes"].tolist() == [32 * factor, 16 * factor]
    assert frame["dense_wire_bytes"].tolist() == [32 * factor, 0]
    assert frame["step"].tolist() == [3, 3]


def test_scalars_of_the_latest_step_are_written_for_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    hook = HookState("none")
    hook.ledger.add(row(0, 0))
    hook.ledger.add(row(0, 1))
    with SummaryWriter(tmp_path) as writer:
        hook.add_scalars(writer, prefix="comm")
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.value for event in events.Scalars("comm/wire_bytes")] == [120.0]
    names = {*COLUMNS[4:], "memory_bytes", "skipped_steps"}
    assert {f"comm/{name}" for name in names} == set(events.Tags()["scalars"])


def test_the_latest_step_is_summed_without_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger()
    for step in range(3):
        for bucket in range(2):
            times = {"resumed": 1.0, "yielded": 1.5, "issued": 2.0, "done": 4.0, "finished": 4.25}
            ledger.add(row(step, bucket, **times))
        ledger.record_last_launch(step, 3.0)
    frame = ledger.report()
    expected = frame[frame["step"] == 2][list(COLUMNS[4:])].sum().to_dict()
    tables: list[object] = []
    looked_at: list[RoundRecord] = []
    exposed = ledger._exposed
    monkeypatch.setattr(pandas, "DataFrame", lambda *_, **__: tables.append(None))
    monkeypatch.setattr(ledger, "_exposed", lambda rows: looked_at.extend(rows) or exposed(rows))
    assert ledger.last_step() == pytest.approx(expected)
    assert (len(tables), len(looked_at)) == (0, 2)
    ledger.summary("int8", 2)
    assert tables == []


@pytest.mark.parametrize("history", [0, -1, 2.5, True, "all"])
def test_a_history_is_a_number_of_rows(history: object) -> None:
    with pytest.raises(ValueError, match="history"):
        HookState("none", history=history)  # type: ignore[arg-type]
    assert HookState("none", history=7).ledger._rows.maxlen == 7


# By the formulas of the collectives, in two phases where a scheme has them. A block of 256 int8
# carries a scale of 4 bytes, 1/3.94; topk gathers 8 bytes for 1 % of the entries from 3 others.
SAID = {
    ("none", 4): "as much",
    ("bf16", 4): "half (1/2)",
    ("int8", 4): "a quarter (1/3.9",
    ("onebit", 4): "1/3",
    ("topk", 4): "1/25",
}


@pytest.mark.parametrize(("name", "world_size"), SAID)
def test_a_summary_compares_what_travels_with_a_dense_all_reduce(
    name: str, world_size: int
) -> None:
    numel = 1 << 18
    ranks = Simulation(make(name), {"weight": (numel,)}, world_size=world_size)
    ranks.step([torch.randn(numel) for _ in range(world_size)])
    ledger, dense = Ledger(), 4 * numel * 2 * (world_size - 1) / world_size
    for round_, sent in enumerate(ranks.wire_bytes):
        ledger.add(RoundRecord(0, 0, round_, "", 0, 0, sent, dense_wire_bytes=dense * (not round_)))
    text = ledger.summary(name, world_size)
    assert text.startswith(f"{name} on {world_size} ranks, step 0: ")
    sentence = f"an uncompressed all-reduce sends {dense / 1e6:.3g} MB: {SAID[name, world_size]}"
    assert sentence in text


def test_a_summary_says_what_backward_did_not_hide() -> None:
    ledger = Ledger()
    for step in (0, 2):
        begin = 100.0 * step
        ledger.add(row(step, 0, resumed=begin, done=begin + 3, finished=begin + 3))
        ledger.add(row(step, 1, resumed=begin + 1, done=begin + 4, finished=begin + 4.5))
        ledger.record_last_launch(step, begin + 2)
    text = ledger.summary("x", 2)
    assert "2 of steps 0 to 2" in text
    assert "Of 4.5 s of communication per step, 2.5 s are exposed" in text
    with pytest.raises(ValueError, match="steps"):
        ledger.summary("x", 2, 0)


def test_a_summary_is_of_the_scheme_that_runs() -> None:
    ledger = Ledger()
    for step in range(3):
        ledger.add(row(step, 0, resumed=0.0, done=1.0, finished=1.0))
    assert "steps 0 to 2" in ledger.summary("x", 2)
    assert "steps 1 to 2" in ledger.summary("x", 2, since=1)
    assert "nothing has been exchanged yet" in ledger.summary("x", 2, since=3)


def test_a_hook_is_printed_in_a_few_words() -> None:
    assert str(HookState("none")) == str(HookState("allreduce")) == "HookState(none, step=0)"
    assert str(HookState("int8")) == "HookState(int8, step=0)"
    assert str(HookState("dgc")) == "HookState(dgc, step=0)"
    assert str(HookState("powersgd", rank=3, start_step=9)) == (
        "HookState(powersgd, rank=3, start_step=9, step=0)"
    )
    assert str(HookState(ErrorFeedback(PowerSGD()))) == "HookState(powersgd, step=0)"


def test_a_summary_is_a_string_in_a_terminal_and_a_table_in_a_notebook() -> None:
    ledger = Ledger()
    for step in (0, 1):
        begin = 2.0 * step
        times = {"resumed": begin, "done": begin + 1, "finished": begin + 1}
        ledger.add(row(step, 0, **times, dense_wire_bytes=120.0))
    summary = ledger.summary("PowerSGD(<rank>)", 2)
    assert isinstance(summary, str)
    assert str(summary).startswith("PowerSGD(<rank>) on 2 ranks, steps 0 to 1: ")
    cells = re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", summary._repr_html_())
    shown = dict(zip(cells[::2], cells[1::2], strict=True))
    assert shown["scheme"] == "PowerSGD(&lt;rank&gt;) on 2 ranks"
    assert shown["steps"] == "0 to 1"
    assert shown["communication per step"] == "1 s"
    for name in ("sent per step and rank", "uncompressed all-reduce sends", "share"):
        assert shown[name] in summary
    assert shown["share"] == "half (1/2)"
    assert pickle.loads(pickle.dumps(summary))._repr_html_() == summary._repr_html_()


def test_a_notebook_shows_words_where_nothing_was_exchanged() -> None:
    summary = HookState("int8").summary()
    assert summary._repr_html_() == f"<p>{summary}</p>"


def test_what_a_host_waits_for_is_exposed_as_a_whole() -> None:
    ledger = Ledger()
    for bucket in range(2):
        begin = 10.0 * bucket
        times = {"resumed": begin, "yielded": begin + 1, "done": begin + 3, "finished": begin + 4}
        ledger.add(row(0, bucket, **times, waited_for=True))
    ledger.record_last_launch(0, 20.0)
    assert ledger.report()["exposed_s"].tolist() == [4.0, 4.0]
    assert "8 s are exposed" in ledger.summary("int8", 2)
