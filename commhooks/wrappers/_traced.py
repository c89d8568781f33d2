"""Defines ``Traced``, which records the gradients of a run for ``commhooks.research.trace``."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from commhooks.core._bucket import Bucket, SchemeExchange
from commhooks.core._scheme import Scheme
from commhooks.wrappers._base import Wrapper
from ddp_core import needs

__all__ = ["FILE_NAME", "Traced", "write"]

FILE_NAME = re.compile(r"step(\d+)_rank(\d+)_\w+\.safetensors")


@dataclass(frozen=True)
class Traced(Wrapper):
    """Records the local gradients of some steps by parameter, and exchanges them by ``scheme``.

    Writes one safetensors file per step, rank and bucket; every rank writes to ``folder``.

    Args:
        scheme: the scheme that training runs with.
        folder: where files are written; made if it does not exist.
        every: records the steps that are multiples of this number.
        steps: number of steps in the folder at which recording ends.

    Example:
        >>> hook = register(ddp_model, Traced(make("bf16"), "trace", every=50))
    """

    scheme: Scheme
    folder: str | os.PathLike[str]
    every: int = 100
    steps: int = 20

    touches_files = True

    def __post_init__(self) -> None:
        super().__post_init__()
        with needs("Traced(...)", "safetensors"):  # now, not in the first backward pass
            import safetensors  # noqa: F401
        for name in ("every", "steps"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"Traced({name}=...) is a whole number, 1 or more, got {value!r}")

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        if bucket.step % self.every == 0 and self._wanted(bucket):
            self._save(bucket)
        return (yield from self.scheme.exchange(bucket))

    def _wanted(self, bucket: Bucket) -> bool:
        """Whether this bucket's step is recorded: fewer than ``steps`` are, or part of it is."""
        # By files, not by a counter: a resumed run continues, and a finished record stays as it is.
        files = Path(self.folder).glob(f"step*_rank{bucket.rank}_*.safetensors")
        recorded = {int(match[1]) for path in files if (match := FILE_NAME.fullmatch(path.name))}
        return bucket.step in recorded or len(recorded) < self.steps

    def _save(self, bucket: Bucket) -> None:
        layout = bucket.layout
        views = layout.views(bucket.raw.detach())
        write(self.folder, bucket.step, bucket.rank, dict(zip(layout.names, views, strict=True)))


def write(
    folder: str | os.PathLike[str], step: int, rank: int, grads: Mapping[str, Tensor]
) -> None:
    """Writes the gradients of a rank's bucket as :class:`commhooks.research.trace.Trace` reads it.

    Args:
        folder: of the trace; made if it does not exist.
        step, rank: that the gradients are of.
        grads: by parameter.
    """
    from safetensors.torch import save_file

    # A scheme knows no number of its bucket: the names of its parameters distinguish files.
    digest = hashlib.blake2b("\n".join(grads).encode(), digest_size=4).hexdigest()
    path = Path(folder) / f"step{step:07}_rank{rank}_{digest}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Renamed when it is complete: half a file of a run that was ended would stop its readers.
    part = path.with_suffix(".part")
    save_file({name: grad.cpu().contiguous().clone() for name, grad in grads.items()}, part)
    part.replace(path)
