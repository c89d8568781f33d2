"""Offers gradient communication hooks with compression for PyTorch data-parallel training.

The names of daily use are here. Schemes are in :mod:`commhooks.schemes`, wrappers in
:mod:`commhooks.wrappers`, research tools in :mod:`commhooks.research`, what authors of schemes
import in :mod:`commhooks.core`, exceptions in :mod:`commhooks.errors`, other
wrappers and frameworks than DistributedDataParallel in :mod:`commhooks.hosts`. Hooks with the names
of PyTorch's hooks are in :mod:`commhooks.classic`, and can be imported from here.
"""

# Packages, the lowest first; each lists its modules:
#
# core                what schemes are made of
# wrappers            schemes around schemes
# schemes             a file per scheme or family
# checkpoint          the saved form of a state
# verify              compares some steps with the dense mean and across ranks
# hook                a scheme on a model: register, steps, state, ledger
# collectives         all_reduce and others, compressed by a scheme, without a model
# fsdp, hosts         FSDP2 and FSDP1; frameworks, a process group, torchft, Megatron
# zero, local         sharded optimizers; DiLoCo
# predict, auto       what compression would save; trials of schemes in a running job
# report              figures, traces and HTML pages
# research            simulation, convergence laws, traces, budgets, baselines
# classic             torch's hooks under torch's names
# ddp_comm_hooks      stands for torch.distributed.algorithms.ddp_comm_hooks
# optim               optimizers that belong to a scheme
# cli                 the command line
# kernels             ops: definition, CPU and CUDA side by side
# errors, _torch, _version

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from commhooks import errors, schemes, wrappers
from commhooks._version import __version__

# The names of torch.distributed.algorithms.ddp_comm_hooks: a script that imports them from there
# only has to change the import. They are not in __all__: ``import *`` gives no name of torch's.
# Imported now, not on first use: torch.load(weights_only=True) has to know them before.
from commhooks.classic import (  # noqa: F401
    PostLocalSGDState,
    PowerSGDState,
    allreduce_hook,
    batched_powerSGD_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
    noop_hook,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)
from commhooks.collectives import Collectives, all_gather, all_reduce, reduce_scatter
from commhooks.core import Scheme
from commhooks.core._registry import register_scheme, scheme_names
from commhooks.errors import Error
from commhooks.hook import HookState, comm_hook, load_dcp, register, unregister
from commhooks.verify import Verification
from commhooks.wrappers import ErrorFeedback, PerParameter, Rule, Schedule
from commhooks.wrappers._make import make

if TYPE_CHECKING:
    from commhooks import ddp_comm_hooks, fsdp, hosts, optim
    from commhooks.hosts import process_group
    from commhooks.local import DiLoCo
    from commhooks.predict._headroom import headroom
    from commhooks.research import Simulation
    from commhooks.zero import ZeroOptimizer

__all__ = [
    "Collectives",
    "DiLoCo",
    "Error",
    "ErrorFeedback",
    "HookState",
    "PerParameter",
    "Rule",
    "Schedule",
    "Scheme",
    "Simulation",
    "Verification",
    "ZeroOptimizer",
    "__version__",
    "all_gather",
    "all_reduce",
    "comm_hook",
    "ddp_comm_hooks",
    "errors",
    "fsdp",
    "headroom",
    "hosts",
    "load_dcp",
    "make",
    "optim",
    "process_group",
    "reduce_scatter",
    "register",
    "register_scheme",
    "scheme_names",
    "schemes",
    "unregister",
    "wrappers",
]

# Imported on first use: a hook on DistributedDataParallel does not need these.
_LAZY_MODULES = (
    *("auto", "ddp_comm_hooks", "fsdp", "hosts", "local"),
    *("optim", "predict", "report", "research", "zero"),
)
_LAZY_NAMES = {
    "DiLoCo": "commhooks.local",
    "Simulation": "commhooks.research",
    "ZeroOptimizer": "commhooks.zero",
    "headroom": "commhooks.predict._headroom",
    "process_group": "commhooks.hosts",
}
# Where other public names are, for those who look for one here.
_OTHERS = ("core", "schemes", "wrappers", "errors")
_FRAMEWORKS = ("accelerate", "fabric", "lightning", "ray", "transformers")


def __getattr__(name: str) -> Any:
    if name in _LAZY_MODULES:
        return import_module(f"{__name__}.{name}")
    if name == "CommHook":
        homes = " or ".join(f"commhooks.hosts.{framework}" for framework in _FRAMEWORKS)
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; import it from {homes}"
        )
    if name not in _LAZY_NAMES:
        modules = (import_module(f"{__name__}.{package}") for package in _OTHERS)
        hints = (f"; it is {home.__name__}.{name}" for home in modules if name in home.__all__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{next(hints, '')}")
    # The package before its module: two threads that import them in opposite orders would deadlock.
    package = _LAZY_NAMES[name].rpartition(".")[0]
    if package != __name__:
        import_module(package)
    value = globals()[name] = getattr(import_module(_LAZY_NAMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY_MODULES, *_LAZY_NAMES})
