"""Compares some steps with the dense mean and across ranks, while training goes on."""

from commhooks.verify.judge import Finding, Verified
from commhooks.verify.verification import Verification, need_verifiable, verification_of

__all__ = ["Finding", "Verification", "Verified", "need_verifiable", "verification_of"]
