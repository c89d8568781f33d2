"""The slow-line study: shares, the cells that stand for others, intervals; frames with losses."""

from __future__ import annotations

import random
import struct

import pandas as pd
import pytest

from commhooks.predict import DEVICES
from experiments.delay import without_lost
from experiments.slow_line.cells import Cell, Line, dense_share, predicted_share, share, source
from experiments.slow_line.quality import gaps, interval

ETHERNET, IP, TCP, MSS = 14, 20, 20, 100


def test_share_is_the_sleeps_over_the_whole_time() -> None:
    assert share(8, 3, 0.8, 0.025) == pytest.approx(0.75)
    with pytest.raises(ValueError, match="above 0"):
        share(8, 3, 0.0)


def test_only_blocking_exchanges_stand_for_other_periods() -> None:
    assert source(Cell("blocking", "int4", 128)) == Cell("blocking", "int4", 32)
    assert source(Cell("overlapped", "int4", 128)) == Cell("overlapped", "int4", 128)


def test_slow_motion_changes_only_what_the_processor_takes() -> None:
    cell, free = Cell("overlapped", "int4", 8), DEVICES["h200"]
    near, slow = (predicted_share(Line(200, dilation=one), cell, free) for one in (1.0, 4.0))
    assert near == pytest.approx(slow, rel=0.02)


def test_published_shares_are_those_of_dense_cells_on_the_same_line() -> None:
    assert dense_share(Line(1000), Cell("blocking", "none", 8)) == pytest.approx(0.12, abs=0.01)
    assert dense_share(Line(1000), Cell("blocking", "int4", 8)) is None
    assert dense_share(Line(1000, 30.0), Cell("blocking", "none", 8)) is None


def test_interval_is_students() -> None:
    mean, half = interval([1.0, 2.0, 3.0])
    assert (mean, half) == (2.0, pytest.approx(4.303 / 3**0.5))


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
