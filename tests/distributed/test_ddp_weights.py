"""Means weighted by tokens: ranks count by what they have seen."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import commhooks
from ddp_core import DistributedDataParallel, MixedPrecision
from tests.distributed.harness import RankError, run_ranks
from tests.distributed.training import averaged, batch, gradients, mlp, outcome

SMALL = {"bucket_cap_mb": 0.002}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "view": {"gradient_as_bucket_view": True},
    "find_unused": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "precision": {"mixed_precision": MixedPrecision(None, torch.float32)},
}
MANY = 2**16  # entries of a gradient that is copied as it arrives


class Tokens(nn.Module):
    """Small and large layers; one gradient is sparse, one complex."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(9, 16, sparse=True)
        self.body = mlp()
        self.large = nn.Linear(16, MANY // 16, bias=False)
        self.wave = nn.Parameter(torch.randn(16, 16, dtype=torch.complex64) / 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x + self.embedding(x[:, 0].abs().long() % 9))
        wave = y.to(self.wave.dtype) @ self.wave
        y = y + wave.real + wave.imag
        return y + self.large(y)[:, :16]


def losses(model: nn.Module, tokens: Tensor) -> Tensor:
    """The loss of each token."""
    return model(tokens).square().sum(1)


def count(step: int, micro: int, rank: int) -> int:
    """Of tokens; some passes have none on some ranks."""
    return 0 if micro == 0 and (step + rank) % 3 == 1 else 1 + (7 * step + 3 * micro + rank) % 5


def expected(net: nn.Module, step: int, micros: int, ranks: int) -> Tensor:
    """The gradient of the mean loss over all tokens of a step."""
    net.zero_grad()
    rows = [
        batch(10 * step + micro, rank, count(step, micro, rank), 16)
        for rank in range(ranks)
        for micro in range(micros)
    ]
    everything = torch.cat(rows)
    torch.stack([losses(net, one).sum() for one in rows if len(one)]).sum().div(
        len(everything)
    ).backward()
    return gradients(net)


def loss_of(kind: str, model: nn.Module, tokens: Tensor) -> Tensor:
    """Of rows that are padded, as those of text; NaN, as its gradient is, for a mean of nothing."""
    padded = torch.cat([tokens, torch.ones(2, 16)])
    mask = torch.arange(len(padded)) < len(tokens)
    total = (losses(model, padded) * mask).sum()
    return total / mask.sum() if kind == "mean" else total


def _mean_over_all(rank: int, world_size: int, kind: str, options: dict[str, Any]) -> None:
    net: Any = Tokens if not options or "gradient_as_bucket_view" in options else mlp
    model: Any = DistributedDataParallel(net(), weighted=kind, **SMALL, **options)
    local = net()
    for micros in (1, 3):
        for step in range(4):
            model.zero_grad()
            for micro in range(micros):
                tokens = batch(10 * step + micro, rank, count(step, micro, rank), 16)
                model.weight(len(tokens) if step % 2 else torch.tensor(len(tokens)))
                with contextlib.nullcontext() if micro == micros - 1 else model.no_sync():
                    loss_of(kind, model, tokens).backward()
            torch.testing.assert_close(
                gradients(model).to(torch.float32),
                expected(local, step, micros, world_size).to(torch.float32),
            )


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", ["mean", "sum"])
def test_the_gradient_is_that_of_the_mean_over_all_tokens(kind: str, options: str) -> None:
    run_ranks(_mean_over_all, 3, kind, OPTIONS[options])


def _held(rank: int, world_size: int, kind: str) -> None:
    """Ranks run different numbers of passes, one of them none in some steps."""
    model, local = DistributedDataParallel(mlp(), weighted=kind, **SMALL), mlp()
    for step in range(4):
        passes = [(step + one) % 3 for one in range(world_size)]
        model.zero_grad()
        local.zero_grad()
        with model.hold():
            for micro in range(passes[rank]):
                tokens = batch(10 * step + micro, rank, micro + 1 + rank, 16)
                model.weight(len(tokens))
                loss_of(kind, model, tokens).backward()
        model.reduce()
        rows = [
            batch(10 * step + micro, one, micro + 1 + one, 16)
            for one in range(world_size)
            for micro in range(passes[one])
        ]
        losses(local, torch.cat(rows)).mean().backward()
        torch.testing.assert_close(gradients(model), gradients(local))


@pytest.mark.parametrize("kind", ["mean", "sum"])
def test_held_passes_count_with_their_weights(kind: str) -> None:
    run_ranks(_held, 3, kind)


def _one_weight(rank: int, world_size: int, kind: str) -> None:
    """Several losses have one weight; that of sums may be told after their passes."""
    model: Any = DistributedDataParallel(mlp(), weighted=kind, **SMALL)
    local = mlp()
    for step in range(2):
        model.zero_grad()
        local.zero_grad()
        tokens = batch(step, rank, 2 + 3 * rank, 16)
        late = kind == "sum" and step == 1
        if not late:
            model.weight(99)  # of a pass that was left out
            model.weight(len(tokens))
        with model.hold():
            for shifted in (tokens, tokens + 1):
                loss_of(kind, model, shifted).backward()
        if late:
            model.weight(len(tokens))
        model.reduce()
        rows = torch.cat([batch(step, one, 2 + 3 * one, 16) for one in range(world_size)])
        (losses(local, rows).mean() + losses(local, rows + 1).mean()).backward()
        torch.testing.assert_close(gradients(model), gradients(local))


@pytest.mark.parametrize("kind", ["mean", "sum"])
def test_one_weight_holds_for_several_passes(kind: str) -> None:
    run_ranks(_one_weight, 2, kind)


def _equal_weights(rank: int, world_size: int, scheme: str, weight: float) -> None:
    weighted: Any = DistributedDataParallel(mlp(), weighted="mean", **SMALL)
    plain = DistributedDataParallel(mlp(), **SMALL)
    hooks = [commhooks.register(one, scheme) for one in (weighted, plain) if scheme]
    for step in range(3):
        tokens = batch(step, rank, 4, 16)
        for model in (weighted, plain):
            model.zero_grad()
            if model is weighted:
                model.weight(weight)
            losses(model, tokens).mean().backward()
        assert torch.equal(gradients(weighted), gradients(plain))
    del hooks


@pytest.mark.parametrize("scheme", ["", "none", "int8", "powersgd"])
def test_equal_weights_give_the_bits_of_the_plain_mean(scheme: str) -> None:
    # Three tenths are no sum of three tenths, twice over, in floating point.
    run_ranks(_equal_weights, 3, scheme, 0.1)


def _through_schemes(rank: int, world_size: int, scheme: str) -> None:
    """What was applied plus what is held back is the sum of the weighted means."""
    net, model = mlp(), DistributedDataParallel(mlp(), weighted="mean", **SMALL)
    hook = commhooks.register(model, scheme)
    applied = wanted = torch.zeros(())
    for step in range(6):
        model.zero_grad()
        # Very unequal: residuals of one step are those of another one's units.
        tokens = batch(step, rank, 1 + 30 * ((step + rank) % 2), 16)
        model.weight(len(tokens))
        losses(model, tokens).mean().backward()
        net.zero_grad()
        rows = [batch(step, one, 1 + 30 * ((step + one) % 2), 16) for one in range(world_size)]
        losses(net, torch.cat(rows)).mean().backward()
        applied, wanted = applied + gradients(model), wanted + gradients(net)
    kept = torch.cat([hook.residual(name).reshape(-1) for name, _ in net.named_parameters()])
    torch.testing.assert_close(
        (applied + averaged(kept.to(torch.float64))).to(torch.float32), wanted.to(torch.float32)
    )


@pytest.mark.parametrize("scheme", ["topk", "onebit", "powersgd", "int4"])
def test_residuals_of_steps_with_other_weights_add_up(scheme: str) -> None:
    run_ranks(_through_schemes, 2, scheme)


def _uneven(rank: int, world_size: int, hooked: bool, static: bool) -> None:
    model, net = DistributedDataParallel(mlp(), weighted="mean", **SMALL), mlp()
    hook = commhooks.register(model, "none") if hooked else None
    with model.join(divide_by_initial_world_size=static):
        for step in range(1 + 2 * rank):
            model.zero_grad()
            model.weight(3 + rank)
            losses(model, batch(step, rank, 3 + rank, 16)).mean().backward()
            net.zero_grad()
            rows = [
                batch(step, one, 3 + one, 16) for one in range(world_size) if step < 1 + 2 * one
            ]
            losses(net, torch.cat(rows)).mean().backward()
            torch.testing.assert_close(gradients(model), gradients(net))
    assert hook is None or hook.step == 1 + 2 * (world_size - 1)


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("static", [False, True])
def test_ranks_without_inputs_weigh_nothing(hooked: bool, static: bool) -> None:
    run_ranks(_uneven, 3, hooked, static)


# ---- errors


def _a_step(model: Any, step: int, rank: int, weight: float | None) -> None:
    if weight is not None:
        model.weight(weight)
    losses(model, batch(step, rank, 4, 16)).mean().backward()


def _errors(rank: int, world_size: int, kind: str, options: dict[str, Any]) -> None:
    model, net = DistributedDataParallel(mlp(), weighted=kind, **SMALL, **options), mlp()
    hook = commhooks.register(model, "none")

    def goes_on(step: int) -> None:
        """The next step is right."""
        model.zero_grad()
        _a_step(model, step, rank, 2.0)
        net.zero_grad()
        losses(net, batch(step, rank, 4, 16)).mean().backward()
        factor = 1 if kind == "mean" else 1 / 2
        torch.testing.assert_close(gradients(model), averaged(gradients(net)) * factor)

    # Forgotten on one rank: all raise, at once and alike.
    got, text = outcome(_a_step, model, 0, rank, None if rank == 1 else 5.0) or ("", "")
    assert got == "RuntimeError"
    assert "was not called" in text
    assert "on rank 1." in text
    goes_on(1)
    model.zero_grad()
    got, text = outcome(_a_step, model, 2, rank, 0) or ("", "")
    assert got == "ValueError"
    assert "there is no mean" in text
    goes_on(3)
    # The gradient of the step before is still there.
    got, text = outcome(_a_step, model, 4, rank, 2.0) or ("", "")
    assert got == "RuntimeError"
    assert "zero_grad" in text
    goes_on(5)
    assert hook.step == 3
    for wrong in (float("nan"), float("inf"), -1, torch.tensor(float("nan"))):
        assert (outcome(model.weight, wrong) or ("", ""))[0] == "ValueError"
    for wrong in ("3", None, True, torch.ones(2), 1j):
        assert (outcome(model.weight, wrong) or ("", ""))[0] == "TypeError"


@pytest.mark.parametrize("options", ["plain", "view", "find_unused"])
@pytest.mark.parametrize("kind", ["mean", "sum"])
def test_a_weight_that_is_missing_is_an_error_on_all_ranks(kind: str, options: str) -> None:
    run_ranks(_errors, 2, kind, OPTIONS[options])


def _forgotten_in_hold(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(mlp(), weighted="sum", **SMALL)
    with model.hold():
        _a_step(model, 0, rank, 3.0 if rank else None)
    got, text = outcome(model.reduce) or ("", "")
    assert got == "RuntimeError"
    assert "on rank 0." in text
    model.zero_grad()
    with model.hold():
        _a_step(model, 0, rank, 3.0)
    model.reduce()


def test_a_weight_that_is_missing_is_found_by_reduce() -> None:
    run_ranks(_forgotten_in_hold, 2)


def _dropped(rank: int, world_size: int) -> None:
    """zero_grad() between passes drops their weights; a weight of 0 after others is refused."""
    model: Any = DistributedDataParallel(mlp(), weighted="mean", **SMALL)
    net = mlp()
    for to_none in (True, False):
        model.zero_grad()
        net.zero_grad()
        with model.no_sync():
            _a_step(model, 0, rank, 1000.0 + rank)
        model.zero_grad(set_to_none=to_none)
        _a_step(model, 1, rank, 2.0)
        losses(net, batch(1, rank, 4, 16)).mean().backward()
        torch.testing.assert_close(gradients(model), averaged(gradients(net)))
    model.zero_grad()
    with model.no_sync():
        _a_step(model, 0, rank, 3)
    got, text = outcome(model.weight, 0) or ("", "")
    assert got == "ValueError"
    assert "weighted='sum'" in text


def test_zero_grad_drops_the_weights_of_what_it_drops() -> None:
    run_ranks(_dropped, 2)


def _refused(rank: int, world_size: int) -> None:
    net = mlp()
    plain = DistributedDataParallel(net)
    assert "weighted='mean'" in (outcome(plain.weight, 3) or ("", ""))[1]
    assert (outcome(DistributedDataParallel, net, weighted="tokens") or ("",))[0] == "ValueError"
    late = [("0.bias", net[0].bias)]
    options = {"delay_all_reduce_named_params": late, "param_to_hook_all_reduce": net[2].weight}
    got, text = outcome(DistributedDataParallel, net, weighted="sum", **options) or ("", "")
    assert got == "ValueError"
    assert "delay_all_reduce_named_params" in text
    kind: Any = "mean" if rank else None
    got, text = outcome(DistributedDataParallel, mlp(), weighted=kind) or ("", "")
    assert got == "MismatchError"
    assert "rank 0 has weighted=None, rank 1 has weighted='mean'" in text


def test_what_cannot_be_weighted_is_refused() -> None:
    run_ranks(_refused, 2)


def _leaves(rank: int, world_size: int) -> str:
    model = DistributedDataParallel(mlp(), weighted="mean", **SMALL)
    if rank:
        raise ArithmeticError("on purpose")
    return (outcome(_a_step, model, 0, rank, 2.0) or ("", ""))[0]


def test_a_rank_that_raises_before_its_weight_ends_the_others() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(_leaves, 2)
    assert caught.value.ranks == [1]
