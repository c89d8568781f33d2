"""The slow-line study: shares, the cells that stand for others, intervals; frames with losses."""

from __future__ import annotations

import random
import struct

import pandas as pd
import pytest
import torch

import commhooks
from commhooks.predict import DEVICES, PRESETS, Device, Layer, Workload
from experiments.slow_line.cells import Cell, Line, dense_share, predicted_share, share, source
from experiments.slow_line.quality import gaps
from experiments.tools.delay import without_lost
from experiments.tools.intervals import interval
from experiments.tools.local_steps import LocalStep, predict_local

ETHERNET, IP, TCP, MSS = 14, 20, 20, 100
FREE = Device("free", float("inf"), 0.0, float("nan"))
# 100 MB of parameters, a step of 90 ms.
MODEL = Workload.of("model", [Layer(f"w{i}", (500, 5000), 1.0) for i in range(10)], forward_s=0.03)


def local(device: Device = FREE, every: int = 10, delay: int = 0) -> LocalStep:
    return predict_local(
        commhooks.make("none"),
        MODEL,
        every=every,
        ranks=2,
        fabric=PRESETS["1gbe"],
        device=device,
        delay=delay,
    )


def test_local_steps_divide_the_exchange_by_their_number() -> None:
    step = local()
    # Two ranks exchange 100 MB at 0.94 of 125 MB/s.
    assert step.exchange_s == pytest.approx(100e6 / 117.5e6, rel=0.01)
    assert step.step_s == pytest.approx(0.09 + step.exchange_s / 10)
    assert step.utilisation == pytest.approx(0.09 / step.step_s)


def test_with_a_delay_only_what_is_before_the_first_message_is_exposed() -> None:
    class Counts(Device):
        """Takes 1 s before a message, 1 ms beside it, 3 s after it; the outer optimizer 10 s."""

        def parts(self, scheme, shapes, ranks):  # type: ignore[no-untyped-def]
            return (1.0, 1e-3, 3.0)

        def seconds(self, work):  # type: ignore[no-untyped-def]
            return 10.0

    device = Counts("counts", 1.0, 0.0, float("nan"))
    waits = {delay: local(device, 50, delay).exposed_s for delay in (0, 20, 49)}
    wire = local(every=50).exposed_s
    assert waits[0] == pytest.approx(10 + 1 + 3 + wire)
    assert waits[20] == pytest.approx(10 + 1 + 3 + wire - 20 * 0.09)
    assert waits[49] == pytest.approx(10 + 1)


def test_the_outer_optimizer_takes_what_its_memory_takes() -> None:
    device = Device("some", 1e9, 1e-6, float("nan"))
    # A distance and a step with momentum: 64 bytes for each of 25 M entries, and 6 calls for each
    # of 10 parameters. `none` computes an average besides.
    shapes = tuple(torch.Size(layer.shape) for layer in MODEL.layers)
    mean = sum(device.parts(commhooks.make("none"), shapes, 2))
    more = local(device).exposed_s - local().exposed_s
    assert more == pytest.approx(64 * 25e6 / 1e9 + 60e-6 + mean)


def test_share_is_the_sleeps_over_the_whole_time() -> None:
    assert share(8, 3, 0.8, 0.025) == pytest.approx(0.75)
    with pytest.raises(ValueError, match="above 0"):
        share(8, 3, 0.0)


def test_only_blocking_exchanges_stand_for_other_periods() -> None:
    assert source(Cell("blocking", "int4", 128)) == Cell("blocking", "int4", 32)
    assert source(Cell("overlapped", "int4", 128)) == Cell("overlapped", "int4", 128)


def test_slow_motion_changes_only_what_the_processor_takes() -> None:
    cell, free = Cell("overlapped", "int4", 8), DEVICES["h200"]
    near, slow = (predicted_share(Line(200, dilation=value), cell, free) for value in (1.0, 4.0))
    assert near == pytest.approx(slow, rel=0.02)


def test_published_shares_are_those_of_dense_cells_on_the_same_line() -> None:
    assert dense_share(Line(1000), Cell("blocking", "none", 8)) == pytest.approx(0.12, abs=0.01)
    assert dense_share(Line(1000), Cell("blocking", "int4", 8)) is None
    assert dense_share(Line(1000, 30.0), Cell("blocking", "none", 8)) is None


def test_interval_is_students() -> None:
    mean, half = interval([1.0, 2.0, 3.0])
    assert (mean, half) == (2.0, pytest.approx(4.303 / 3**0.5, rel=1e-4))


def test_gaps_compare_runs_of_one_seed() -> None:
    rows = [("ddp", "bf16", 1, 0, 1.0), ("ddp", "bf16", 1, 1, 3.0)]
    rows += [("overlapped", "int4", 8, 1, 3.2), ("overlapped", "int4", 8, 0, 1.2)]
    table = pd.DataFrame(rows, columns=["plan", "codec", "every", "seed", "loss"])
    *_, row = gaps(table)
    assert row["gap"] == pytest.approx(0.2)
    assert row["gap_half_width"] == pytest.approx(0.0, abs=1e-9)


def test_a_lost_packet_leaves_the_segments_around_it() -> None:
    payload = bytes(range(250)) * 4
    frame = _segment(payload)
    for seed in range(50):
        parts = without_lost(frame, 0.2, random.Random(seed))
        kept = {_sequence(part): part[10 + ETHERNET + IP + TCP :] for part in parts}
        for begin, data in kept.items():
            assert payload[begin : begin + len(data)] == data
        lost = len(payload) - sum(map(len, kept.values()))
        assert lost % MSS == 0
        for part in parts if lost else ():  # the whole segment goes on as it is
            assert _sum(part[10 + ETHERNET : 10 + ETHERNET + IP]) == 0xFFFF
            (length,) = struct.unpack_from("!H", part, 10 + ETHERNET + 2)
            assert length == len(part) - 10 - ETHERNET


def test_packets_get_lost_at_the_given_rate() -> None:
    frame, draw = _segment(bytes(1000)), random.Random(0)
    left = sum(len(p) - 10 - 54 for _ in range(5000) for p in without_lost(frame, 0.01, draw))
    # 50,000 packets: a standard deviation of 0.00045.
    assert 1 - left / 5e6 == pytest.approx(0.01, abs=0.002)


def _segment(payload: bytes) -> bytes:
    """Returns a TCP segment of several packets, with a header of offloads before it."""
    length = IP + TCP + len(payload)
    ip = struct.pack("!BBHHHBBHII", 0x45, 0, length, 1, 0, 64, 6, 0, 1, 2)
    tcp = struct.pack("!HHIIBBHHH", 1, 2, 0, 0, 0x50, 0x18, 100, 0, 0)
    start = ETHERNET + IP
    return (
        struct.pack("=BBHHHH", 1, 1, start + TCP, MSS, start, 16) + bytes(14) + ip + tcp + payload
    )


def _sequence(frame: bytes) -> int:
    (number,) = struct.unpack_from("!I", frame, 10 + ETHERNET + IP + 4)
    return int(number)


def _sum(data: bytes) -> int:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total
