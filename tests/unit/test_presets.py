"""Presets of networks have a source, and collectives on them take the time of their formulas."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from commhooks.cli._simulate import preset_rows
from commhooks.predict import PRESETS, Fabric, Link
from commhooks.predict._collectives import collective_seconds, shared_seconds
from tests.tools.command_line import run_cli

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "simulate.md"


def test_the_table_of_the_guide_has_the_presets() -> None:
    table = GUIDE.read_text().partition("## Networks")[2].partition("\n## ")[0]
    rows = [
        tuple(cell.strip() for cell in row.strip("|").split("|"))
        for row in re.findall(r"^\|.*\|$", table, flags=re.MULTILINE)[2:]
    ]
    assert rows == [(f"`{name}`", *cells) for name, *cells in preset_rows()]


def test_rows_have_the_numbers_of_the_presets() -> None:
    rows = {name: cells for name, *cells in preset_rows()}
    assert list(rows) == list(PRESETS)
    assert rows["wan-4g"][:2] == ["15 ms, 0.47 GB/s", ""]
    assert rows["dgx-h100"][:2] == [
        "27.5 us, 406 GB/s, 3.2 us per chunk",
        "8 ranks, 3.4 us, 370 GB/s, switch 274 GB/s",
    ]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_says_where_its_numbers_are_from(name: str) -> None:
    assert PRESETS[name].name == name
    # A page, a program, a table of this project, or that nobody has said it.
    known = "assumed|docs/results|experiments|NCCL's source|nccl-tests|S72583|MG-WFBP|data sheet"
    assert re.search(known, PRESETS[name].source)


def test_simulate_prints_the_presets_without_a_model() -> None:
    output = run_cli("simulate", "--list-networks")
    listed = re.findall(r"^(\S+)  ", output, flags=re.MULTILINE)
    assert listed[1:] == list(PRESETS)


LATENCY, BANDWIDTH = 10e-6, 1e9
LINE = Fabric("line", Link(LATENCY, BANDWIDTH), library="gloo")
BOXES = Fabric("boxes", Link(LATENCY, 1e9), inside=Link(1e-6, 50e9), ranks_per_node=4)
COLLECTIVES = ("all_reduce", "all_gather", "all_to_all")


def seconds(collective: str, nbytes: float, ranks: int, fabric: Fabric, **options: object) -> float:
    return float(collective_seconds(collective, nbytes, ranks=ranks, fabric=fabric, **options))


def test_rings_and_pairs_take_their_formula() -> None:
    # Thakur et al., 2005: steps of the latency and the bytes of a step.
    assert seconds("all_reduce", 8e6, 8, LINE) == pytest.approx(14 * (LATENCY + 1e6 / BANDWIDTH))
    assert seconds("all_gather", 1e6, 8, LINE) == pytest.approx(7 * (LATENCY + 1e6 / BANDWIDTH))
    assert seconds("all_to_all", 8e6, 8, LINE) == pytest.approx(7 * (LATENCY + 1e6 / BANDWIDTH))


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("name", PRESETS)
def test_more_bytes_and_more_ranks_never_take_less(collective: str, name: str) -> None:
    sizes = np.geomspace(1e3, 1e10, 40)
    before = np.zeros_like(sizes)
    for ranks in (1, 2, 8, 16, 64, 1024, 16384):
        # Of the same bytes for each other rank, where more ranks mean smaller parts.
        nbytes = sizes * ranks if collective == "all_to_all" else sizes
        times = collective_seconds(collective, nbytes, ranks=ranks, fabric=PRESETS[name])
        assert (np.diff(times) >= 0).all()
        assert (times >= before * (1 - 1e-12)).all(), ranks
        before = times


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_an_array_of_sizes_gives_what_each_size_gives(collective: str) -> None:
    sizes = np.array([[1e3, 1e6], [1e8, 3e9]])
    times = collective_seconds(collective, sizes, ranks=16, fabric=BOXES)
    assert times.shape == (2, 2)
    for index, nbytes in np.ndenumerate(sizes):
        assert times[index] == seconds(collective, nbytes, 16, BOXES)


def test_mpi_sends_small_messages_by_recursive_doubling() -> None:
    mpi = replace(LINE, library="mpi")
    assert seconds("all_reduce", 8, 16, mpi) == pytest.approx(4 * LATENCY, rel=1e-2)
    assert seconds("all_reduce", 1e9, 16, mpi) == seconds("all_reduce", 1e9, 16, LINE)


def test_a_double_tree_sends_the_data_twice_where_a_ring_sends_them_one_and_a_half_times() -> None:
    # DDP over 1 Gbit/s on four machines, which NCCL reduces by its tree.
    tree = replace(LINE, library="nccl", tree_nbytes=1e12)
    ring = replace(tree, tree_nbytes=0.0)
    assert seconds("all_reduce", 1e9, 4, tree) == pytest.approx(2.0, rel=1e-3)
    assert seconds("all_reduce", 1e9, 4, ring) == pytest.approx(1.5, rel=1e-3)
    # Without a limit the faster one: few steps for small messages, few bytes for large ones.
    free = replace(tree, tree_nbytes=None)
    for nbytes in (1e3, 1e9):
        both = (seconds("all_reduce", nbytes, 64, fabric) for fabric in (tree, ring))
        assert seconds("all_reduce", nbytes, 64, free) == min(both)
    assert seconds("all_reduce", 10, 64, free) == pytest.approx(2 * 6 * LATENCY, rel=1e-2)


def test_chunks_cost_the_root_of_levels_and_bytes() -> None:
    tree = replace(LINE, library="nccl", tree_nbytes=1e12)
    slow = replace(tree, between=replace(tree.between, chunk_s=4e-6))
    more = seconds("all_reduce", 1e6, 16, slow) - seconds("all_reduce", 1e6, 16, tree)
    assert more == pytest.approx(2 * math.sqrt(2 * 4 * 4e-6 * 2e6 / BANDWIDTH))


def test_network_cards_of_a_node_carry_what_its_ranks_send() -> None:
    # A ring passes a node once. All four ranks of a node send to the twelve others at once.
    ring = replace(BOXES, library="gloo")
    assert seconds("all_reduce", 16e9, 16, ring) == pytest.approx(30.0, rel=1e-3)
    assert seconds("all_gather", 1e9, 16, ring) == pytest.approx(15.0, rel=1e-3)
    assert seconds("all_to_all", 16e9, 16, ring) == pytest.approx(4 * 12.0, rel=1e-3)


def test_groups_that_are_busy_at_once_share_a_nodes_network_cards() -> None:
    leaders = range(0, 16, 4)
    alone = seconds("all_reduce", 1e9, 16, BOXES, part=leaders, alone=True)
    assert alone == pytest.approx(1.5, rel=1e-3)
    assert seconds("all_reduce", 1e9, 16, BOXES, part=leaders) == pytest.approx(6.0, rel=1e-3)
    inside = seconds("all_reduce", 1e9, 16, BOXES, part=range(4))
    assert inside == pytest.approx(1.5e9 / 50e9, rel=1e-2)


def test_a_switch_that_sums_is_faster_than_a_ring_of_the_same_links() -> None:
    ring, switch = PRESETS["nvlink-a100"], PRESETS["nvlink-h100"]
    share = 2 * 7 / 8 * 2**30
    assert share / seconds("all_reduce", 2**30, 8, ring) == pytest.approx(232e9, rel=0.02)
    assert share / seconds("all_reduce", 2**30, 8, switch) == pytest.approx(480e9, rel=0.02)


def test_gloo_has_two_segments_of_an_all_reduce_under_way() -> None:
    # Measured with 20 ms of delay over 1 Gbit/s, two ranks: 8 MiB take 243 ms, of which the bytes
    # take 70 and two steps 81.
    far = replace(LINE, between=Link(0.0405, 119e6), overlap=1.0)
    assert seconds("all_reduce", 2**23, 2, far) == pytest.approx(0.243, rel=0.15)
    # A segment takes as long as the latency: nothing waits.
    near = replace(far, between=Link(2**20 / 119e6, 119e6))
    assert seconds("all_reduce", 2**23, 2, near) == seconds(
        "all_reduce", 2**23, 2, replace(near, overlap=0.0)
    )
    # Four segments of each of two parts: one wait per part, besides that for the first.
    more = seconds("all_reduce", 2**23, 2, far) - seconds(
        "all_reduce", 2**23, 2, replace(far, overlap=0.0)
    )
    assert more == pytest.approx(2 * (0.0405 - 2**20 / 119e6))


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_links_are_busy_but_for_the_latency_that_messages_share(collective: str) -> None:
    for inside in (LINE, replace(BOXES, library="gloo")):
        for overlap in (0.0, 0.5, 1.0):
            fabric = replace(inside, overlap=overlap)
            shared = shared_seconds(collective, [1e6, 2e6], ranks=8, fabric=fabric)
            latency = seconds(collective, 0, 8, fabric)
            assert shared == pytest.approx(overlap * latency)


def test_one_rank_waits_for_nobody() -> None:
    for collective in COLLECTIVES:
        assert seconds(collective, 1e9, 1, BOXES) == 0.0
        assert seconds(collective, 1e9, 8, BOXES, part=[3]) == 0.0
