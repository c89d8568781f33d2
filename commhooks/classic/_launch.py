"""Defines classic hooks: how they start a bucket, and which callers they refuse."""

import functools
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple, ParamSpec

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from commhooks.classic._owner import Group, owner_of
from commhooks.core.scheme import Scheme
from commhooks.errors import HookNotAttachedError, RegistrationError
from commhooks.wrappers.cast import Cast

__all__ = [
    "BucketFuture",
    "Classic",
    "HookFunction",
    "Launcher",
    "Wires",
    "cast_payloads",
    "classic_hook",
    "classics",
    "launch_on_group",
]

P = ParamSpec("P")
BucketFuture = torch.futures.Future[torch.Tensor]
Wires = tuple[torch.dtype, ...]  # the dtypes that payloads are cast to, innermost first
HookFunction = Callable[[Any, GradBucket], BucketFuture]
Launcher = Callable[[Any, GradBucket, Wires], BucketFuture]


def cast_payloads(scheme: Scheme, wires: Wires) -> Scheme:
    """Returns the scheme inside a ``Cast`` for each dtype."""
    for dtype in wires:
        scheme = Cast(scheme, dtype)
    return scheme


class Classic(NamedTuple):
    """Describes a classic hook, so that a wrapper can change it.

    Attributes:
        launch: starts a bucket with payloads of given dtypes.
        wires: the dtypes that the hook calls ``launch`` with.
    """

    launch: Launcher
    wires: Wires = ()


# Weak: wrappers make new functions, which go with the model that they are registered on.
classics: MutableMapping[Callable[..., Any], Classic] = weakref.WeakKeyDictionary()


def classic_hook(
    launch: Launcher,
) -> Callable[[Callable[P, BucketFuture]], Callable[P, BucketFuture]]:
    """Returns a decorator that registers a hook and checks that its caller is DDP."""

    def decorate(function: Callable[P, BucketFuture]) -> Callable[P, BucketFuture]:
        @functools.wraps(function)  # keeps the annotations, which DDP compares with its own
        def hook(*args: P.args, **kwargs: P.kwargs) -> BucketFuture:
            _check_caller(hook.__name__, args)
            return function(*args, **kwargs)

        classics[hook] = Classic(launch)
        return hook

    return decorate


def _check_caller(name: str, args: tuple[object, ...]) -> None:
    """Raises if a caller's second argument is no bucket.

    FSDP passes tensors, and Dynamo's Python reducer passes tuples: neither uses a returned future.
    """
    given = args[1] if len(args) > 1 else None
    if isinstance(given, Tensor):
        raise RegistrationError(
            f"{name} is a hook for DistributedDataParallel, and was called with a tensor in place "
            f"of a bucket, as FSDP does: a sharded model reduces its gradients itself; wrap it in "
            f"DistributedDataParallel instead"
        )
    if isinstance(given, tuple):
        raise HookNotAttachedError(
            f"{name} got a (gradient, parameter) tuple in place of a bucket, as with "
            f"torch._dynamo.config.optimize_ddp = 'python_reducer', which ignores what hooks "
            f"return. Set optimize_ddp = True (the default), which keeps buckets"
        )


def launch_on_group(scheme: Scheme, group: Group, bucket: GradBucket, wires: Wires) -> BucketFuture:
    """Starts a bucket of a hook whose state is a process group, or None for the model's."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"this hook takes a process group, or None for the model's own, as state; "
            f"got {type(group).__name__}"
        )
    scheme = cast_payloads(scheme, wires) if wires else scheme
    return owner_of(bucket.parameters()).hook(scheme, group, bucket).start(bucket)
