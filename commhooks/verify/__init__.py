"""Compares some steps with the dense mean and across ranks, while training continues."""

# Modules, in the order in which to read them:
#
# _verification  Verification, and the collectives of a verified step
# _measure       one bucket on one rank
# _judge         error bounds of schemes, and their violations
# _equal         equality of values across ranks

from commhooks.verify._judge import Finding, VerifiedRow
from commhooks.verify._verification import Verification, check_verifiable, verification_of

__all__ = ["Finding", "Verification", "VerifiedRow", "check_verifiable", "verification_of"]
