"""All planted bugs."""

from __future__ import annotations

from tests.mutants import (
    in_commhooks,
    in_ddp_core,
    in_hosts,
    in_kernels,
    in_predict,
    in_schemes,
    in_sharded,
    in_verify,
    in_zero,
)
from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS: list[Mutant] = [
    *in_schemes.MUTANTS,
    *in_commhooks.MUTANTS,
    *in_hosts.MUTANTS,
    *in_sharded.MUTANTS,
    *in_ddp_core.MUTANTS,
    *in_kernels.MUTANTS,
    *in_predict.MUTANTS,
    *in_verify.MUTANTS,
    *in_zero.MUTANTS,
]
