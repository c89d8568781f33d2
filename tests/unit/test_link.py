"""``link``: a fabric is found again from the times that it gives, and travels in a file."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

import commhooks
from commhooks.predict import Fabric, Link, fabric, load_fabric, save_fabric
from commhooks.predict.link import measure_link
from commhooks.predict.link_fit import COLLECTIVES, Layout, Time, fitted, modelled

SIZES = tuple(2**power for power in range(10, 25, 2))


def times_of(layout: Layout, true: Fabric, parts: tuple[str, ...], noise: float) -> list[Time]:
    """Returns what would be measured, with some noise and one time that is far off."""
    draw = random.Random(1)
    times = []
    for part in parts:
        for collective in COLLECTIVES:
            for nbytes in SIZES:
                one = Time(part, collective, nbytes, 0.0, 0.0, 0.0)  # type: ignore[arg-type]
                seconds = modelled(layout, one, true) * draw.lognormvariate(0, noise)
                times.append(one._replace(seconds=seconds))
    odd = times[len(times) // 2]
    times[len(times) // 2] = odd._replace(seconds=10 * odd.seconds)
    return times


def near(found: Link, true: Link, share: float) -> None:
    assert found.latency == pytest.approx(true.latency, rel=share)
    assert found.bandwidth == pytest.approx(true.bandwidth, rel=share)


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("link", [Link(60e-6, 1.2e8), Link(30e-3, 6e6), Link(3e-6, 4e11)])
def test_the_link_between_single_ranks_is_found(link: Link, noise: float) -> None:
    layout = Layout(4, 1)
    found = fitted(
        layout, times_of(layout, Fabric("true", link, library="gloo"), ("between",), noise), "gloo"
    )
    assert found.inside is None
    near(found.between, link, 0.05 if noise == 0 else 0.15)


def test_the_links_of_nodes_are_found_inside_and_between() -> None:
    layout = Layout(16, 4)
    true = Fabric("true", between=Link(20e-6, 1e10), inside=Link(4e-6, 1e11), ranks_per_node=4)
    found = fitted(layout, times_of(layout, true, ("inside", "between", "all"), 0.0), "nccl")
    assert found.inside is not None
    assert found.ranks_per_node == 4
    near(found.inside, Link(4e-6, 1e11), 0.1)
    near(found.between, Link(20e-6, 1e10), 0.1)


def test_one_node_has_its_link_everywhere() -> None:
    layout = Layout(8, 8)
    true = Fabric("true", Link(1.0, 1.0), inside=Link(5e-6, 2e10), ranks_per_node=8)
    found = fitted(layout, times_of(layout, true, ("inside",), 0.0), "nccl")
    assert found.inside is not None
    near(found.inside, Link(5e-6, 2e10), 0.05)
    assert found.between == found.inside


def test_a_fabric_is_the_same_after_a_file(tmp_path: Path) -> None:
    file = tmp_path / "link.json"
    for name in ("10gbe", "dgx-h100"):
        one = replace(fabric(name), core_s_per_byte=5e-10)
        save_fabric(one, file)
        assert load_fabric(file) == one
        assert fabric(file) == one
        assert fabric(str(file)) == one


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"name": "x"}', '{"between": [1]}', "\x00"])
def test_another_file_is_no_fabric(text: str, tmp_path: Path) -> None:
    file = tmp_path / "link.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="not a fabric's file"):
        load_fabric(file)


def test_links_are_measured_between_ranks() -> None:
    assert not dist.is_initialized()
    with pytest.raises(commhooks.Error, match="no process group"):
        measure_link()
