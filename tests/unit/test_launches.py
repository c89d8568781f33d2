"""Schemes launch few CUDA kernels for a bucket, and never make the host wait for the GPU."""

from __future__ import annotations

import pytest

import commhooks
import commhooks.research.baselines
from commhooks.wrappers import AveragedFeedback
from experiments.tools.fake_gpu import counts_of, verified_launches
from tests.shelf import BASELINES, BUILT_IN

SHAPES = [(1000, 1000), (1000,), (64, 3, 3, 3)]
# A block of GPT-2: 25 MiB, with vectors and matrices.
BLOCK = [(768,), (768,), (2304, 768), (2304,), (768, 768), *[(768,)] * 4]
BLOCK += [(3072, 768), (3072,), (768, 3072)]
# The most launches of a bucket, and of them the most of PyTorch's operations.
LAUNCHES, OPERATIONS = 10, 3
# Their first steps do not compress.
LATE = {"onebit_adam": {"freeze_step": 1}}


@pytest.mark.parametrize("world_size", [8, 64])
@pytest.mark.parametrize("name", BUILT_IN)
def test_a_bucket_takes_few_launches_on_any_number_of_ranks(name: str, world_size: int) -> None:
    scheme = commhooks.make(name, **LATE.get(name, {}))
    counts = counts_of(scheme, BLOCK, world_size=world_size)
    assert counts.launches <= LAUNCHES, counts
    assert counts.operations.total() <= OPERATIONS, counts


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
