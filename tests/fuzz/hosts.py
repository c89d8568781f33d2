"""Hosts besides DistributedDataParallel: a class for each, which says what is drawn for it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._composable.replicate import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import commhooks
import ddp_core
from commhooks.core._scheme import Scheme, slots_of
from tests.fsdp.test_fsdp2 import sharded
from tests.fuzz.case import Case
from tests.fuzz.hosted import Hosted, here, takes_shards
from tests.fuzz.model import Line
from tests.fuzz.run import RATE, Plan, Record, rate_of
from tests.fuzz.schemes import APART

__all__ = ["BY_TENSOR", "HOSTS"]

BY_TENSOR = ("collectives", "functions")  # each parameter is exchanged by itself


@cache
def _mesh(*sizes: int) -> Any:
    """A mesh of all ranks; one for all cases of a process, since each makes groups."""
    names = ("outer", "inner")[-len(sizes) :]
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


class _Composable(Hosted):
    """``replicate()``, which is torch's DistributedDataParallel inside."""

    models = (*Hosted.models, "tied", "scalar")

    def host(self, scheme: Scheme) -> None:
        self.call = replicate(self.net, process_group=self.group, **self.case.ddp)
        self.hooks = [commhooks.register(self.call, scheme, seed=self.case.seed)]


class _Group(Hosted):
    """A process group that runs the scheme, under one of the two classes."""

    settings = ((), ("core",))
    models = (*Hosted.models, "tied", "scalar")
    happens = ("poison",)
    resizes = False

    @classmethod
    def takes(cls, scheme: Scheme, setting: tuple[str, ...]) -> bool:
        return not slots_of(scheme) and scheme.traits.returns == "mean"

    def over(self, scheme: Scheme) -> Any:
        return commhooks.process_group(scheme, self.group, seed=self.case.seed, least=1)

    def host(self, scheme: Scheme) -> None:
        core = "core" in self.case.setting
        kind = ddp_core.DistributedDataParallel if core else DistributedDataParallel
        self.call = kind(self.net, process_group=self.over(scheme), **self.case.ddp)


class _GroupOfFsdp2(_Group):
    """``replicate()`` or ``fully_shard`` of FSDP2 over such a group."""

    settings = ((), ("sharded",))
    models = ("frozen", "norm", "large", "checkpoint", "all_bf16")

    def host(self, scheme: Scheme) -> None:
        ranks = list(range(self.world))
        names = ("replicate",)
        mesh = DeviceMesh.from_group(self.over(scheme), "cpu", mesh=ranks, mesh_dim_names=names)
        over = sharded if "sharded" in self.case.setting else replicate_with_fsdp
        self.call = over(self.net, mesh=mesh)


class _Replicate(Hosted):
    """``commhooks.fsdp.replicate``."""

    def host(self, scheme: Scheme) -> None:
        self.call, layers = self.net, [self.net.first, self.net.out]
        self.hooks = [
            commhooks.fsdp.replicate(
                self.net, scheme, modules=layers, mesh=self._replicas(), seed=self.case.seed
            )
        ]

    def _replicas(self) -> Any:
        return _mesh(1, self.world)


class _Fsdp2(Hosted):
    """FSDP2, whose reduce-scatter is the scheme's."""

    worlds = (2, 2, 3, 4)
    shards = True

    @classmethod
    def takes(cls, scheme: Scheme, setting: tuple[str, ...]) -> bool:
        return takes_shards(scheme)

    def host(self, scheme: Scheme) -> None:
        self.call = sharded(self.net, _mesh(self.world))
        self.hooks = [commhooks.register(self.call, scheme, seed=self.case.seed)]


class _Hsdp(_Fsdp2):
    """FSDP2 within nodes, with a scheme between them, within them, or both."""

    worlds = (4,)
    settings = (("between",), ("between",), ("inside",), ("both",), ("native",))
    resizes = False

    @classmethod
    def takes(cls, scheme: Scheme, setting: tuple[str, ...]) -> bool:
        return takes_shards(scheme) or (setting == ("between",) and scheme.traits.averages)

    def host(self, scheme: Scheme) -> None:
        mesh, (kind,), seed = _mesh(2, self.world // 2), self.case.setting, self.case.seed
        self.call = sharded(self.net, mesh if kind == "native" else mesh["inner"])
        between = {"replicate_group": mesh["outer"], "seed": seed}
        if kind == "between":
            self.hooks = [commhooks.register(self.call, scheme, **between)]
            return
        inside = commhooks.register(self.call, scheme, seed=seed)
        self.hooks, self.scales_nodes = [inside], {0}
        if kind != "native":
            outer = scheme if kind == "both" else "none"
            self.hooks.append(commhooks.register(self.call, outer, **between))


class _Fsdp1(Hosted):
    """FSDP1, with whole or with sharded parameters."""

    worlds = (2, 2, 3, 4)
    settings = (("FULL_SHARD",), ("SHARD_GRAD_OP",), ("NO_SHARD",))
    models = ("frozen", "norm", "large", "all_bf16")

    def __init__(self, case: Case, rank: int, group: Any) -> None:
        super().__init__(case, rank, group)
        self.shards = "NO_SHARD" not in case.setting

    @classmethod
    def takes(cls, scheme: Scheme, setting: tuple[str, ...]) -> bool:
        return takes_shards(scheme) or (setting == ("NO_SHARD",) and scheme.traits.averages)

    def host(self, scheme: Scheme) -> None:
        self.call = FullyShardedDataParallel(
            self.net,
            process_group=self.group,
            sharding_strategy=ShardingStrategy[self.case.setting[0]],
            device_id=torch.device("cpu"),
            auto_wrap_policy=ModuleWrapPolicy({Line}),
            use_orig_params=True,
        )
        self.hooks = [commhooks.register(self.call, scheme, seed=self.case.seed)]

    def places(self) -> list[Any]:
        return [parameter for parameter in self.call.parameters() if parameter.requires_grad]

    def means(self) -> list[Tensor]:
        if not self.shards:
            return super().means()
        with FullyShardedDataParallel.summon_full_params(self.call, with_grads=True):
            return [place.grad.detach().clone() for place in self.places()]

    def shown(self) -> list[Tensor]:
        with FullyShardedDataParallel.summon_full_params(self.call, writeback=False):
            return super().shown()


class _TensorParallel(Hosted):
    """Our class beside tensor parallelism: rows of the mesh are replicas."""

    worlds = (4,)
    models = ("frozen", "norm")
    resizes = False

    def __init__(self, case: Case, rank: int, group: Any) -> None:
        super().__init__(case, rank, group)
        self.mesh = _mesh(2, group.size() // 2)
        self.rank, self.world = self.mesh["outer"].get_local_rank(), 2

    def host(self, scheme: Scheme) -> None:
        for net in (self.net, self.reference):
            plan: dict[str, Any] = {
                "middle": ColwiseParallel(output_layouts=Replicate()),
                "out": RowwiseParallel(input_layouts=Replicate()),
            }
            parallelize_module(net, self.mesh["inner"], plan)
        options = {"device_mesh": self.mesh["outer"], **self.case.ddp}
        self.call = ddp_core.DistributedDataParallel(self.net, **options)
        self.hooks = [commhooks.register(self.call, scheme, seed=self.case.seed)]

    @classmethod
    def takes(cls, scheme: Scheme, setting: tuple[str, ...]) -> bool:
        return scheme.traits.returns == "mean"  # others let uncut parameters drift, and say so

    def shown(self) -> list[Tensor]:
        results = super().shown()
        for name, value in zip(self.trained, results, strict=True):
            if name not in ("middle.weight", "middle.bias", "out.weight"):
                first, second = value.chunk(2)
                if not torch.equal(first, second):
                    raise AssertionError(f"{name}, which is not cut, has drifted apart")
        return results

    def move(self, means: list[Tensor], flat: list[Tensor]) -> None:
        super().move([here(mean) for mean in means], flat)

    def memory(self) -> Iterator[tuple[str, str, Tensor, bool]]:
        part = self.mesh["inner"].get_local_rank()
        for key, name, value, equal in super().memory():
            yield key, f"{name}, part {part}", value, equal

    def spread(self, flat: list[Tensor]) -> list[Tensor]:
        """Returns for each parameter the parts of all ranks of a row, one after the other."""
        group = self.mesh["inner"].get_group()
        local = torch.cat(flat)
        rows = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(rows, local, group=group)
        sizes = [len(value) for value in flat]
        return [torch.cat(parts) for parts in zip(*(row.split(sizes) for row in rows), strict=True)]


class _Optimizer(Hosted):
    """An optimizer, whose means show in what becomes of parameters only.

    Attributes:
        keeper: what saves the state.
        rates: by parameter, of what a step subtracts.
    """

    leaves_bad_steps = True
    keeper: Any
    rates: list[float]

    def note(self) -> None:
        """Keeps the parameters, before a step."""
        self.before = [place.detach().clone() for place in self.places()]

    def means(self) -> list[Tensor]:
        return [
            (before.double() - value.detach().double()) / rate
            for before, value, rate in zip(self.before, self.places(), self.rates, strict=True)
        ]

    def move(self, means: list[Tensor], flat: list[Tensor]) -> None:
        self.reference.load_state_dict(self.net.state_dict())

    def least(self) -> Tensor:
        local = [
            4 * torch.finfo(value.dtype).eps * float(value.abs().max()) / rate
            for value, rate in zip(self.before, self.rates, strict=True)
        ]
        return super().least() + torch.tensor(local, dtype=torch.float64)

    def state(self, *, gather: bool = False) -> Any:
        return self.keeper.state_dict(gather=gather)

    def load(self, state: Any) -> None:
        self.keeper.load_state_dict(state)


class _Zero(_Optimizer):
    """``ZeroOptimizer``."""

    settings = ((), (), ("packed",), ("in_backward",))
    shards = True

    @classmethod
    def takes(cls, scheme: Scheme, setting: tuple[str, ...]) -> bool:
        return takes_shards(scheme)

    def host(self, scheme: Scheme) -> None:
        case = self.case
        self.call = ddp_core.DistributedDataParallel(self.net, process_group=self.group, **case.ddp)
        # What is coded together has one rate, so that errors of its size move nothing far.
        apart = {case.scheme, *(e[2] for e in case.events if e[1] == "switch")} <= APART
        scales = self._scales()
        self.rates = [RATE / (scale if apart else max(scales)) for scale in scales]
        self.keeper = commhooks.ZeroOptimizer(
            self.call,
            torch.optim.SGD,
            scheme=scheme,
            gather="int8" if "packed" in case.setting else "none",
            params=[
                {"params": [value], "lr": rate}
                for value, rate in zip(self.places(), self.rates, strict=True)
            ],
            in_backward="in_backward" in case.setting,
            seed=case.seed,
        )
        self.hooks = [self.keeper.hook]

    def _scales(self) -> list[float]:
        """By parameter, how many times as large its gradients are."""
        layers = dict(self.net.named_modules())
        results = []
        for name in self.trained:
            layer, _, kind = name.rpartition(".")
            scales = getattr(layers[layer], "scales", (1.0, 1.0))
            results.append(scales[kind == "bias"])
        return results

    def exchange(self, number: int, plan: Plan, wanted: list[Tensor]) -> None:
        self.note()
        super().exchange(number, plan, wanted)
        self.keeper.step()
        self.keeper.zero_grad()

    def skipped(self) -> int:
        return int(self.keeper.skipped_steps)


class _DiLoCo(_Optimizer):
    """``DiLoCo``: what is averaged is how far the ranks' models have moved."""

    settings = ((), (), ("momentum",))
    models = ("norm", "large")

    @classmethod
    def takes(cls, scheme: Scheme, setting: tuple[str, ...]) -> bool:
        return scheme.traits.returns == "mean" and scheme.traits.agrees

    def host(self, scheme: Scheme) -> None:
        self.call, more = self.net, {}
        if "momentum" not in self.case.setting:
            more = {"lr": 1.0, "momentum": 0.0, "nesterov": False}
        self.keeper = commhooks.DiLoCo(
            self.net,
            scheme,
            every=self.case.micro,
            process_group=self.group,
            seed=self.case.seed,
            **more,
        )
        self.hooks, self.rates = [self.keeper.hook], [1.0] * len(self.trained)

    def local_gradients(self, number: int, plan: Plan) -> list[Tensor]:
        """Trains this rank's model; returns how far it came."""
        self.note()
        for micro in range(self.case.micro):
            if micro:
                self.keeper.step()
            self._pass(self.net, number, micro, self.gates(plan, micro), plan)
            with torch.no_grad():
                for value in self.places():
                    value.sub_(value.grad * rate_of(value, value.grad))
                    value.grad = None
        return [a - b.detach() for a, b in zip(self.before, self.places(), strict=True)]

    def exchange(self, number: int, plan: Plan, wanted: list[Tensor]) -> None:
        self.keeper.step()


_CALLS = ("all_reduce", "reduce_scatter", "all_gather")


class _Collectives(Hosted):
    """``Collectives``: each gradient is a tensor with a name."""

    settings = tuple((call, *more) for call in _CALLS for more in ((), ("async",), ("sum",)))
    models = (*Hosted.models, "all_f64", "scalar", "complex")

    @classmethod
    def takes(cls, scheme: Scheme, setting: tuple[str, ...]) -> bool:
        if scheme.traits.returns != "mean" or not scheme.traits.agrees:
            return False
        if "all_gather" in setting:
            return scheme.gathers
        return "all_reduce" in setting or scheme.traits.shards

    def host(self, scheme: Scheme) -> None:
        self.call = self.net
        self.through = self._maker(scheme)
        for name, place in zip(self.trained, self.places(), strict=True):
            if self.hooks:
                self.through.declare(name, self._input(place.detach()))

    def _maker(self, scheme: Scheme) -> Any:
        results = commhooks.Collectives(scheme, self.group, seed=self.case.seed)
        self.hooks = [results]
        return results

    def _named(self, name: str) -> dict[str, Any]:
        return {"name": name}

    def _input(self, tensor: Tensor) -> Tensor:
        """Returns a tensor to send: as it is, or flat and as many entries for each rank."""
        if "reduce_scatter" not in self.case.setting:
            return tensor.clone()
        return torch.nn.functional.pad(tensor.reshape(-1), (0, -tensor.numel() % self.world))

    def exchange(self, number: int, plan: Plan, wanted: list[Tensor]) -> None:
        sums, later = "sum" in self.case.setting, "async" in self.case.setting
        op: dict[str, Any] = {} if sums else {"op": dist.ReduceOp.AVG}
        outputs, handles = [], []
        for name, value in zip(self.trained, wanted, strict=True):
            sent, options = self._input(value), {**self._named(name), "async_op": later}
            if "all_reduce" in self.case.setting:
                handles.append(self.through.all_reduce(sent, **options, **op))
                output = sent
            elif "reduce_scatter" in self.case.setting:
                output = sent.new_empty(sent.numel() // self.world)
                handles.append(self.through.reduce_scatter(output, sent, **options, **op))
            else:
                output = sent.new_empty(self.world * sent.numel())
                handles.append(self.through.all_gather(output, sent, **options))
            outputs.append(output)
        for handle in handles:
            if handle is not None:
                handle.wait()
        self._means = [
            self._mean(output, element) / (self.world if sums else 1)
            for output, element in zip(outputs, wanted, strict=True)
        ]

    def _mean(self, output: Tensor, like: Tensor) -> Tensor:
        """Returns the mean, or the sum, of what came back."""
        if "all_gather" in self.case.setting:
            whole = output.view(self.world, -1).to(torch.promote_types(like.dtype, torch.float32))
            mean = whole.mean(0) if "sum" not in self.case.setting else whole.sum(0)
            return mean.view(like.shape).to(like.dtype)
        if "reduce_scatter" in self.case.setting:
            parts = [torch.empty_like(output) for _ in range(self.world)]
            dist.all_gather(parts, output, group=self.group)
            return torch.cat(parts)[: like.numel()].view(like.shape)
        return output

    def means(self) -> list[Tensor]:
        return self._means

    def calls(self) -> int:
        return len(self.trained)

    def settle(self, record: Record) -> None:
        """Leaves out tensors that are not finite; the others have been exchanged all the same."""
        sizes = self.sizes()
        parts = [*zip(record.wanted.split(sizes), record.applied.split(sizes), strict=True)]
        bad = torch.tensor([float(not (w + a).isfinite().all()) for w, a in parts])
        dist.all_reduce(bad, group=self.group)
        for index, (wanted, applied) in enumerate(parts):
            if bad[index]:
                wanted.zero_(), applied.zero_()
                record.sizes[index] = 0
        record.counts = True

    def move(self, means: list[Tensor], flat: list[Tensor]) -> None:
        for place, mean in zip(self.places(), means, strict=True):
            place.grad = mean
        super().move(means, flat)


class _Functions(_Collectives):
    """``commhooks.all_reduce`` and the others, which keep no memory."""

    happens = ("poison",)
    resizes = False

    @classmethod
    def takes(cls, scheme: Scheme, setting: tuple[str, ...]) -> bool:
        return not slots_of(scheme) and super().takes(scheme, setting)

    def _maker(self, scheme: Scheme) -> Any:
        self.scheme = scheme
        return commhooks

    def _named(self, name: str) -> dict[str, Any]:
        return {"scheme": self.scheme, "group": self.group}


HOSTS: dict[str, type[Hosted]] = {
    "replicate": _Composable,
    "group": _Group,
    "fsdp2_of_group": _GroupOfFsdp2,
    "hosts_replicate": _Replicate,
    "fsdp2": _Fsdp2,
    "hsdp": _Hsdp,
    "fsdp1": _Fsdp1,
    "tensor_parallel": _TensorParallel,
    "zero": _Zero,
    "diloco": _DiLoCo,
    "collectives": _Collectives,
    "functions": _Functions,
}
