"""Holds the module that ``commhooks headroom`` runs first in the processes that it starts."""
