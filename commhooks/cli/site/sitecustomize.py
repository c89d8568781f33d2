"""Runs when Python starts, in each process of a script under ``commhooks headroom``.

Python imports a module of this name, if there is one on its path, before anything else. The path is
in the environment, so that also processes see it that torchrun or multiprocessing start. Nothing
heavy is imported here: data loaders and compilers are such processes, too. A ``sitecustomize`` that
this one hides runs as well.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

__all__ = ["ConstructorHooks"]

_HERE = os.path.dirname(os.path.abspath(__file__))


def _built(call: str) -> Callable[..., None]:
    """Returns a function that passes a built model to ``commhooks.predict._headroom_agent``."""

    def built(model: Any) -> None:
        try:
            from commhooks.predict import _headroom_agent as agent
        except ImportError:
            # As in a checkout, or in another environment than the command's.
            sys.path.append(os.environ["COMMHOOKS_HEADROOM_PACKAGE"])
            from commhooks.predict import _headroom_agent as agent
        getattr(agent, call)(model)

    return built


# Classes whose objects are reported once they are built, by module.
_WATCHED = {
    "torch.nn.parallel.distributed": ("DistributedDataParallel", _built("ddp_built")),
    "ddp_core.ddp._ddp": ("DistributedDataParallel", _built("ddp_built")),
    "torch.distributed.fsdp.fully_sharded_data_parallel": (
        "FullyShardedDataParallel",
        _built("fsdp_built"),
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_state": ("FSDPState", _built("fsdp_built")),
}


class ConstructorHooks(importlib.abc.MetaPathFinder):
    """Finds the modules of ``_WATCHED``, and wraps the constructor of a class in each."""

    def __init__(self) -> None:
        self._looking = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns the specification of other finders, with a loader that wraps."""
        if name not in _WATCHED or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _wrap(module, *_WATCHED[name])

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _wrap(module: ModuleType, name: str, built: Callable[..., None]) -> None:
    kind = getattr(module, name, None)
    if kind is None:
        return
    init = kind.__init__

    @functools.wraps(init)
    def init_and_report(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        built(self)

    kind.__init__ = init_and_report


def _run_hidden() -> None:
    """Runs the ``sitecustomize`` that this one hides."""
    elsewhere = [folder for folder in sys.path if os.path.abspath(folder or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "sitecustomize":
    if "COMMHOOKS_HEADROOM" in os.environ:
        sys.meta_path.insert(0, ConstructorHooks())
        with contextlib.suppress(OSError):  # on another machine than the command's
            open(os.environ["COMMHOOKS_HEADROOM_SEEN"], "w").close()
    _run_hidden()
