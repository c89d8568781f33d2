"""Starts buckets of classic hooks, and refuses callers other than DDP and FSDP1."""

import functools
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple, ParamSpec

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from commhooks.classic._hooked_model import Group, hooked_model
from commhooks.collectives import _functions as functions
from commhooks.core._scheme import Scheme
from commhooks.errors import HookNotAttachedError, RegistrationError
from commhooks.wrappers._cast import Cast

__all__ = [
    "BucketFuture",
    "Classic",
    "HookFunction",
    "Launcher",
    "WireDtypes",
    "cast_payloads",
    "classic_hook",
    "classics",
    "launch_on_group",
]

P = ParamSpec("P")
BucketFuture = torch.futures.Future[torch.Tensor]
WireDtypes = tuple[torch.dtype, ...]  # the dtypes that payloads are cast to, innermost first
HookFunction = Callable[[Any, GradBucket], BucketFuture]
Launcher = Callable[[Any, GradBucket, WireDtypes], BucketFuture]


def cast_payloads(scheme: Scheme, wire_dtypes: WireDtypes) -> Scheme:
    """Returns the scheme inside a ``Cast`` for each dtype."""
    for dtype in wire_dtypes:
        scheme = Cast(scheme, dtype)
    return scheme


class Classic(NamedTuple):
    """Describes a classic hook, so that a wrapper can modify it.

    Attributes:
        launch: starts a bucket with payloads of given dtypes.
        wire_dtypes: the dtypes that the hook calls ``launch`` with.
    """

    launch: Launcher
    wire_dtypes: WireDtypes = ()


# Weak: wrappers make new functions, which go with the model that they are registered on.
classics: MutableMapping[Callable[..., Any], Classic] = weakref.WeakKeyDictionary()


def classic_hook(
    launch: Launcher, wire_dtypes: WireDtypes = ()
) -> Callable[[Callable[P, BucketFuture]], Callable[P, BucketFuture]]:
    """Returns a decorator that registers a hook, and distinguishes its callers: DDP and FSDP1.

    Args:
        wire_dtypes: the dtypes that the hook calls ``launch`` with.
    """

    def decorate(function: Callable[P, BucketFuture]) -> Callable[P, BucketFuture]:
        @functools.wraps(function)  # keeps the annotations, which DDP compares with its own
        def hook(*args: P.args, **kwargs: P.kwargs) -> BucketFuture:
            given = args[1] if len(args) > 1 else None
            if isinstance(given, Tensor):
                average: Any = _on_fsdp1
                return average(hook.__name__, Classic(launch, wire_dtypes), *args)  # type: ignore[no-any-return]
            if isinstance(given, tuple):  # Dynamo's Python reducer, which takes no future
                raise HookNotAttachedError(
                    f"{hook.__name__} got a (gradient, parameter) tuple in place of a bucket, as "
                    f"with torch._dynamo.config.optimize_ddp = 'python_reducer', which ignores "
                    f"what hooks return. Set optimize_ddp = True (the default), which keeps buckets"
                )
            return function(*args, **kwargs)

        classics[hook] = Classic(launch, wire_dtypes)
        return hook

    return decorate


def _on_fsdp1(name: str, classic: Classic, group: Any, gradient: Tensor, shard: Any = None) -> None:
    """Averages what FSDP1's ``register_comm_hook`` passes to a hook, in both of its signatures.

    Args:
        name: name of the hook, for messages.
        classic: launches the hook.
        gradient: the whole gradient of a unit; takes the mean where there is no ``shard``.
        shard: takes the mean of this rank's shard.
    """
    scheme = getattr(classic.launch, "args", (None,))[0]
    if not isinstance(scheme, Scheme) or not isinstance(group, dist.ProcessGroup):
        raise RegistrationError(
            f"FSDP1 cannot run {name} with a state of {type(group).__name__}, since it gives hooks "
            f"neither parameters nor ranks: model.register_comm_hook(process_group, hook) takes "
            f"allreduce_hook, fp16_compress_hook and bf16_compress_hook, with a process group such "
            f"as torch.distributed.group.WORLD; all schemes run by commhooks.register(model, "
            f"scheme). FSDP1 is still within this backward pass: end the process"
        )
    scheme = cast_payloads(scheme, classic.wire_dtypes)
    if shard is None:
        functions.all_reduce(gradient, scheme, op=dist.ReduceOp.AVG, group=group)
    else:
        functions.reduce_scatter(shard, gradient, scheme, op=dist.ReduceOp.AVG, group=group)


def launch_on_group(
    scheme: Scheme, group: Group, bucket: GradBucket, wire_dtypes: WireDtypes
) -> BucketFuture:
    """Launches a bucket of a hook whose state is a process group, or None for the model's."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"this hook takes a process group, or None for the model's own, as state; "
            f"got {type(group).__name__}"
        )
    scheme = cast_payloads(scheme, wire_dtypes) if wire_dtypes else scheme
    return hooked_model(bucket.parameters()).hook(scheme, group, bucket).start(bucket)
