"""Work that an exchange has while a collective is under way."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Overlap"]


class Overlap:
    """Holds work that needs no result of a collective, and runs it once.

    A driver that can calls ``run`` once the collective is under way. The exchange calls ``finish``
    after it, so that the work is done whatever drives it.

    Args:
        work: may not touch the tensor of the request.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self._error: Exception | None = None

    def run(self) -> None:
        """Does the work, unless it is done; keeps what it raises for ``finish``."""
        work, self._work = self._work, None
        if work is None:
            return
        try:
            work()
        except Exception as error:  # of the exchange, and not of the driver
            self._error = error

    def finish(self) -> None:
        """Does the work, unless it is done, and raises what it has raised."""
        self.run()
        if self._error is not None:
            raise self._error

    def after(self, first: Callable[[], None]) -> Overlap:
        """Returns an overlap of ``first`` and then of this one, for a request around this one's."""

        def both() -> None:
            first()
            self.run()

        return Overlap(both)
