"""Counts the entries that a PowerSGDState sends, under torch's names."""

from __future__ import annotations

import logging

from torch.distributed import GradBucket  # type: ignore[attr-defined]

from commhooks.classic._powersgd_models import Inner
from commhooks.classic._powersgd_settings import Kind, PowerSGDSettings

__all__ = ["CompressionStats"]

logger = logging.getLogger("commhooks.classic")


class CompressionStats(PowerSGDSettings):
    """Holds the statistics of PowerSGDState, over all models."""

    __slots__ = (
        "next_stats_report",
        "total_numel_after_compression",
        "total_numel_before_compression",
    )

    def _start_counting(self) -> None:
        self.total_numel_before_compression = 0
        self.total_numel_after_compression = 0
        self.next_stats_report = 0

    def compression_stats(self) -> tuple[float, int, int]:
        """Returns the compression rate, and the entries before and after, over compressed steps."""
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return (before / after if after else 0, before, after)

    def _count(self, inner: Inner, kind: Kind, bucket: GradBucket) -> None:
        """Adds a compressed bucket to the statistics; logs them every few steps."""
        before, after = inner.count(self, kind, bucket.parameters())
        self.total_numel_before_compression += before
        self.total_numel_after_compression += after
        if bucket.is_last() and inner.hook.step >= self.next_stats_report:
            self.next_stats_report = inner.hook.step + self.compression_stats_logging_frequency
            rate, before, after = self.compression_stats()
            logger.info(
                "step %d: PowerSGD sent %d entries for %d, rate %.1f",
                inner.hook.step, after, before, rate,
            )  # fmt: skip
