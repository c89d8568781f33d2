"""Contains the studies, ``python -m experiments.<study>``, a folder each with a README.md.

- Schemes: :mod:`bandwidth`, :mod:`convergence`, :mod:`tradeoff` on recorded :mod:`traces`,
  :mod:`dead_rows`.
- Steps and lines: :mod:`step_cost`, :mod:`network`, :mod:`slow_line`, :mod:`line_share`,
  :mod:`wire_bytes`.
- Sharded training: :mod:`sharded`, :mod:`zero_training`.
- Predictions: :mod:`predictions`, :mod:`simulate_speed`.
- Kernels: :mod:`cpu_kernels`, :mod:`powersgd_kernels`, :mod:`cuda_kernels`, :mod:`gpu_launches`,
  :mod:`gpu_kernels`.

Results are in ``docs/results``, a page per study. What several studies use is in :mod:`tools`.
"""
