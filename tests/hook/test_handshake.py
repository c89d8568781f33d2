"""Fields that ranks compare before they go on, and ranks that do not come."""

import time
from collections import OrderedDict
from datetime import timedelta
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
import ddp_core
from commhooks import HookState
from commhooks.checkpoint._format import SavedBuckets
from commhooks.hook import _handshake
from commhooks.hook import _registration as _register
from commhooks.hook import _running as _meeting
from commhooks.hook import _state as _state
from tests.tools.harness import on_ranks, run_ranks
from tests.tools.training import batch, ddp, equal_bits, gradients, mlp, outcome


class OtherDDP(DistributedDataParallel):
    """Another type."""


def _register_own(layout, name="0"):
    # Not synchronised: a wrong name is to be found by the handshake.
    model = nn.Sequential(OrderedDict([(name, nn.Linear(4, 4)), ("1", nn.Linear(4, 4))]))
    model_of_ours = ddp_core.DistributedDataParallel(model, init_sync=False)
    commhooks.register(model_of_ours, "none", layout=layout)


def _agree(change=lambda state: None, call="some call", scheme="none", seed=0):
    state = HookState(scheme, mlp(), seed=seed)
    state.bind()
    change(state)
    state.agree(call)


def _by_place(name, parameter):
    return name.startswith("0")


def _by_kind(name, parameter):
    return name.endswith("bias")


def _differ_in(field, odd, monkeypatch):
    """Differs between ranks in one field; ``odd`` is the rank that does."""
    if field == "call":
        _agree(call="another call" if odd else "some call")
    elif field == "DistributedDataParallel":
        commhooks.register((OtherDDP if odd else DistributedDataParallel)(mlp()), "none")
    elif field == "layout":
        _register_own("shape" if odd else None)
    elif field == "groups of parameters":
        _register_own(_by_place if odd else _by_kind)
    elif field == "scheme and options":
        _agree(scheme="fp16" if odd else "bf16")
    elif field == "commhooks version":
        with mock.patch.object(_handshake, "__version__", "0.0" if odd else _handshake.__version__):
            _agree()
    elif field == "torch version":
        with mock.patch.object(torch, "__version__", "0.0" if odd else torch.__version__):
            _agree()
    elif field == "seed":
        _agree(seed=1 if odd else 0)
    elif field == "step":
        _agree(lambda state: setattr(state.engine, "step", 3 if odd else 0))
    elif field == "order of the saved buckets":
        saved = [["0.weight", "0.bias"]] if odd else [["0.bias", "0.weight"]]
        _agree(lambda state: state._apply_buckets(SavedBuckets(saved)))
    elif field == "buffers to synchronise":
        module = mlp()
        module.register_buffer("here" if odd else "there", torch.ones(3))
        commhooks.register(DistributedDataParallel(module), "none")
    elif field == "arguments of DistributedDataParallel":
        commhooks.register(DistributedDataParallel(mlp(), static_graph=odd), "none")
    elif field == SKIPPED:
        with mock.patch.object(_register, "_has_skipped", return_value=odd):
            commhooks.register(DistributedDataParallel(mlp()), "none")
    elif field == "world size":
        _agree(lambda state: setattr(state.engine, "world_size", 4 if odd else 2))
    elif field == "memory":
        with mock.patch.object(
            _handshake, "_origin", return_value="of rank 0" if odd else "its own"
        ):
            _agree()
    elif field == "environment":
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2" if odd else "1")
        _agree(scheme="sdp4bit")
    elif "verify" in field:
        other = 2 if field == "verify" else commhooks.Verification(3, "raise")
        commhooks.register(DistributedDataParallel(mlp()), "none", verify=other if odd else 3)
    elif field == "parameters":
        _register_own(None, name="zero" if odd else "0")
    elif field == COMPARED:
        frozen, name = mlp(), "odd" if odd else "even"
        frozen.register_parameter(name, nn.Parameter(torch.zeros(2), requires_grad=False))
        commhooks.register(DistributedDataParallel(frozen), "none", verify=3)


COMPARED = "parameters to compare"
SKIPPED = "trained before, with buckets that torch skips"
FIELDS = [
    "call",
    SKIPPED,
    "DistributedDataParallel",
    "layout",
    "groups of parameters",
    "scheme and options",
    "commhooks version",
    "torch version",
    "seed",
    "step",
    "order of the saved buckets",
    "world size",
    "memory",
    "buffers to synchronise",
    "arguments of DistributedDataParallel",
    "environment",
    "verify",
    "action of verify",
    COMPARED,
    "parameters",
]


@on_ranks(2)
def test_every_field_that_differs_is_named(rank: int) -> None:
    seen = set()
    handshake = _meeting.handshake

    def watched(call, facts, group, limit=None, **options):
        seen.update({"call", *facts})
        return handshake(call, facts, group, limit, **options)

    errors = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_meeting, "handshake", watched)
        for field in FIELDS:
            errors[field] = outcome(_differ_in, field, rank == 1, patch)
    assert seen == set(FIELDS)  # a new field belongs into this test
    for field, error in errors.items():
        assert error is not None, field
        name, text = error
        assert name == "MismatchError", (field, text)
        assert f": {field} differ" in text, (field, text)


# ---- ranks that do not come


def _limit(seconds):
    _register.HANDSHAKE_LIMIT = _state.HANDSHAKE_LIMIT = timedelta(seconds=seconds)


def _do_not_come(rank, world_size):
    model = ddp(mlp())
    _limit(1)
    errors = []
    if rank != 2:
        errors.append(outcome(commhooks.register, model, "powersgd"))
    else:
        time.sleep(1.5)
    _limit(20)
    hook = commhooks.register(model, "powersgd")  # all, so the call before is forgotten
    if rank != 0:
        _limit(1)
        errors.append(outcome(hook.switch, "fp16"))
    else:
        time.sleep(1.5)
    model(batch(0, rank, 4, 16)).square().sum().backward()
    _limit(20)
    hook.switch("fp16")
    return errors, gradients(model), repr(hook)


def test_a_rank_that_does_not_come_is_named_and_the_others_can_call_again():
    results = run_ranks(_do_not_come, 3)
    assert equal_bits([grads for _, grads, _ in results])
    for errors, _, text in results:
        assert "fp16" in text.lower() or "float16" in text.lower()
        for name, message in errors:
            assert name == "MissingRankError"
            call, missing = (
                ("commhooks.register", "rank 2")
                if "register" in message
                else ("HookState.switch", "rank 0")
            )
            assert message.startswith(f"{call}: not every rank came: {missing} did not within 1 s")
    assert [len(errors) for errors, _, _ in results] == [1, 2, 1]
