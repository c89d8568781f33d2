"""Parts of schemes: buckets, slots, traits, memory, the registry."""

from commhooks.core.bucket import Bucket, Result, SchemeExchange
from commhooks.core.layout import Layout
from commhooks.core.memory import Memory
from commhooks.core.packed import PackedCodec, Randomness
from commhooks.core.registry import register_scheme, scheme_names
from commhooks.core.scheme import Codec, Scheme
from commhooks.core.slot import Number, Slot, StepInfo
from commhooks.core.traits import Biased, Exact, Traits, Unbiased

__all__ = [
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
    "register_scheme",
    "scheme_names",
]
