"""Provides wrappers, schemes that run other schemes: feedback, casts, schedules, rules, guards."""

# Modules, in the order in which to read them:
#
# _feedback                  error feedback
# _averaged_feedback, _ef21  other kinds of feedback
# _cast                      payloads in 16 bits
# _schedules                 schemes by step
# _per_parameter             schemes by parameter
# _guard                     a dense step where the error is large
# _two_phase                 a codec between all-to-all and all-gather
# _traced                    writes what a scheme is given to a file
# _base                      the base class
# _make                      schemes by name with the options of wrappers
# _parts                     parts of a bucket

from commhooks.wrappers._averaged_feedback import AveragedFeedback
from commhooks.wrappers._base import Choice, Coalesced, Wrapper
from commhooks.wrappers._cast import Cast
from commhooks.wrappers._ef21 import EF21
from commhooks.wrappers._feedback import ErrorFeedback, FlushResidual, Scaled
from commhooks.wrappers._guard import Guard
from commhooks.wrappers._per_parameter import PerParameter, Rule, role_of
from commhooks.wrappers._schedules import DelayedStart, PeriodicDense, Schedule
from commhooks.wrappers._traced import Traced
from commhooks.wrappers._two_phase import TwoPhase

__all__ = [
    "EF21",
    "AveragedFeedback",
    "Cast",
    "Choice",
    "Coalesced",
    "DelayedStart",
    "ErrorFeedback",
    "FlushResidual",
    "Guard",
    "PerParameter",
    "PeriodicDense",
    "Rule",
    "Scaled",
    "Schedule",
    "Traced",
    "TwoPhase",
    "Wrapper",
    "role_of",
]
