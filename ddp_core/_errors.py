"""Errors of the runner; every message names the call, the rule, what came and what to do."""

__all__ = ["CollectiveError", "MismatchError", "RoundsError"]


class CollectiveError(RuntimeError):
    """A collective failed (dead peer, timeout, ...) in this ``step``, ``bucket`` and ``round``."""

    def __init__(self, message: str, *, step: int, bucket: int, round: int) -> None:
        super().__init__(message)
        self.step, self.bucket, self.round = step, bucket, round


class MismatchError(RuntimeError):
    """The ranks do not agree on what they are doing."""


class RoundsError(RuntimeError):
    """A scheme yielded more collectives for a bucket than its ``rounds`` declares."""
