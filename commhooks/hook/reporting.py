"""Defines what a hook tells about its run: tables, sentences, numbers, pictures and pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple

from commhooks.hook.running import Running
from commhooks.wrappers.feedback import without_flush
from commhooks.wrappers.make import brief

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

__all__ = ["Reporting", "Tried"]


class Tried(NamedTuple):
    """Holds a candidate of ``register(model, "auto")``; NaN: not measured.

    Attributes:
        candidate: name of the scheme.
        measured_s: seconds that a step took when candidates ran in turns, the median.
        again_s: the same where the choice was compared with dense steps once more.
        steps: number of steps that ``measured_s`` is the median of.
    """

    candidate: str
    measured_s: float
    again_s: float
    steps: int


class Reporting(Running):
    """Reports what a hook sent, how long that took, and what backward waited for."""

    _since = 0  # the first step of the current scheme

    @property
    def rank(self) -> int:
        """Returns this process's rank within the hook's process group."""
        self._bind()
        return self._engine.rank

    @property
    def world_size(self) -> int:
        """Returns the number of ranks that gradients are averaged over."""
        self._bind()
        return self._engine.world_size

    @property
    def tried(self) -> Sequence[Tried]:
        """Returns what ``register(model, "auto")`` has measured; empty without it."""
        return ()

    def report(self) -> pd.DataFrame:
        """Returns a row per step, bucket and round; see :meth:`commhooks.hook.Ledger.report`."""
        return self.ledger.report()

    def summary(self, steps: int = 100) -> str:
        """Describes in words what this scheme's latest steps sent; see :meth:`Ledger.summary`."""
        name = brief(without_flush(self.scheme))
        world_size = max(self._engine.world_size, 1)
        return self.ledger.summary(
            *(name, world_size, steps), since=self._since, dense=self.compared_with
        )

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """Returns numbers of the latest step, for any logger.

        ======================= =================================================================
        ``dense_bytes``         of the gradients
        ``payload_bytes``       that this rank handed to collectives
        ``wire_bytes``          that this rank sent, by the formulas of the collectives
        ``dense_wire_bytes``    that it would send without compression
        ``encode_s``            seconds of work before collectives, summed over buckets
        ``wire_s``              seconds from issue to end of collectives, summed
        ``decode_s``            seconds of work after the last collectives, summed
        ``exposed_s``           seconds that backward waited
        ``memory_bytes``        of residuals and other state of the scheme
        ``skipped_steps``       so far, whose average was not finite (on the CPU)
        ``verify/error``        largest error of a parameter in the last verified step, over the
                                norm of its dense mean
        ``verify/error_median`` that of the parameter in the middle; without those whose dense mean
                                is zero
        ``verify/cosine_min``   smallest cosine of an averaged gradient and the dense mean there
        ``verify/findings``     number of findings of the verification so far
        ======================= =================================================================

        The last four are there with ``register(verify=...)``. Times that are not known, as
        in most steps on a GPU, are left out.

        Args:
            prefix: put before each name.

        Example:
            >>> wandb.log(hook.metrics("comm/"))
        """
        found = self.ledger.last_step()
        found["memory_bytes"] = float(self._engine.memory.nbytes())
        found["skipped_steps"] = float(self._engine.skipped)
        if self.verification is not None:
            found |= self.verification.metrics()
        return {prefix + name: value for name, value in found.items()}

    def add_scalars(self, writer: Any, prefix: str = "commhooks") -> None:
        """Writes the latest step's :meth:`metrics` to a TensorBoard ``SummaryWriter``."""
        for name, value in self.metrics(f"{prefix}/").items():
            writer.add_scalar(name, value, self.step)

    def plot(self, path: str | Path | None = None, step: int | None = None) -> Axes:
        """Draws the exchanges of a step over time, a line per bucket; on torch's DDP as well.

        Args:
            path: picture to write; its ending decides on the type.
            step: which one; the latest whose times are known by default.

        Raises:
            MissingPackageError: matplotlib is not installed.
            ValueError: the times of this step are not kept.
        """
        return _report("timeline:draw")(self.ledger, path, step)  # type: ignore[no-any-return]

    def chrome_trace(self, path: str | Path) -> None:
        """Writes the steps that are kept as a trace for Perfetto or chrome://tracing."""
        _report("timeline:chrome_trace")(self.ledger, path, rank=self.rank)

    def page(self, path: str | Path, title: str = "") -> None:
        """Writes a page about this run: one HTML file with tables and pictures.

        Args:
            path: file to write. Times are those of this rank.
            title: heading; the scheme by default.

        Raises:
            MissingPackageError: matplotlib or pandas is not installed.

        Example:
            >>> if hook.rank == 0:
            ...     hook.page("run.html")
        """
        _report("run:write_page")(self, path, title)


def _report(name: str) -> Callable[..., Any]:
    """Returns a function of the reports, which are above hooks, and need more packages."""
    found: Callable[..., Any] = resolve_name(f"commhooks.report.{name}")
    return found
