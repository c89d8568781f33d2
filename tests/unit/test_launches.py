"""Kernel launches of schemes for a bucket on a GPU; nothing in them waits for it."""

from __future__ import annotations

import pytest

import commhooks
import commhooks.research.baselines
from commhooks.wrappers import AveragedFeedback
from experiments.tools.fake_gpu import counts_of, verified_launches
from tests.shelf import BASELINES, BUILT_IN

SHAPES = [(1000, 1000), (1000,), (64, 3, 3, 3)]
# The most launches and allocations of a bucket, on any number of ranks.
MOST = {
    "int8": (4, 6),
    "fp8": (4, 6),
    "fp8, MX": (6, 7),
    "int4": (9, 10),
    "onebit": (6, 7),
    "topk": (5, 6),
    "random_k": (7, 6),
    "random_block": (16, 20),
    "dgc": (22, 30),
    "signsgd": (6, 6),
    "powersgd": (11, 9),
    "acpsgd": (8, 7),
}


@pytest.mark.parametrize("world_size", [8, 64])
@pytest.mark.parametrize("name", MOST)
def test_a_bucket_takes_few_launches_on_any_number_of_ranks(name: str, world_size: int) -> None:
    scheme = commhooks.make("fp8", format="mx_e4m3") if "MX" in name else commhooks.make(name)
    counts = counts_of(scheme, SHAPES, world_size=world_size)
    launches, allocations = MOST[name]
    assert counts.launches <= launches
    assert counts.allocations <= allocations


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_float32_sums_take_few_launches(name: str) -> None:
    for world_size in (8, 64):
        scheme = commhooks.make(name, fp32_sum=True)
        assert counts_of(scheme, SHAPES, world_size=world_size).launches <= 9


@pytest.mark.parametrize("name", [*BUILT_IN, *BASELINES])
def test_no_bucket_makes_the_host_wait_for_the_gpu(name: str) -> None:
    counts_of(commhooks.make(name), SHAPES, world_size=4)  # raises where it would


@pytest.mark.parametrize("name", ["qsgd", "terngrad"])
def test_random_levels_are_drawn_on_the_device(name: str) -> None:
    counts = counts_of(commhooks.make(name), SHAPES, world_size=2)
    assert sum(counts.kernels.values()) == 3  # to encode, and to decode two payloads


def test_norms_of_all_parameters_are_computed_together() -> None:
    few, many = (counts_of(commhooks.make("intsgd"), SHAPES * n, world_size=4) for n in (1, 10))
    assert few.kernels == many.kernels
    assert sum(few.operations.values()) == sum(many.operations.values())


def test_averaged_errors_of_all_parameters_are_packed_together() -> None:
    scheme = AveragedFeedback(commhooks.make("int8"))
    few, many = (counts_of(scheme, SHAPES * n, world_size=4) for n in (1, 10))
    assert few.kernels == many.kernels
    assert few.kernels["quantize_parts"] == few.kernels["dequantize_parts"] == 1


def test_votes_of_all_shards_are_packed_and_counted_together() -> None:
    for world_size in (2, 16):
        counts = counts_of(commhooks.make("signsgd"), SHAPES, world_size=world_size)
        assert counts.kernels["pack_votes"] == counts.kernels["count_votes"] == 2


def test_eden_rotates_and_packs_all_shards_together() -> None:
    few, many = (counts_of(commhooks.make("eden"), SHAPES, world_size=n) for n in (2, 16))
    assert few.kernels == many.kernels
    assert few.operations == many.operations


def test_top_k_takes_two_launches_and_a_sum_of_payloads_one() -> None:
    counts = counts_of(commhooks.make("topk"), SHAPES, world_size=64)
    assert {name: counts.kernels[name] for name in ("sample", "select", "scatter_sum")} == {
        "sample": 1,
        "select": 1,
        "scatter_sum": 1,
    }


def test_verification_of_a_bucket_takes_few_launches() -> None:
    several = [(2304, 768), (2304,), (768, 768), (768,), (3072, 768), (3072,), (768, 3072), (768,)]
    for name, options in (("int8", {}), ("int4", {"error_feedback": True}), ("topk", {})):
        for shapes in ([(2560, 2560)], several):
            added = verified_launches(commhooks.make(name, **options), shapes, world_size=8)
            assert added["bucket"] == 3, (name, added)
            assert added["hashes"] <= 6, (name, added)
            assert added["message"] <= 2, (name, added)
