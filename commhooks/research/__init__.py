"""Provides tools to study schemes without training: simulation, laws, traces, budgets."""

# Modules, in the order in which to read them:
#
# _simulation                             Simulation, ranks in one process
# conformance                             check_scheme, all laws on one scheme
# _laws, _laws_of_a_step, _laws_of_a_run  the laws
# trace                                   gradients of a training run
# budget                                  bits for parameters, by their error
# _error_figures                          the error of an averaged gradient
# baselines                               schemes that papers compare with

from commhooks.research._simulation import Simulation

__all__ = ["Simulation"]
