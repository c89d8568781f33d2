"""Computes how many entries of a bucket a sparse scheme sends."""

from __future__ import annotations

import logging

from commhooks.core._scheme import Scheme
from commhooks.kernels.runtime.op import speaks

__all__ = ["check_ratio", "log_delay", "number_kept"]

_logger = logging.getLogger("commhooks")


def check_ratio(scheme: Scheme, ratio: float) -> None:
    """Raises ValueError unless ``ratio`` is a share of the entries."""
    if not 0 < ratio <= 1:
        name = type(scheme).__name__
        percent = f"; {ratio:g} % are ratio={ratio / 100:g}" if 1 < ratio <= 100 else ""
        raise ValueError(
            f"{name}(ratio=...) is a share of the entries, 0 < ratio <= 1, got {ratio!r}{percent}"
        )


def log_delay(scheme: Scheme, ratio: float) -> None:
    """Logs how many steps an entry waits until it is sent, where that is many."""
    if ratio >= 0.1 or not speaks():
        return
    # A warning, as nobody sees lower levels who has not set up logging.
    _logger.warning(
        "commhooks: %s(ratio=%g) sends each entry every %.0f steps on average. In between error "
        "feedback keeps it, or it is lost. A learning rate that works with uncompressed gradients "
        "may be too large: compare the loss; ratio=0.1, or start_step at a tenth of the training, "
        "helps",
        type(scheme).__name__,
        ratio,
        1 / ratio,
    )


def number_kept(ratio: float, n: int) -> int:
    """Returns how many of ``n`` entries are sent; at least one."""
    return min(n, max(1, int(ratio * n)))
