"""Exports what authors of schemes import: base classes, buckets, slots, traits, collectives."""

# Modules, in the order in which to read them:
#
# _bucket     Bucket and Result
# _scheme     Scheme and Codec
# _traits     what a scheme declares
# _slot       tensors that a scheme keeps
# _memory     where they are kept, by parameter
# _layout     the parameters of a flat tensor
# _packed     codecs whose payloads are bytes
# _dense      the plain all-reduce
# _registry   schemes by name
# _settings   checks of settings and options
# _names      names of parameters without what wrappers add
# _user_line  the line that a warning is about

from commhooks.core._bucket import Bucket, Result, SchemeExchange
from commhooks.core._layout import Layout
from commhooks.core._memory import Memory
from commhooks.core._packed import PackedCodec, Randomness
from commhooks.core._registry import register_scheme, scheme_names
from commhooks.core._scheme import Codec, Scheme
from commhooks.core._slot import Number, Slot, StepInfo
from commhooks.core._traits import Biased, Exact, Traits, Unbiased
from ddp_core import AllGather, AllReduce, AllToAll, overlapped

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Biased",
    "Bucket",
    "Codec",
    "Exact",
    "Layout",
    "Memory",
    "Number",
    "PackedCodec",
    "Randomness",
    "Result",
    "Scheme",
    "SchemeExchange",
    "Slot",
    "StepInfo",
    "Traits",
    "Unbiased",
    "overlapped",
    "register_scheme",
    "scheme_names",
]
