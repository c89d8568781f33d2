"""The core under the hooks: buckets, collectives as requests, rounds and lanes, simulated ranks.

Knows torch and no scheme: it takes generators that yield collectives.
"""

from ddp_core._bucket import GradBucket
from ddp_core._collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    ReduceScatter,
)
from ddp_core._errors import CollectiveError, MismatchError, RoundsError
from ddp_core._lanes import Lanes, group_timeout
from ddp_core._simulate import simulate
from ddp_core._streams import Streams
from ddp_core._task import Exchange, RoundRecord, Task

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Broadcast",
    "Collective",
    "CollectiveError",
    "Exchange",
    "GradBucket",
    "Lanes",
    "MismatchError",
    "ReduceScatter",
    "RoundRecord",
    "RoundsError",
    "Streams",
    "Task",
    "group_timeout",
    "simulate",
]
