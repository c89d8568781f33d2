"""What all tests share: markers, one thread, and a folder for what tests compile."""

import gc
import os
import shutil
import tempfile

import pytest

from tests.builds import FOLDER

# Before torch is imported. Tensors are small here: threads would wait for one another, all the
# more where several workers share the cores. Processes that tests start take it over.
os.environ.setdefault("OMP_NUM_THREADS", "1")


# Tests of many cases that differ in little, by how their names begin: every run takes the first of
# so many cases, ``make test-all`` all.
VARIANTS = {
    "tests/contract/test_laws.py::test_a_bad_step_arrives_everywhere_and_changes_no_memory": 2,
    "tests/distributed/test_as_gpu.py::test_an_optimizer_in_backward_steps": 3,
    "tests/distributed/test_as_gpu.py::test_training_gives_what_it_gives_on_the_cpu": 3,
    "tests/distributed/test_auto.py::test_a_slow_line_gets_a_scheme": 2,
    "tests/distributed/test_ddp_compile.py::test_splits_become_buckets": 2,
    "tests/distributed/test_ddp_modes.py::test_applied_plus_residual_is_the_sum_of_gradients": 2,
    "tests/distributed/test_ddp_parity.py::test_every_scheme_trains_as_on_torch": 3,
    "tests/distributed/test_ddp_parity.py::test_twelve_steps_have_the_bits_of_torch": 2,
    "tests/distributed/test_resume.py::test_kill_and_resume_is_no_interruption_bit_for_bit": 3,
    "tests/distributed/test_verify_shards.py::test_no_scheme_is_accused": 3,
    "tests/distributed/test_wire_bytes.py::test_an_interface_sends_what_the_ledger_says": 2,
    "tests/distributed/test_zero_optimizer.py::test_pairs_of_features_have_the_bits": 2,
    "tests/emulator/test_emulator.py::test_a_sanitizer_catches_the_rest": 3,
    "tests/emulator/test_emulator.py::test_cuda_kernels_are_clean_under_sanitizers": 2,
    "tests/kernels/test_nvrtc.py::test_every_kernel_compiles_and_spills_nothing": 4,
    "tests/unit/test_lazy_streams.py::test_a_hook_gives_the_same_in_every_order": 2,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen: dict[str, int] = {}
    for item in items:
        start = next((one for one in VARIANTS if item.nodeid.startswith(one)), None)
        if start is None or item.get_closest_marker("slow"):
            continue
        seen[start] = seen.get(start, -1) + 1
        if seen[start] % VARIANTS[start]:
            item.add_marker(pytest.mark.slow)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "slow: takes more than 20 seconds, or repeats what is tested"
    )
    if not hasattr(config, "workerinput"):  # workers of xdist take it over, too
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="builds-")


def pytest_collection_finish() -> None:
    """Cases stay to the end: a ``gc.collect()`` need not go through thousands of them."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(FOLDER), ignore_errors=True)
