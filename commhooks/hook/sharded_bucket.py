"""Defines ``ShardedBucket``, a bucket of a host that shards parameters over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from commhooks.core.layout import Layout
from commhooks.core.scheme import Scheme, walk
from commhooks.core.shards import Span
from commhooks.errors import RegistrationError
from ddp_core import Exchange

__all__ = ["ShardedBucket", "average", "need_shards"]


@dataclass(frozen=True, eq=False)
class ShardedBucket:
    """Describes a flat gradient of a host such as FSDP2, which holds pieces of parameters.

    Has the methods of DistributedDataParallel's bucket that a hook calls.

    Attributes:
        number: of the bucket, the same in every step.
        gradient: flat, all shards one after the other; may be overwritten.
        layout: names and shapes of the pieces of parameters in it.
        shards: begin and end of the entries whose mean each rank needs; None: all of them.
        output: flat, takes the mean of what this rank needs; None: the gradient's own memory.
        then: goes on with the mean, by one collective at most, before the exchange is over.
        waits: whether the host waits for the mean before it does anything else.
        dense_sends: how often ``(n - 1) / n`` of the gradient would be sent without compression:
            twice in an all-reduce (also where its second half is what ``then`` does), once in a
            reduce-scatter.
        left_alone: names of pieces that do not get the mean, since they are frozen.
    """

    number: int
    gradient: Tensor
    layout: Layout
    shards: Sequence[Span] | None = None
    output: Tensor | None = None
    then: Callable[[Tensor], Exchange] | None = None
    waits: bool = False
    dense_sends: float = 2.0
    left_alone: Sequence[str] = ()

    def index(self) -> int:
        """Returns the bucket's number."""
        return self.number

    def buffer(self) -> Tensor:
        """Returns the flat gradient."""
        return self.gradient

    def parameters(self) -> list[Tensor]:
        """Returns no parameters: a bucket has pieces of them, which the layout names."""
        return []

    def is_last(self) -> bool:
        """Returns False: the host does not say which bucket is the last one of a step."""
        return False

    def wanted(self) -> dict[str, Any]:
        """Returns the arguments of ``Engine.exchange`` for it."""
        return {"shards": self.shards, "output": self.output}

    def continued(self, exchange: Exchange) -> Exchange:
        """Returns an exchange that leaves the mean in its place, followed by ``then``."""
        mean = yield from exchange
        into = self.gradient if self.output is None else self.output
        # A scheme may return memory of its own, as ``Scaled`` does.
        if mean.data_ptr() != into.data_ptr():
            mean = into.copy_(mean)
        return mean if self.then is None else (yield from self.then(mean))


def need_shards(scheme: Scheme, host: str, call: str = "register") -> None:
    """Raises RegistrationError unless a scheme can return one shard of the mean alone.

    Args:
        host: the class or framework that needs shards, for the message.
        call: the public call that gives it the scheme.
    """
    if not scheme.traits.shards:
        between = (
            ". Between replicas of FSDP2 (HSDP) any scheme runs: "
            'register(model, scheme, between=mesh["replicate"])'
        )
        # The innermost: ``scheme`` may be a policy of many rules, of which one is the reason.
        *_, whole = (one for one in walk(scheme) if not one.traits.shards)
        raise RegistrationError(
            f"{call}: {whole} averages whole buckets, and {host} needs one shard of each on each "
            f"rank: it would send and keep what no rank needs. Schemes that exchange blocks of "
            f"entries run here: none, fp16, bf16, int8, int4, fp8, onebit, eden, topk, and "
            f"a codec in commhooks.wrappers.TwoPhase(...), also in ErrorFeedback, AveragedFeedback "
            f"or PerParameter{between if host == 'FSDP2' else ''}"
        )
    if scheme.traits.coalesce:
        raise RegistrationError(
            f"{call}: coalesce=True joins the buckets of a step, and {host} needs the mean of each "
            f"before it hands over the next one; leave it out"
        )


def average(hook: Any, bucket: ShardedBucket) -> None:
    """Averages a bucket by a :class:`commhooks.HookState`, into ``output`` or the gradient."""
    hook.start(replace(bucket, waits=True)).wait()
