"""A run of a case on another host than DistributedDataParallel: what all such hosts share.

All are held against the same: this rank's gradient by the model alone. What a host shards is put
together, so that every rank reports whole parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.checkpoint._ranks import resizes_of
from commhooks.core._scheme import Scheme, slots_of
from tests.fuzz.run import Plan, Record, Run, digest, flat_of, rate_of
from tests.fuzz.schemes import build

__all__ = ["Hosted", "here", "takes_shards"]


def _whole(tensor: Any) -> Tensor:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach()  # type: ignore[no-any-return]


def here(tensor: Any) -> Tensor:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()  # type: ignore[no-any-return]


def takes_shards(scheme: Scheme) -> bool:
    """Returns whether each rank may get its shard of the mean alone."""
    return scheme.traits.averages and scheme.traits.shards and not scheme.traits.coalesce


class Hosted(Run):
    """A model whose parameters get their gradients as in a plain model; hosts replace the rest.

    Attributes:
        worlds: numbers of ranks that are drawn, and ``settings``, of which one is.
        models: features of the model that are drawn, and ``happens``, kinds of events.
        resizes: a state loads on other numbers of ranks.
        shards: a rank keeps parts of what all keep.
    """

    gathers = True
    worlds: ClassVar[tuple[int, ...]] = (1, 2, 2, 2, 3, 4)
    settings: ClassVar[tuple[tuple[str, ...], ...]] = ((),)
    models: ClassVar[tuple[str, ...]] = ("frozen", "norm", "large", "checkpoint", "all_bf16")
    happens: ClassVar[tuple[str, ...]] = ("poison", "resume", "save", "switch")
    resizes = True
    shards = False

    @classmethod
    def takes(cls, scheme: Scheme, setting: tuple[str, ...]) -> bool:
        """Returns whether the host runs a scheme."""
        return scheme.traits.averages

    def wrap(self) -> None:
        """Makes the host and its hooks."""
        self.reference.load_state_dict(self.net.state_dict())
        self.hooks: list[Any] = []
        self.scales_nodes: set[int] = set()  # hooks that average within a node only
        self.host(build(self.case.scheme, self.case.options, self.case.wrap))
        self.hook = self.hooks[0] if self.hooks else None

    def register(self) -> None:
        """The hook is there already."""

    def host(self, scheme: Scheme) -> None:
        """Wraps the model as ``self.call``, and makes the hooks."""
        raise NotImplementedError

    # ---- a step

    def step(self, number: int, plan: Plan) -> Record | None:
        held = self.residuals()
        wanted = self.local_gradients(number, plan)
        self.exchange(number, plan, wanted)
        means = self.means()
        flat = self.spread([flat_of(mean, mean) for mean in means])
        local = self.spread([flat_of(value, value) for value in wanted])
        norms = [float((w + h).norm()) for w, h in zip(local, held, strict=True)]
        record = Record(
            torch.cat(flat),
            torch.cat(local),
            torch.tensor(norms, dtype=torch.float64),
            digest(flat),
            [],
            [],
            least=self.least(),
        )
        self.steps += 1
        finite = bool(record.applied.isfinite().all())
        record.counts = finite and bool(record.wanted.isfinite().all())
        if finite:  # as all ranks have it
            self.move(means, flat)
        for parameter in self.places():
            parameter.grad = None
        return record

    def local_gradients(self, number: int, plan: Plan) -> list[Tensor]:
        """Returns the local gradients, from a model without a host."""
        for parameter in self.reference.parameters():
            parameter.grad = None
        for micro in range(self.case.micro):
            self._pass(self.reference, number, micro, self.gates(plan, micro), plan)
        return [here(value.grad) for value in self.known()]

    def exchange(self, number: int, plan: Plan, wanted: list[Tensor]) -> None:
        """Lets the host do its passes."""
        for micro in range(self.case.micro):
            with self.quiet(micro < self.case.micro - 1):
                self._pass(self.call, number, micro, self.gates(plan, micro), plan)

    def means(self) -> list[Tensor]:
        """Returns the gradients as the host has reduced them, whole."""
        return [_whole(place.grad) for place in self.places()]

    def move(self, means: list[Tensor], flat: list[Tensor]) -> None:
        """Steps the host's parameters, and those of the model alone to the same bits."""
        with torch.no_grad():
            for place, local, mean, all_of_it in zip(
                self.places(), self.known(), means, flat, strict=True
            ):
                rate = rate_of(all_of_it, all_of_it)
                if place.grad is not None and here(place).numel():
                    here(place).sub_(here(place.grad) * rate)
                here(local).sub_(mean * rate)

    def gates(self, plan: Plan, micro: int) -> dict[str, str]:
        return self._gates(plan) if micro == self.case.micro - 1 else {}

    @contextlib.contextmanager
    def quiet(self, is_quiet: bool) -> Iterator[None]:
        """Runs a pass that only accumulates gradients, if it is to be quiet."""
        if hasattr(self.call, "set_requires_gradient_sync"):
            self.call.set_requires_gradient_sync(not is_quiet)
            yield
        else:
            with self.call.no_sync() if is_quiet else contextlib.nullcontext():
                yield

    # ---- its tensors

    def places(self) -> list[Any]:
        """The host's trained parameters."""
        local = dict(self.net.named_parameters())
        return [local[name] for name in self.trained]

    def known(self) -> list[Any]:
        """The trained parameters of the model without a host."""
        local = dict(self.reference.named_parameters())
        return [local[name] for name in self.trained]

    def spread(self, flat: list[Tensor]) -> list[Tensor]:
        """Returns whole tensors, alike on all ranks, of tensors that are cut otherwise."""
        return flat

    def _parameters(self) -> Any:
        return list(zip(self.trained, self.known(), strict=True))

    def sizes(self) -> list[int]:
        return [local.numel() for local in self.spread([flat_of(p, None) for p in self.locals()])]

    def locals(self) -> list[Tensor]:
        """The local shards of the model without a host."""
        return [here(value) for value in self.known()]

    def shown(self) -> list[Tensor]:
        host = [_whole(place) for place in self.places()]
        for name, local, ours in zip(self.trained, host, self.locals(), strict=True):
            if not torch.equal(local, ours):
                raise AssertionError(f"{name} is not what its means have made of it")
        return self.spread([flat_of(value, value) for value in host])

    # ---- memory

    def residuals(self) -> list[Tensor]:
        """Returns the local residuals, or the mean over ranks where a rank keeps parts of them."""
        parts = [self._residuals_of(index) for index in range(len(self.hooks))]
        results = []
        for name, like in zip(self.trained, self.locals(), strict=True):
            values = [part[name].reshape(-1)[: like.numel()] for part in parts if name in part]
            total = flat_of(like, None)
            for value in values:
                total = total + value.double()
            results.append(total)
        return self.spread(results)

    def _residuals_of(self, index: int) -> dict[str, Tensor]:
        hook = self.hooks[index]
        if not self.shards:
            kept = [n for n, p in self._parameters() if not p.is_complex()]
            local = {name: hook.residual(name) for name in kept}
            return {name: value for name, value in local.items() if value is not None}
        if not self._keeps():
            return {}
        state = hook.state_dict(gather=True)
        parts = [value["memory"] for key, value in state.items() if key.startswith("rank")]
        results = {}
        for name in parts[0].get("residual", {}):
            results[name] = torch.stack([part["residual"][name].double() for part in parts]).mean(0)
            if index in self.scales_nodes:
                dist.all_reduce(results[name])
                results[name] /= dist.get_world_size()
        return results

    def _keeps(self) -> bool:
        """Returns whether a scheme of the case keeps memory."""
        case = self.case
        built = [build(case.scheme, case.options, case.wrap)]
        built += [build(event[2], event[3], ()) for event in case.events if event[1] == "switch"]
        return any(slots_of(value) for value in built)

    def memory(self) -> Iterator[tuple[str, str, Tensor, bool]]:
        for hook in self.hooks:
            local = resizes_of(hook.scheme).keys()
            for field, part in hook.state_dict().items():
                for key, values in part["memory"].items() if field.startswith("rank") else ():
                    for name, value in values.items():
                        yield key, name, value, key not in local and not self.shards

    def weights(self) -> dict[str, Any]:
        return {name: _whole(value) for name, value in self.reference.state_dict().items()}

    def state(self, *, gather: bool = False) -> Any:
        return [hook.state_dict(gather=gather) for hook in self.hooks]

    def load(self, state: Any) -> None:
        for hook, value in zip(self.hooks, state, strict=True):
            hook.load_state_dict(value)

    def saved(self, states: list[Any]) -> Any:
        return states[0]
