"""Compiles all kernels into the folder of cubins, without a GPU.

Compiling takes minutes that a GPU would wait for. A cubin is found again only with the same
sources, architecture and version of NVRTC: compile with the NVRTC of the machine that it is for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from commhooks import make
from commhooks.kernels.runtime import nvrtc
from experiments.gpu_kernels import copy_ratio, exchange
from experiments.gpu_kernels.dry_run import Launches, rehearsed
from experiments.gpu_kernels.table import Setting, Step
from experiments.tools.fake_gpu import counts_of
from tests.device.device_cases import SCHEMES, SHAPES
from tests.kernels.fuzz import FAMILIES
from tests.shelf import BASELINES, BUILT_IN

__all__ = ["COLUMNS", "all_kernels", "kernels", "steps"]

COLUMNS = ("file", "NVRTC", "bytes")


def kernels() -> dict[str, list[str]]:
    """Returns the kernels that tests launch, by file."""
    return {file: list(names) for family in FAMILIES for file, names in family.KERNELS.items()}


def all_kernels() -> dict[str, list[str]]:
    """Returns the kernels that tests launch, and those that a dry run of the study launches."""
    launches = Launches()
    with rehearsed(launches) as small:
        rehearsal = small(Path())
        for step in (*copy_ratio.steps(rehearsal), *exchange.steps(rehearsal)):
            with suppress(Exception):  # a case that fails does so where it is timed
                step.run()
    by_file = kernels()
    for launched in (launches.kernels, *_of_schemes_on_devices()):
        for file, names in launched.items():
            by_file[file] = list(dict.fromkeys([*by_file.get(file, ()), *sorted(names)]))
    return by_file


def _of_schemes_on_devices() -> Iterator[dict[str, set[str]]]:
    """Yields the kernels of each scheme that tests/device runs."""
    schemes = [*SCHEMES.values(), *((name, {}) for name in (*BUILT_IN, *BASELINES))]
    for name, options in schemes:
        for world_size in (1, 2):
            with suppress(Exception):  # a baseline that copies to the host, as they may
                counts = counts_of(make(name, **options), SHAPES, world_size=world_size)
                yield counts.instances


def steps(setting: Setting, which: Mapping[str, Sequence[str]] | None = None) -> Iterator[Step]:
    """Yields a step per kernel.

    Args:
        setting: has the architecture.
        which: kernels by file; all by default.
    """
    architecture, version = setting.architecture, ".".join(map(str, nvrtc._nvrtc_version()))
    for file, names in (all_kernels() if which is None else which).items():
        for name in names:

            def compile_one(file: str = file, name: str = name) -> dict[str, Any]:
                size = len(nvrtc.cached_cubin(file, name, architecture).code)
                return {"file": file, "NVRTC": version, "bytes": size}

            yield Step(f"{name}, sm_{architecture}", compile_one)
