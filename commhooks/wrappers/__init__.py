"""Wrappers, the schemes that run other schemes: feedback, casts, schedules, rules, guards."""

from commhooks.wrappers.averaged_feedback import AveragedFeedback
from commhooks.wrappers.base import Choice, Coalesced, Wrapper
from commhooks.wrappers.cast import Cast
from commhooks.wrappers.ef21 import EF21
from commhooks.wrappers.feedback import ErrorFeedback, FlushResidual, Scaled
from commhooks.wrappers.guard import Guard
from commhooks.wrappers.per_parameter import PerParameter, Rule, role_of
from commhooks.wrappers.schedules import DelayedStart, PeriodicDense, Schedule
from commhooks.wrappers.traced import Traced
from commhooks.wrappers.two_phase import TwoPhase

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
