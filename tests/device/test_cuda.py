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
import commhooks.research.baselines
import ddp_core
from commhooks.hook._engine import Engine
from ddp_core import simulate
from tests.shelf import BASELINES, BUILT_IN

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


@pytest.mark.parametrize("name", [*BUILT_IN, *BASELINES])
def test_a_scheme_gives_on_cuda_what_it_gives_on_the_cpu(name: str) -> None:
    on_cuda, on_cpu = means(name, "cuda"), means(name, "cpu")
    assert all(mean.is_cuda for mean in on_cuda)
    # Sums in another order, three steps of feedback; one ulp of 16 bits.
    tolerance = 1e-2 if "16" in name else 1e-4
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


@pytest.fixture(scope="module")  # a communicator takes a second or two
def nccl() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", init_method=f"file://{folder}/s", rank=0, world_size=1)
        yield
        dist.destroy_process_group()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).cuda()


def check_that_backward_gives_the_schemes_average(
    name: str, model: nn.Module, bucket_cap_mb: float = 1.0
) -> None:
    """Gradients read right after backward are those of the scheme, bit for bit, in every step."""
    first = next(model.parameters())
    device, width = first.device, first.shape[1]
    ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=True)
    hook = commhooks.register(ddp, name)
    start, seen = hook.start, []

    def record(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        layout = hook.parameters.layout(bucket.parameters())
        seen.append((layout, bucket.buffer().clone(), bucket.is_last(), bucket.gradients()))
        return start(bucket)

    hook.start = record
    reference = Engine(hook.scheme, rank=0, world_size=1)
    inputs = torch.randn(16, width, device=device)
    for step in range(5):
        ddp(inputs).square().mean().backward()
        for number, (layout, sent, is_last, gradients) in enumerate(seen):
            reference.begin_bucket(number, is_last=is_last)
            (mean,) = simulate([reference.exchange(sent, layout)])
            actual = torch.cat([gradient.flatten() for gradient in gradients])
            assert torch.equal(actual, mean), (step, number)
        seen.clear()
        ddp.zero_grad()
    hook.close()


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("name", BUILT_IN)
def test_ddp_waits_for_the_side_stream(name: str) -> None:
    check_that_backward_gives_the_schemes_average(name, network())


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
@pytest.mark.parametrize("mixed", [False, True])
def test_our_ddp_takes_sync_batch_norm_and_mixed_precision_on_cuda(mixed: bool) -> None:
    # Not both: weights in bfloat16 with statistics in float32 are for PyTorch to refuse.
    norm = nn.LayerNorm(16) if mixed else nn.BatchNorm1d(16)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(16, 16), norm).cuda())
    precision = ddp_core.MixedPrecision(torch.bfloat16) if mixed else None
    ddp = ddp_core.DistributedDataParallel(model, device_ids=[0], mixed_precision=precision)
    for _ in range(3):
        ddp(torch.randn(8, 16)).float().square().mean().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in ddp.parameters())
