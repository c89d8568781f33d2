"""Tools to study schemes without training: simulation, laws, traces, budgets, messages."""

from commhooks.research.simulation import Simulation

__all__ = ["Simulation"]
