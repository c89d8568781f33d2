"""Sets up all tests: markers, one thread, and a folder for what tests compile."""

import gc
import os
import shutil
import tempfile
from typing import Any

import pytest

from tests.builds import FOLDER

# Before torch is imported. Tensors are small here: threads would wait for one another, all the
# more where several workers share the cores. Processes that tests start take it over.
os.environ.setdefault("OMP_NUM_THREADS", "1")

gc.disable()  # until all cases are collected: what is imported stays, and there is much of it


# Tests of many cases that differ in little, by how their names begin: every run takes the first of
# so many cases, ``make test-all`` all.
VARIANTS = {
    "tests/unit/test_simulate.py::test_the_batch_and_the_default_device": 2,
    "tests/unit/test_simulate.py::test_a_step_of_several_passes": 2,
    "tests/unit/test_docs.py::test_a_prediction_on_a_page": 2,
    "tests/hosts/test_zero_optimizer.py::test_shards_train_as_a_plain": 4,
    "tests/contract/test_laws.py::test_a_bad_bucket_keeps_the_memory_of_the_whole_step": 2,
    "tests/contract/test_laws.py::test_schemes_obey_the_laws_inside_every_wrapper": 8,
    "tests/contract/test_laws.py::test_applied_and_residual_sum_to_the_gradients_in_any": 2,
    "tests/hook/test_cuda_emulation.py::test_an_optimizer_in_backward_steps": 20,
    "tests/hook/test_cuda_emulation.py::test_training_gives_what_it_gives_on_the_cpu": 20,
    "tests/predict/test_auto.py::test_a_slow_line_gets_a_scheme": 2,
    "tests/faults/test_ddp_abandoned.py::test_a_rank_that_goes_on_alone": 4,
    "tests/faults/test_ddp_abandoned.py::test_three_ranks_that_raise_not_alike": 3,
    "tests/faults/test_ddp_abandoned.py::test_whatever_comes_first": 2,
    "tests/ddp/test_ddp_compile.py::test_a_rank_without_inputs": 3,
    "tests/ddp/test_ddp_compile.py::test_splits_become_buckets": 4,
    "tests/ddp/test_ddp_parity.py::test_every_scheme_trains_as_on_torch": 9,
    "tests/ddp/test_ddp_parity.py::test_twelve_steps_have_the_bits_of_torch": 5,
    "tests/ddp/test_ddp_steps.py::test_delayed_parameters_are_averaged": 2,
    "tests/faults/test_failures.py::test_a_peer_that_dies_in_backward": 3,
    "tests/faults/test_failures.py::test_a_peer_that_is_lost_between_two_rounds": 2,
    "tests/faults/test_failures.py::test_an_infinite_gradient_on_one_rank": 3,
    "tests/faults/test_failures.py::test_the_residual_is_flushed": 3,
    "tests/fsdp/test_fsdp2.py::test_auto_times_candidates": 2,
    "tests/fsdp/test_fsdp2.py::test_none_has_the_bits": 2,
    "tests/fsdp/test_fsdp2.py::test_what_is_sent_and_what_is_kept": 2,
    "tests/hosts/test_functions.py::test_an_all_reduce_of_every_scheme": 2,
    "tests/hosts/test_functions.py::test_tensors_of_any_kind": 3,
    "tests/predict/test_headroom.py::test_a_script_of_any_shape_gets_an_answer": 3,
    "experiments/tools/test_hosts.py::test_hosts_end_with_the_process": 3,
    "tests/checkpoint/test_other_hosts.py::test_factors_of_other_pieces": 3,
    "tests/checkpoint/test_other_hosts.py::test_residuals_arrive": 8,
    "tests/checkpoint/test_other_ranks.py::test_ranks_go_on_without_one": 2,
    "tests/checkpoint/test_placement.py::test_parameters_that_are_not_cut_stay_equal": 3,
    "tests/faults/test_silent_store.py::test_a_step_ends_in_time": 2,
    "tests/ddp/test_sparse_sum.py::test_training_is_as_on_gloo": 3,
    "tests/verify/test_verified_laws.py::test_no_registered_scheme_is_accused": 2,
    "tests/verify/test_verify.py::test_training_is_the_same_bit_for_bit": 2,
    "tests/verify/test_verify_shards.py::test_error_cosine_and_norm": 2,
    "tests/verify/test_verify_shards.py::test_no_scheme_is_accused": 4,
    "tests/emulator/test_emulator.py::test_a_sanitizer_catches_the_rest": 3,
    "tests/emulator/test_emulator.py::test_cuda_kernels_are_clean_under_sanitizers": 2,
    "tests/fuzz/test_catches.py::test_a_planted_bug_is_found": 3,
    "tests/fuzz/test_fuzz.py::test_random_configurations": 4,
    "tests/kernels/test_blockwise.py::test_kernels_equal_the_definition_on_large": 4,
    "tests/kernels/test_dispatch.py::test_opcheck": 4,
    "tests/kernels/test_inline.py::test_it_is_compiled": 3,
    "tests/kernels/test_nvrtc.py::test_every_kernel_compiles_and_spills_nothing": 12,
    "tests/kernels/test_resident_blocks.py::test_the_order_of_blocks": 2,
    "tests/kernels/test_rotated.py::test_kernels_equal_the_definition": 2,
    "tests/kernels/test_sparse.py::test_data_on_which": 2,
    "tests/fuzz/test_pairs.py::test_pairs_obey_the_laws": 4,
    "tests/unit/test_docs.py::test_schemes_of_the_guide": 3,
    "tests/unit/test_integer_sum.py::test_the_sum_of_codes": 2,
    "tests/unit/test_sketch.py::test_a_norm_is_known": 3,
    "tests/unit/test_shard_collectives.py::test_on_many_ranks_what_is_sent": 4,
    "tests/unit/test_deferred_streams.py::test_a_hook_gives_the_same_in_every_order": 5,
    "tests/unit/test_deferred_streams.py::test_a_step_that_is_not_finite": 3,
    "tests/unit/test_deferred_streams.py::test_exchanges_that_pause_give_the_same": 7,
    "tests/unit/test_deferred_streams.py::test_parts_of_a_bucket_are_all": 6,
    "tests/unit/test_deferred_streams.py::test_what_is_kept_moves": 3,
    "tests/unit/test_quantized.py::test_single_shot_errors": 3,
    "experiments/quality/test_quality.py::test_every_arm": 5,
    "experiments/traces/test_recorded_tasks.py::test_a_task_is_recorded": 3,
    "tests/unit/test_simulate.py::test_schemes_are_timed_here": 2,
}


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> Any:
    """Leaves out cases of a test also where they are asked for by name, as planted bugs do."""
    collected = yield
    cases = collected if isinstance(collected, list) else []
    test = f"{collector.nodeid}::{name}["
    start = next((start for start in VARIANTS if test.startswith(start)), None)
    if start is not None:
        cases = [case for case in cases if case.get_closest_marker("slow") is None]
        for number, case in enumerate(cases):
            if number % VARIANTS[start]:
                case.add_marker(pytest.mark.slow)
    return collected


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "slow: takes more than 20 seconds, or repeats what is tested"
    )
    if not hasattr(config, "workerinput"):  # workers of xdist take it over, too
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="builds-")


def pytest_collection_finish() -> None:
    """Cases stay to the end: a ``gc.collect()`` need not go through thousands of them."""
    gc.freeze()
    gc.set_threshold(20_000)  # 700 took a thirtieth of all tests' time
    gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(FOLDER), ignore_errors=True)
