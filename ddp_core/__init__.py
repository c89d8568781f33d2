"""Provides DistributedDataParallel in Python, and the parts that its hooks run on.

Knows torch and no scheme: it takes hooks, and generators that yield collectives.
"""

# Packages, the lowest first:
#
# exchange  collectives as requests, and what runs them
# reducer   gradients in buckets, launched and waited for
# ddp       DistributedDataParallel, with torch's names
# _torch    the private names of torch that are used here

from ddp_core.ddp._agreement import first_difference, module_facts
from ddp_core.ddp._ddp import DistributedDataParallel
from ddp_core.exchange._clocks import Clock, Timestamp, clock_of, event_after
from ddp_core.exchange._collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    ReduceScatter,
    as_request,
    overlapped,
)
from ddp_core.exchange._devices import (
    StreamOrder,
    completed,
    future_on,
    on_device,
    on_device_of,
    record_stream,
    stream_of,
)
from ddp_core.exchange._errors import (
    CollectiveError,
    Error,
    MismatchError,
    MissingPackageError,
    MissingRankError,
    PeerError,
    RoundsError,
    SilentStoreError,
    needs,
)
from ddp_core.exchange._lane_groups import (
    LaneGroup,
    acquire_lane_groups,
    cpu_backend,
    is_gloo,
    make_with_timeout,
)
from ddp_core.exchange._lanes import Lanes
from ddp_core.exchange._shared_store import SharedStore, group_timeout, shared_store
from ddp_core.exchange._simulate import simulate
from ddp_core.exchange._streams import Drivers, Streams
from ddp_core.exchange._task import Exchange, RoundRecord, Task
from ddp_core.reducer._autograd import call_after_backward
from ddp_core.reducer._grad_bucket import GradBucket
from ddp_core.reducer._precision import MixedPrecision
from ddp_core.reducer._reducer import Reducer
from ddp_core.reducer._timeline import Timeline

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Broadcast",
    "Clock",
    "Collective",
    "CollectiveError",
    "DistributedDataParallel",
    "Drivers",
    "Error",
    "Exchange",
    "GradBucket",
    "LaneGroup",
    "Lanes",
    "MismatchError",
    "MissingPackageError",
    "MissingRankError",
    "MixedPrecision",
    "PeerError",
    "ReduceScatter",
    "Reducer",
    "RoundRecord",
    "RoundsError",
    "SharedStore",
    "SilentStoreError",
    "StreamOrder",
    "Streams",
    "Task",
    "Timeline",
    "Timestamp",
    "acquire_lane_groups",
    "as_request",
    "call_after_backward",
    "clock_of",
    "completed",
    "cpu_backend",
    "event_after",
    "first_difference",
    "future_on",
    "group_timeout",
    "is_gloo",
    "make_with_timeout",
    "module_facts",
    "needs",
    "on_device",
    "on_device_of",
    "overlapped",
    "record_stream",
    "shared_store",
    "simulate",
    "stream_of",
]
