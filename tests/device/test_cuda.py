"""Schemes, memory and the stream driver on a CUDA device; skipped where there is none."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import commhooks
import ddp_core

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SHAPES = {"conv": (16, 8, 3, 3), "bias": (16,), "weight": (64, 48), "twin": (64, 48)}


def means(name: str, device: str, steps: int = 3) -> list[Tensor]:
    ranks = commhooks.Simulation(name, SHAPES, world_size=3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        grads = [torch.randn(ranks.layout.numel, generator=generator) for _ in range(3)]
        result = ranks.step([grad.to(device) for grad in grads])
    return result


@pytest.mark.parametrize("name", commhooks.scheme_names())
def test_a_scheme_gives_on_cuda_what_it_gives_on_the_cpu(name: str) -> None:
    on_cuda, on_cpu = means(name, "cuda"), means(name, "cpu")
    assert all(mean.is_cuda for mean in on_cuda)
    # Sums in another order, three steps of feedback; one level of 8 bits, or one ulp of 16.
    tolerance = 2e-2 if "quantization" in name else 1e-2 if "16" in name else 1e-4
    for left, right in zip(on_cuda, on_cpu, strict=True):
        assert_close(left.cpu(), right, rtol=tolerance, atol=tolerance)


def test_one_infinite_gradient_leaves_the_memory_as_it_was() -> None:
    ranks = commhooks.Simulation("powersgd", SHAPES, world_size=2)
    good = [torch.randn(ranks.layout.numel, device="cuda") for _ in range(2)]
    bad = [good[0].clone(), good[1].clone()]
    bad[1][0] = float("inf")
    ranks.step(good)
    before = [ranks.memory(rank).clone() for rank in range(2)]
    assert not any(mean.isfinite().all() for mean in ranks.step(bad))
    for rank in range(2):
        assert torch.equal(ranks.memory(rank), before[rank])


@pytest.fixture
def nccl() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", init_method=f"file://{folder}/s", rank=0, world_size=1)
        yield
        dist.destroy_process_group()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).cuda()


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("name", [name for name in commhooks.scheme_names() if name != "noop"])
def test_ddp_waits_for_the_side_stream(name: str) -> None:
    """Gradients read right after backward are the averaged ones, step after step."""
    plain, hooked = network(), network()
    ddp = DistributedDataParallel(hooked, device_ids=[0], bucket_cap_mb=1)
    hook = commhooks.register(ddp, name, error_feedback=False)
    x = torch.randn(16, 512, device="cuda")
    lossy = commhooks.make(name, error_feedback=False).traits.biased or "16" in name
    for _ in range(5):
        for model in (plain, ddp):
            model.zero_grad()
            model(x).square().mean().backward()
        for expected, got in zip(plain.parameters(), hooked.parameters(), strict=True):
            assert got.grad.isfinite().all()
            if not lossy:
                assert torch.equal(got.grad, expected.grad)
            elif "powersgd" not in name:
                assert_close(
                    got.grad, expected.grad, rtol=1e-2, atol=float(expected.grad.abs().max()) / 100
                )
    hook.close()


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("scheme", [None, "none", "fp16", "powersgd"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
    ],
    ids=["plain", "view", "static", "unused"],
)
def test_our_ddp_trains_on_cuda_as_torchs(options: dict[str, bool], scheme: str | None) -> None:
    trained = []
    for cls in (DistributedDataParallel, ddp_core.DistributedDataParallel):
        model = cls(network(), device_ids=[0], bucket_cap_mb=1, **options)
        if scheme is not None:
            commhooks.register(model, scheme)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for step in range(5):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(step)
            model(torch.randn(8, 512, generator=generator)).square().mean().backward()
            optimizer.step()
        trained.append([parameter.detach().cpu() for parameter in model.parameters()])
    for left, right in zip(*trained, strict=True):
        assert_close(left, right, rtol=0, atol=0)


@pytest.mark.usefixtures("nccl")
def test_our_ddp_takes_sync_batch_norm_and_mixed_precision_on_cuda() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)).cuda()
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    ddp = ddp_core.DistributedDataParallel(
        model, device_ids=[0], mixed_precision=ddp_core.MixedPrecision(torch.bfloat16)
    )
    for _ in range(3):
        ddp(torch.randn(8, 16)).float().square().mean().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in ddp.parameters())
