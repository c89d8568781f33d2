"""Hook functions as DistributedDataParallel takes them."""

import functools
import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks import comm_hook
from commhooks.hook import as_hook

Future = torch.futures.Future


def done(value: float) -> Future[torch.Tensor]:
    future: Future[torch.Tensor] = Future()
    future.set_result(torch.tensor(value))
    return future


def other_names(whatever, grad_bucket, scale=1.0):
    return done(scale)


class CallableObject:
    def __call__(self, state, bucket):
        return done(3.0)

    def method(self, state, b):
        return done(4.0)


def postponed(state: "object", bucket: "GradBucket") -> "Future[torch.Tensor]":
    return done(5.0)


def open_ended(*arguments: Any, **options: Any) -> Any:
    return done(6.0)


CALLABLES = {
    "function": (lambda state, bucket: done(0.0), 0.0),
    "other names": (other_names, 1.0),
    "partial": (functools.partial(other_names, scale=2.0), 2.0),
    "partial of partial": (functools.partial(functools.partial(other_names), scale=2.5), 2.5),
    "object": (CallableObject(), 3.0),
    "method": (CallableObject().method, 4.0),
    "partial of object": (functools.partial(CallableObject()), 3.0),
    "postponed": (postponed, 5.0),
    "open-ended": (open_ended, 6.0),
    "a hook already": (as_hook(other_names), 1.0),
}


def ddp_checks(hook: Any) -> None:
    """Checks a hook as DistributedDataParallel does, without a process group."""
    bare = object.__new__(DistributedDataParallel)
    bare.__dict__["logger"] = None
    DistributedDataParallel._check_comm_hook(bare, hook)


@pytest.mark.parametrize("which", CALLABLES)
def test_any_callable_becomes_a_hook_that_ddp_takes(which: str) -> None:
    function, value = CALLABLES[which]
    hook = as_hook(function)
    ddp_checks(hook)
    assert inspect.isfunction(hook)
    assert hook(None, None).wait().item() == value


@pytest.mark.parametrize("name", [name for name in commhooks.__all__ if name.endswith("_hook")])
def test_every_public_hook_is_one_that_ddp_takes(name: str) -> None:
    if name not in ("as_hook",):
        ddp_checks(getattr(commhooks, name))


def test_a_hook_keeps_the_name_of_what_it_calls() -> None:
    assert as_hook(other_names).__name__ == "other_names"
    assert as_hook(functools.partial(other_names)).__name__ == "other_names"
    assert as_hook(CallableObject()).__name__ == "CallableObject"


def test_state_and_bucket_are_handed_on_as_they_are() -> None:
    seen = []
    hook = as_hook(lambda state, bucket: seen.append((state, bucket)) or done(0.0))
    hook("state", "bucket")
    assert seen == [("state", "bucket")]


@pytest.mark.parametrize(
    "function", [lambda: None, lambda bucket: None, lambda a, b, c: None, lambda *, a, b: None]
)
def test_what_takes_other_arguments_is_refused(function: Any) -> None:
    with pytest.raises(TypeError, match=r"hook\(state, bucket\)"):
        as_hook(function)


@pytest.mark.parametrize("value", [None, 3, "hook", nn.ReLU])
def test_what_is_no_callable_or_takes_no_two_arguments_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="as_hook"):
        as_hook(value)


@pytest.mark.parametrize("result", [None, torch.zeros(1)])
def test_what_returns_no_future_is_an_error(result: Any) -> None:
    with pytest.raises(TypeError, match=r"returns a torch\.futures\.Future"):
        as_hook(lambda state, bucket: result)(None, None)


def test_an_exception_of_the_function_passes_through() -> None:
    def fails(state: object, bucket: object) -> Any:
        raise KeyError("here")

    with pytest.raises(KeyError, match="here"):
        as_hook(fails)(None, None)


def test_a_tuple_for_a_bucket_names_the_compiler_setting() -> None:
    state = commhooks.HookState("none", nn.Linear(2, 2))
    with pytest.raises(commhooks.errors.HookNotAttachedError, match="python_reducer"):
        comm_hook(state, (torch.zeros(1), torch.zeros(1)))
