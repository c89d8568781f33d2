"""``register(model, "auto")`` between real processes: all ranks take one decision, and keep it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.core.dense import Dense
from commhooks.predict.advise import Option, made_candidates
from commhooks.predict.search import chosen, promising
from commhooks.predict.step import Step
from ddp_core import DistributedDataParallel as CoreDDP
from tests.distributed.harness import run_ranks
from tests.distributed.training import mlp

STEPS = 60


@contextmanager
def _slow_line(seconds_per_byte: float) -> Iterator[None]:
    """Makes every message take longer, as on a slow line."""
    from ddp_core import AllGather, AllReduce, AllToAll

    def slowed(kind: type[Any]) -> Any:
        issue = kind.issue

        def slow(request: Any, group: Any) -> Any:
            time.sleep(request.wire_nbytes(group.size()) * seconds_per_byte)
            return issue(request, group)

        return mock.patch.object(kind, "issue", slow)

    with slowed(AllReduce), slowed(AllGather), slowed(AllToAll):
        yield


def _train(rank: int, world_size: int, kind: str, seconds_per_byte: float) -> dict[str, Any]:
    torch.manual_seed(0)
    model: nn.Module = mlp(256, 2)
    ddp = (CoreDDP if kind == "core" else DistributedDataParallel)(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    hook: Any = commhooks.register(
        ddp, "auto", candidates=["int8", "topk"], measure_steps=3, link_s=0.2
    )
    with _slow_line(seconds_per_byte):
        for step in range(STEPS):
            optimizer.zero_grad()
            torch.manual_seed(10 * step + rank)
            ddp(torch.randn(8, 256)).square().mean().backward()
            optimizer.step()
            if hook._search.over:
                break
    return {
        "plan": hook.plan,
        "scheme": str(hook.scheme),
        "step": hook.step,
        "parameters": torch.cat([one.detach().reshape(-1) for one in model.parameters()]),
    }


@pytest.mark.parametrize("kind", ["core", "torch"])
def test_a_slow_line_gets_a_scheme_within_the_budget_of_error(kind: str) -> None:
    ranks = run_ranks(_train, 2, kind, 5e-8)  # 0.5 MB in 25 ms
    assert "int8" in ranks[0]["scheme"], ranks[0]["plan"]  # top-k is beyond the budget
    assert "auto runs int8" in ranks[0]["plan"]
    for one in ranks[1:]:
        assert (one["scheme"], one["step"]) == (ranks[0]["scheme"], ranks[0]["step"])
        assert torch.equal(one["parameters"], ranks[0]["parameters"])


def _option(name: str, seconds: float, error: float = 0.0) -> Option:
    return Option(name, Dense(), 8.0, Step(seconds, 1.0, 0.0, 0.0, 0, 0.0, 1), error)


def test_what_is_tried_is_near_the_best_and_dense_comes_last() -> None:
    options = [
        _option(*one) for one in [("a", 1.0), ("b", 1.05), ("b", 1.06), ("c", 1.2), ("none", 2.0)]
    ]
    assert [one.name for one in promising(options)] == ["a", "b", "none"]
    assert promising([_option("none", 1.0), _option("a", 1.2)]) == []


def test_the_fastest_is_kept_unless_dense_or_a_more_exact_one_is_as_fast() -> None:
    fast, exact, dense = _option("a", 1.0, 0.1), _option("b", 1.0, 0.01), _option("none", 1.0)
    assert chosen([(1.0, fast), (1.5, exact), (2.0, dense)], 2.0) == (1.0, fast)
    assert chosen([(1.0, fast), (1.01, exact), (2.0, dense)], 2.0) == (1.01, exact)
    assert chosen([(1.99, fast)], 2.0) is None
    assert chosen([], 2.0) is None


def _resume(rank: int, world_size: int) -> tuple[str, str, int]:
    ddp = CoreDDP(mlp())
    hook = commhooks.register(ddp, "int8")
    again = commhooks.register(CoreDDP(mlp()), "auto", candidates=["int8"])
    again.load_state_dict(hook.state_dict(gather=True))
    scheme = str(again.scheme)
    again.switch("bf16")  # the user decides from here on
    return scheme, again.plan, again.step  # type: ignore[attr-defined]


def test_a_resumed_run_goes_on_with_the_scheme_that_was_chosen() -> None:
    for scheme, plan, _ in run_ranks(_resume, 2):
        assert "int8" in scheme
        assert "chosen by hook.switch" in plan


def test_a_wrong_setting_is_refused_before_training() -> None:
    with pytest.raises(ValueError, match="no average"):
        made_candidates(["noop"])
    assert math.isclose(made_candidates([])["none"].traits.error.variance, 0.0)
