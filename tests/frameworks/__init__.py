"""Frameworks that own the training loop, with the real libraries, in two real processes.

Run by ``make test-frameworks``, which has an environment of its own; skipped where a library is
missing, as in ``make test``.
"""
