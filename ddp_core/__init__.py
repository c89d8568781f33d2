"""DistributedDataParallel in Python, and what hooks run on: buckets, collectives, rounds and lanes.

Knows torch and no scheme: it takes hooks, and generators that yield collectives.
"""

from ddp_core._accumulators import call_after_backward
from ddp_core._bucket import GradBucket
from ddp_core._collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    ReduceScatter,
    as_request,
)
from ddp_core._ddp import DistributedDataParallel
from ddp_core._drivers import Drivers
from ddp_core._errors import (
    CollectiveError,
    MismatchError,
    MissingRankError,
    PeerError,
    RoundsError,
)
from ddp_core._lane_groups import group_store, group_timeout
from ddp_core._lanes import Lanes
from ddp_core._precision import MixedPrecision
from ddp_core._reducer import Reducer
from ddp_core._simulate import simulate
from ddp_core._streams import Streams
from ddp_core._task import Exchange, RoundRecord, Task
from ddp_core._timeline import Timeline

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Broadcast",
    "Collective",
    "CollectiveError",
    "DistributedDataParallel",
    "Drivers",
    "Exchange",
    "GradBucket",
    "Lanes",
    "MismatchError",
    "MissingRankError",
    "MixedPrecision",
    "PeerError",
    "ReduceScatter",
    "Reducer",
    "RoundRecord",
    "RoundsError",
    "Streams",
    "Task",
    "Timeline",
    "as_request",
    "call_after_backward",
    "group_store",
    "group_timeout",
    "simulate",
]
