"""Ranks whose parameters differ are named: while training, and once on request."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.errors import MismatchError, RegistrationError, VerificationError
from commhooks.verify import Verification
from commhooks.verify._equal import hashes_of, keeps_equal
from commhooks.wrappers import Schedule
from ddp_core import DistributedDataParallel as CoreDDP
from ddp_core import MixedPrecision
from tests.device.deferred_device import Order, lazy_device
from tests.fsdp.test_fsdp2 import backward, model_of, sharded
from tests.hosts.test_tensor_parallel import _build
from tests.shelf import BUILT_IN
from tests.tools.harness import on_ranks
from tests.tools.training import everyone, mlp
from tests.verify.test_verify import findings

KINDS: dict[str, Any] = {"torch": DistributedDataParallel, "core": CoreDDP}
LARGE = 2**17  # smaller tensors are hashed together
DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn),
    *(torch.complex64, torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint8),
    torch.bool,
]


def hashes(x: Tensor, sizes: list[int]) -> Tensor:
    return hashes_of(x.split(sizes))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_hash_is_of_every_bit_whatever_the_dtype(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [(), (0,), (3, 5), (LARGE + 9,), (7,), (2, 3, 4)]
    some = [torch.randn(size, generator=generator).mul(50).to(dtype) for size in sizes]
    tensors = [some[3], torch.ones(3, dtype=torch.int32), *some, some[2].t()]
    kept = [tensor.clone() for tensor in tensors]
    before = hashes_of(tensors)
    assert all(map(torch.equal, tensors, kept))
    assert before.tolist() == hashes_of(kept).tolist()
    # In row-major order, wherever entries lie.
    assert hashes_of([some[2].t().contiguous()]) == hashes_of([some[2].t()])
    for place in (0, 2, 4, 5, 6, 7):
        changed = list(tensors)
        changed[place] = tensors[place].clone()
        flat = changed[place].view(-1).view(torch.uint8)
        flat[len(flat) // 2] ^= 1
        assert (hashes_of(changed) != before).nonzero().view(-1).tolist() == [place]


@pytest.mark.parametrize("order", ["late", "early"])
def test_hashes_of_the_host_and_of_a_device_wait_for_nothing(order: Order) -> None:
    host, other = torch.arange(5.0), torch.arange(7.0)
    expected = hashes_of([host, other])
    with lazy_device(order) as machine:
        on_device = torch.empty(7, device="meta")
        on_device.copy_(other, non_blocking=True)
        assert torch.equal(machine.read(hashes_of([host, on_device])), expected)


def test_a_hash_depends_on_the_order_of_chunks_and_entries() -> None:
    x = torch.randn(LARGE, generator=torch.Generator().manual_seed(0))
    swapped = torch.cat([*x.chunk(2)][::-1])
    assert hashes(swapped, [LARGE]) != hashes(x, [LARGE])
    swapped = x[[1, 0, *range(2, LARGE)]]
    assert hashes(swapped, [LARGE]) != hashes(x, [LARGE])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_two_wrong_signs_do_not_cancel_in_a_hash(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, generator=generator).sign().to(dtype) * 0.5
    before = hashes(x, [1000])
    for _ in range(100):
        places = torch.randperm(1000, generator=generator)[:2]
        y = x.clone()
        y[places] *= -1
        assert hashes(y, [1000]) != before
    flipped = x.clone()  # a power of two apart, where a product modulo 2^32 may be the same
    flipped[::128] *= 2
    shifted = x.clone()
    shifted[64::128] *= 2
    assert hashes(flipped, [1000]) != hashes(shifted, [1000])


def test_nan_is_equal_to_itself_and_zeros_to_each_other() -> None:
    x = torch.tensor([torch.nan, 0.0, torch.inf])
    assert hashes_of([x]) == hashes_of([torch.tensor([torch.nan, -0.0, torch.inf])])
    assert hashes_of([x]) != hashes_of([torch.tensor([torch.nan, 0.0, -torch.inf])])
    assert hashes_of([]).tolist() == []


def test_schemes_that_let_ranks_go_apart_promise_nothing() -> None:
    apart = {name for name in BUILT_IN if not keeps_equal(commhooks.make(name))}
    assert apart == {"noop", "gossip"}
    # As a whole it returns updates, and some steps are local all the same.
    local = Schedule([(0, commhooks.make("noop")), (5, commhooks.make("dgc"))])
    assert local.traits.averages
    assert not keeps_equal(local)
    verification = Verification(1)
    verification._group = object()  # type: ignore[assignment]
    verification._values = lambda: {"weight": torch.ones(3)}
    verification._names = ("weight",)
    for name, noted in (("int8", True), ("noop", False), ("int8", False)):
        verification._noted = None
        verification.on_first_bucket(0, commhooks.make(name))
        assert (verification._noted is not None) == noted


# ---- while training


class _Part(nn.Module):
    """Has parameters that are not trained, and one that is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(16, 3)
        self.frozen = nn.Parameter(torch.full((3,), torch.nan), requires_grad=False)
        self.alone = nn.Parameter(torch.ones(2), requires_grad=False)
        self._ddp_params_and_buffers_to_ignore = ["alone"]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def _moved(rank: int, kind: str, action: Any) -> tuple[Any, str]:
    """The hook and its warnings after four steps, in the third of which parameters differ."""
    ddp = KINDS[kind](_Part(), bucket_cap_mb=0.001)
    hook = commhooks.register(ddp, "int8", verify=Verification(2, action))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        ddp.module.alone.fill_(rank)
        for step in range(4):
            if step == 2 and rank == 1:
                ddp.module.layers[2].weight[3, 3] += 1e-6
                ddp.module.layers[4].bias.neg_()
            if step == 2 and rank == 2:
                ddp.module.frozen[0] = 1.0
            optimizer.zero_grad()
            with torch.enable_grad():
                ddp(torch.randn(4, 16)).square().mean().backward()
            optimizer.step()
        hook.verification.report()
    return hook, "\n".join(str(each.message) for each in caught)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(3)
def test_the_first_parameter_that_differs_is_named_with_its_ranks(rank: int, kind: str) -> None:
    hook, text = _moved(rank, kind, "warn")
    assert findings(hook) == [
        (2, -1, "frozen", "parameters differ", (2,)),
        (2, -1, "layers.2.weight", "parameters differ", (1,)),
    ]
    first = "step 2, rank 2, parameter 'frozen': before this step it has other bits here than "
    assert (f"{first}on ranks 0, 1: which agree." in text) == (rank != 1)


@on_ranks(3)
def test_with_raise_every_rank_raises_where_parameters_differ(rank: int) -> None:
    with pytest.raises(VerificationError) as caught:
        _moved(rank, "core", "raise")
    second = "step 2, rank 1, parameter 'layers.2.weight': before this step it has, and 1 more"
    assert f"{second} parameters have, other bits here than on ranks 0, 2" in str(caught.value)
    assert everyone(str(caught.value)) == [str(caught.value)] * 3


@on_ranks(2, ignore_warnings=(".*deprecated",))
def test_parameters_are_compared_in_full_precision_and_before_they_are_stepped(rank: int) -> None:
    """In whatever form parameters are within backward."""
    low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for mode in ("precision", "in backward"):
        options = {"mixed_precision": low} if mode == "precision" else {}
        module = mlp(16, 3)
        if mode == "in backward":
            settings = {"lr": 0.1}
            _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), settings)
            optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
        else:
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        ddp = CoreDDP(module, bucket_cap_mb=0.001, **options)
        hook = commhooks.register(ddp, "none", verify=1)
        for step in range(4):
            torch.manual_seed(10 * step + rank)
            if step == 3 and rank:
                with torch.no_grad():  # far below what 16 bits tell
                    module[2].weight[0, 0] *= 1.00001
            ddp.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore" if step == 3 else "error", RuntimeWarning)
                ddp(torch.randn(4, 16)).float().square().mean().backward()
            optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            hook.verification.report()
        assert findings(hook) == [(3, -1, "2.weight", "parameters differ", (1,))], mode
        hook.close()


@on_ranks(4, ignore_warnings=("commhooks:",))
def test_replicas_of_a_shard_are_compared_with_each_other(rank: int) -> None:
    """Replicas of a shard of FSDP2, and of a rank of tensor parallelism."""
    for names in (("replicate", "shard"), ("dp", "tp")):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        model: nn.Module
        options: dict[str, Any] = {}
        if names[1] == "tp":
            model = CoreDDP(_build(mesh), device_mesh=mesh["dp"])
            moved, named = "module.2.weight", "2.weight"
        else:
            model = sharded(model_of((33, 64, 7)), mesh["shard"])
            options = {"replicate_group": mesh["replicate"]}
            moved, named = "2.weight", "2.weight#1"
        hook = commhooks.register(model, "int8", verify=1, **options)
        for step in range(2):
            backward(model, step, rank // 2)
            if step == 0 and rank == 3:
                weight: Any = dict(model.named_parameters())[moved]
                getattr(weight, "_local_tensor", weight).data[0, 0] += 1.0
        hook.verification.report()
        assert findings(hook) == [(1, -1, named, "parameters differ", (1,))] * (rank % 2)
        hook.close()


# ---- once, on request


@on_ranks(3, ignore_warnings=("torch.quantize_per_tensor.* deprecated",))
def test_verify_equal_names_what_differs(rank: int) -> None:
    module = nn.Sequential(mlp(16, 2), nn.BatchNorm1d(16))
    ddp = CoreDDP(module)
    hook = commhooks.register(ddp, "int8")
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.1)
    hook.verify_equal(optimizer, buffers=True)
    torch.manual_seed(rank)
    ddp(torch.randn(4, 16)).square().mean().backward()
    with pytest.raises(VerificationError, match=r"buffer '1\.running_mean' \(and 1 more\) differs"):
        hook.verify_equal(optimizer, buffers=True)
    optimizer.step()
    hook.verify_equal(optimizer)
    moment = optimizer.state[module[0][0].weight]["exp_avg"]
    # Functions and objects are described by their addresses, and quantized tensors have no numbers.
    optimizer.param_groups[0]["of a user"] = [object(), print, {rank}]
    optimizer.state[module[0][0].bias]["small"] = torch.quantize_per_tensor(
        torch.ones(3), 0.1, 0, torch.qint8
    )
    hook.verify_equal(optimizer)
    for change, back, text in (
        (lambda: moment.neg_(), lambda: moment.neg_(), "the optimizer's 'exp_avg' of parameter '0"),
        (
            lambda: optimizer.param_groups[0].update(lr=0.2),
            lambda: optimizer.param_groups[0].update(lr=0.1),
            "'lr' of the optimizer's group 0 differs: rank 2 has 0.2, other than 0.1 on ranks 0, 1",
        ),
        (
            lambda: optimizer.state.pop(module[0][0].bias),
            lambda: None,
            r"parameter '0.0.bias' \(and 3 more\) differs: rank 2 has nothing, other than ",
        ),
        (
            lambda: module[0][2].weight.data.add_(1e-3),
            lambda: None,
            r"parameter '0.2.weight' \(and 4 more\) differs: rank 2 has \(16, 16\) of torch.float",
        ),
    ):
        if rank == 2:
            change()
        with pytest.raises(VerificationError, match=text):
            hook.verify_equal(optimizer)
        if rank == 2:
            back()


@on_ranks(2)
def test_verify_equal_refuses_what_no_two_ranks_have(rank: int) -> None:
    ddp = CoreDDP(mlp(16, 2))
    zero = commhooks.ZeroOptimizer(ddp, torch.optim.SGD, lr=0.1)
    zero.hook.verify_equal()
    redundant = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    for optimizer in (zero, redundant):
        with pytest.raises(RegistrationError, match="keeps a part of its state"):
            zero.hook.verify_equal(optimizer)
    with pytest.raises(TypeError, match="takes one optimizer, got list"):
        zero.hook.verify_equal([zero])
    hook = commhooks.register(sharded(model_of()), "int8")
    with pytest.raises(RegistrationError, match="another shard of every parameter"):
        hook.verify_equal()
    other = CoreDDP(mlp(16, 2))
    hook = commhooks.register(other, "int8")
    ask = partial(hook.switch, "fp16") if rank else hook.verify_equal
    with pytest.raises(MismatchError, match="call differs between ranks"):
        ask()
