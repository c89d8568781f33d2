"""Gradient communication hooks with compression for PyTorch data-parallel training."""

from commhooks import ddp_comm_hooks, optim
from commhooks._averaged_feedback import AveragedFeedback
from commhooks._bucket import Bucket, Result
from commhooks._cast import Cast
from commhooks._checkpoint_flat import flatten_state, unflatten_state
from commhooks._dcp import load_dcp
from commhooks._dense import Dense
from commhooks._diloco import DiLoCo, local_sgd
from commhooks._ef21 import EF21
from commhooks._errors import (
    CheckpointError,
    HookNotAttachedError,
    OptionError,
    PayloadError,
    RegistrationError,
    SchemeError,
    UnknownSchemeError,
)
from commhooks._feedback import ErrorFeedback, FlushResidual, Scaled
from commhooks._guard import Guard
from commhooks._hierarchical import Hierarchical
from commhooks._hook import as_hook, comm_hook
from commhooks._ledger import Ledger
from commhooks._make import make
from commhooks._memory import Layout, Memory
from commhooks._packed import PackedCodec
from commhooks._per_parameter import PerParameter, Rule, role_of
from commhooks._register import register, unregister
from commhooks._registry import names, register_scheme
from commhooks._schedules import DelayedStart, PeriodicDense, Schedule
from commhooks._scheme import Codec, Scheme
from commhooks._simulation import Simulation
from commhooks._slot import Slot
from commhooks._state import HookState
from commhooks._traits import Biased, Exact, Traits, Unbiased
from commhooks._two_phase import TwoPhase
from commhooks._version import __version__
from commhooks._wrapper import Coalesced
from commhooks.classic import (
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
from commhooks.schemes.acpsgd import ACPSGD
from commhooks.schemes.batched_powersgd import BatchedPowerSGD
from commhooks.schemes.casts import TwoPhaseCast, bf16, fp16
from commhooks.schemes.demo import DeMo
from commhooks.schemes.eden import Eden
from commhooks.schemes.gossip import Gossip
from commhooks.schemes.integer_sum import GlobalQSGD, IntSGD
from commhooks.schemes.minmax import MinMax, MinMaxPerChannel
from commhooks.schemes.momentum_sparse import DGC, DenseMomentum, dgc
from commhooks.schemes.noop import Noop
from commhooks.schemes.onebit_adam import OneBitMomentum
from commhooks.schemes.powersgd import PowerSGD
from commhooks.schemes.quantized import Blockwise, fp8, int4, int8, mxfp8, onebit
from commhooks.schemes.random_levels import QSGD, TernGrad
from commhooks.schemes.signs import SignSGD
from commhooks.schemes.sparse import AlignedTopK, RandomBlock, RandomK, TopK
from commhooks.schemes.two_level import sdp4bit
from ddp_core import CollectiveError, MismatchError, MissingRankError

__all__ = [
    "ACPSGD",
    "DGC",
    "EF21",
    "QSGD",
    "AlignedTopK",
    "AveragedFeedback",
    "BatchedPowerSGD",
    "Biased",
    "Blockwise",
    "Bucket",
    "Cast",
    "CheckpointError",
    "Coalesced",
    "Codec",
    "CollectiveError",
    "DeMo",
    "DelayedStart",
    "Dense",
    "DenseMomentum",
    "DiLoCo",
    "Eden",
    "ErrorFeedback",
    "Exact",
    "FlushResidual",
    "GlobalQSGD",
    "Gossip",
    "Guard",
    "Hierarchical",
    "HookNotAttachedError",
    "HookState",
    "IntSGD",
    "Layout",
    "Ledger",
    "Memory",
    "MinMax",
    "MinMaxPerChannel",
    "MismatchError",
    "MissingRankError",
    "Noop",
    "OneBitMomentum",
    "OptionError",
    "PackedCodec",
    "PayloadError",
    "PerParameter",
    "PeriodicDense",
    "PostLocalSGDState",
    "PowerSGD",
    "PowerSGDState",
    "RandomBlock",
    "RandomK",
    "RegistrationError",
    "Result",
    "Rule",
    "Scaled",
    "Schedule",
    "Scheme",
    "SchemeError",
    "SignSGD",
    "Simulation",
    "Slot",
    "TernGrad",
    "TopK",
    "Traits",
    "TwoPhase",
    "TwoPhaseCast",
    "Unbiased",
    "UnknownSchemeError",
    "__version__",
    "allreduce_hook",
    "as_hook",
    "batched_powerSGD_hook",
    "bf16",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "comm_hook",
    "ddp_comm_hooks",
    "dgc",
    "flatten_state",
    "fp8",
    "fp16",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "int4",
    "int8",
    "load_dcp",
    "local_sgd",
    "make",
    "mxfp8",
    "names",
    "noop_hook",
    "onebit",
    "optim",
    "post_localSGD_hook",
    "powerSGD_hook",
    "quantization_perchannel_hook",
    "quantization_pertensor_hook",
    "register",
    "register_scheme",
    "role_of",
    "sdp4bit",
    "unflatten_state",
    "unregister",
]
