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
