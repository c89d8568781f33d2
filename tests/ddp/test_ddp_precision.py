"""Mixed precision on ddp_core: low in forward and backward, full precision outside, always."""

from __future__ import annotations

import contextlib
import copy
import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_core import DistributedDataParallel, MixedPrecision
from tests.ddp.test_ddp_steps import Net
from tests.tools import models
from tests.tools.harness import on_ranks
from tests.tools.models import loss_of
from tests.tools.training import averaged, batch, equal_on_all_ranks, gradients, mlp, parameters

LOW = MixedPrecision(torch.bfloat16, torch.float32)


def wrapped(module: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module, **{"bucket_cap_mb": 0.002, **options})


def dtypes(model: nn.Module) -> set[torch.dtype]:
    kept = {parameter.dtype for parameter in model.parameters()}
    return kept | {p.grad.dtype for p in model.parameters() if p.grad is not None}


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
@on_ranks(2)
def test_mixed_precision_computes_low_and_leaves_full_precision(
    rank: int, reduce_dtype: torch.dtype | None
) -> None:
    torch.manual_seed(0)
    model = models.Cnn()
    reference = copy.deepcopy(model)
    config = MixedPrecision(torch.bfloat16, reduce_dtype, torch.bfloat16)
    ddp = wrapped(model, mixed_precision=config)
    wire = reduce_dtype or torch.bfloat16
    for step in range(3):
        ddp.zero_grad()
        output = ddp(batch(step, rank, 2, 3, 8, 8))
        assert output.dtype == torch.bfloat16
        loss_of(output).backward()
        low = copy.deepcopy(reference).to(torch.bfloat16)
        loss_of(low(batch(step, rank, 2, 3, 8, 8).bfloat16())).backward()
        for (name, parameter), reference_parameter in zip(
            ddp.module.named_parameters(), low.parameters(), strict=True
        ):
            assert parameter.dtype == parameter.grad.dtype == torch.float32
            expected = reference_parameter.grad.to(wire) * 0.5
            dist.all_reduce(expected)
            assert torch.equal(parameter.grad, expected.float()), name
    assert {b.dtype for b in ddp.module.buffers() if b.is_floating_point()} == {torch.bfloat16}
    with torch.no_grad():
        ddp(batch(9, rank, 2, 3, 8, 8))
    assert {p.dtype for p in ddp.parameters()} == {torch.float32}


@on_ranks(2)
def test_mixed_precision_accumulates_in_full_precision(rank: int) -> None:
    module = mlp()
    ddp = wrapped(
        copy.deepcopy(module), mixed_precision=MixedPrecision(torch.bfloat16, torch.float32)
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        total = None
        for micro in range(3):
            with contextlib.nullcontext() if micro == 2 else ddp.no_sync():
                loss_of(ddp(batch(10 * step + micro, rank, 4, 16))).backward()
            low = copy.deepcopy(ddp.module)
            low.zero_grad()
            low.to(torch.bfloat16)
            loss_of(low(batch(10 * step + micro, rank, 4, 16).bfloat16())).backward()
            part = gradients(low).float()
            total = part if total is None else total + part
        torch.testing.assert_close(gradients(ddp).float(), averaged(total))
        optimizer.step()


@pytest.mark.parametrize("how", ["dropped", "raised"])
@on_ranks(2)
def test_mixed_precision_is_restored_where_no_backward_pass_ends(rank: int, how: str) -> None:
    ddp = wrapped(Net(), mixed_precision=MixedPrecision(torch.bfloat16, torch.float32))
    loss_of(ddp(batch(0, rank, 8, 16))).backward()
    expected = gradients(ddp)
    ddp.zero_grad()
    if how == "raised":
        with pytest.raises(ArithmeticError):
            loss_of(ddp(batch(1, rank, 8, 16), breaks="within")).backward()
    else:
        loss_of(ddp(batch(1, rank, 8, 16)))
    assert {p.dtype for p in ddp.parameters()} == {torch.float32}, "a checkpoint would be low"
    ddp.zero_grad()
    loss_of(ddp(batch(0, rank, 8, 16))).backward()
    assert torch.equal(gradients(ddp), expected), "old gradients have come back"


@on_ranks(2)
def test_a_layer_may_be_frozen_under_mixed_precision(rank: int) -> None:
    ddp = wrapped(
        mlp(), find_unused_parameters=True, mixed_precision=MixedPrecision(torch.bfloat16)
    )
    for freeze in (False, True, False):
        ddp.module[0].weight.requires_grad_(not freeze)
        ddp.zero_grad()
        loss_of(ddp(batch(0, rank, 4, 16))).backward()
        assert (ddp.module[0].weight.grad is None) is freeze
        expected = averaged(gradients(ddp))
        torch.testing.assert_close(gradients(ddp), expected)


# ---- where full precision comes back


class Keeps(nn.Module):
    """A module that keeps its loss as an attribute and returns a tensor without a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.loss = mlp(), torch.zeros(())

    def forward(self, x: Tensor) -> Any:
        output = self.inner(x)
        self.loss = loss_of(output)
        return output.detach()


@on_ranks(2)
def test_full_precision_is_back_after_evaluation_frozen_models_and_kept_graphs(rank: int) -> None:
    x = batch(0, rank, 4, 16)
    model = wrapped(mlp(), mixed_precision=LOW)
    # Evaluation, also where autograd is off for good.
    for quiet in (torch.no_grad, torch.inference_mode):
        with quiet():
            model(x)
        assert dtypes(model) == {torch.float32}
        loss_of(model(x)).backward()
        assert dtypes(model) == {torch.float32}
    # A discriminator that is frozen in the generator's step: no gradient of its own comes.
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    kept = loss_of(model(x.clone().requires_grad_()))
    kept.backward()
    assert dtypes(model) == {torch.float32}, "a checkpoint would be low"
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    # A graph that is kept for a second pass.
    model.zero_grad()
    loss = loss_of(model(x))
    loss.backward(retain_graph=True)
    once = gradients(model)
    model.zero_grad()
    with pytest.raises(RuntimeError, match="came after this step"):
        loss.backward()
    assert dtypes(model) == {torch.float32}
    model.zero_grad()
    loss_of(model(x)).backward()
    assert torch.equal(gradients(model), once)


@on_ranks(2)
def test_a_loss_that_the_module_keeps_leaves_no_low_gradients(rank: int) -> None:
    model = wrapped(Keeps(), mixed_precision=LOW)
    for step in range(2):
        model.zero_grad()
        model(batch(step, rank, 4, 16))
        model.module.loss.backward()
        assert dtypes(model) == {torch.float32}


@on_ranks(2)
def test_an_update_of_the_low_copies_is_not_lost_in_silence(rank: int) -> None:
    model = wrapped(mlp(), mixed_precision=LOW)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = batch(0, rank, 4, 16)
    loss_of(model(x)).backward()
    output = model(x)
    optimizer.step()  # of the low-precision copies
    del output
    with pytest.raises(RuntimeError, match="was changed in place while it was a low-precision"):
        model(x)
    model.zero_grad()
    loss_of(model(x)).backward()


@on_ranks(2)
def test_a_penalty_on_the_weights_before_forward_is_refused(rank: int) -> None:
    model = wrapped(mlp(), mixed_precision=LOW)
    x = batch(0, rank, 4, 16)
    penalty = sum(parameter.square().sum() for parameter in model.parameters())
    before = "as it was before the forward pass, with full precision"
    with pytest.raises(RuntimeError, match=before):
        (loss_of(model(x)) + penalty).backward()


@on_ranks(2)
def test_graphs_that_are_collected_late_do_no_harm(rank: int) -> None:
    """Old graphs in reference cycles are freed at any time, also while parameters are lowered."""
    model = wrapped(mlp(), mixed_precision=LOW)
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for step in range(20):
            output = model(batch(step, rank, 4, 16))
            cycle = [output]
            cycle.append(cycle)
            del cycle
            model.zero_grad()
            loss_of(output).backward()
    finally:
        gc.set_threshold(*before)
    assert dtypes(model) == {torch.float32}
    assert equal_on_all_ranks(parameters(model))
