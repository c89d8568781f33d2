"""Errors of the core; every message names the call, the rule, what came and what to do."""

__all__ = ["CollectiveError", "MismatchError", "MissingRankError", "PeerError", "RoundsError"]


class CollectiveError(RuntimeError):
    """A collective failed (dead peer, timeout, ...) in this ``step``, ``bucket`` and ``round``."""

    def __init__(self, message: str, *, step: int, bucket: int, round: int) -> None:
        super().__init__(message)
        self.step, self.bucket, self.round = step, bucket, round

    def __reduce__(self) -> tuple[object, ...]:
        return _collective_error, (str(self), self.step, self.bucket, self.round)


def _collective_error(message: str, step: int, bucket: int, round: int) -> CollectiveError:
    return CollectiveError(message, step=step, bucket=bucket, round=round)


class PeerError(RuntimeError):
    """Another rank reported that it failed; the message has its words."""


class MismatchError(RuntimeError):
    """The ranks do not agree on what they are doing."""


class MissingRankError(MismatchError):
    """A rank did not come to a call that all ranks make alike."""


class RoundsError(RuntimeError):
    """A scheme yielded more collectives for a bucket than its ``rounds`` declares."""
