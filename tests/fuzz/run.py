"""A model of a case in DistributedDataParallel with its hook, beside the same model alone."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import commhooks
import ddp_core
from commhooks.checkpoint._ranks import resizes_of
from tests.fuzz.case import Case
from tests.fuzz.model import Boom, Net, batch, used
from tests.fuzz.schemes import build

__all__ = ["RATE", "Plan", "Record", "Run", "digest", "flat_of", "rate_of"]

RATE = 0.01
PRECISION = {"bf16": (torch.bfloat16, None), "bf16_f32": (torch.bfloat16, torch.float32)}


@dataclass(frozen=True)
class Plan:
    """The special features of one step."""

    gates: dict[str, str] = field(default_factory=dict)
    two: bool = False  # two forward passes, one backward pass
    penalty: bool = False  # of the gradient to the input
    rank: int = 0  # whose gates they are; all ranks' where a gate raises
    no_hook: bool = False  # not registered yet


@dataclass
class Record:
    """The effects of a step on this rank: flat, in float64, and by parameter."""

    applied: Tensor
    wanted: Tensor
    sizes: Tensor  # norm of what was to be sent, by parameter
    digest: str
    missing: list[bool]  # by parameter, whether grad is None
    idle: list[bool]  # by parameter, whether this rank has no gradient of it
    least: Tensor | float = 0.0  # by parameter, rounding that is not of the gradient's size
    share: float = 1.0  # of the ranks, those that had input
    counts: bool = True  # for the sum law; not where it is not finite
    hooked: bool = True


class Noting(torch.optim.SGD):
    """Notes what it is given, for optimizers that step in backward."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.noted = parameter.grad.detach().clone()
        return super().step(closure)


class Run:
    """A wrapped model and its hook; ``step`` also computes this rank's gradient without either.

    Attributes:
        gathers: a state of all ranks is needed to go on elsewhere.
        leaves_bad_steps: a step that is not finite changes nothing, instead of showing.
    """

    gathers = leaves_bad_steps = False

    def __init__(self, case: Case, rank: int, group: Any) -> None:
        self.case, self.rank, self.group = case, rank, group
        self.world = group.size()
        self.net, self.reference = Net(case), Net(case)
        if "ignored" in case.setting:
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
                self.net, ["middle.bias"]
            )
        self.trained = [n for n, p in self.net.named_parameters() if p.requires_grad]
        self.ignored = {"middle.bias"} if "ignored" in case.setting else set()
        self.low, self.reduce = PRECISION.get(case.ddp.get("mixed_precision", ""), (None, None))
        if self.low is not None:
            self.reference.to(self.low)
        self.in_backward = "in_backward" in case.setting
        self.hook: Any = None
        self.steps = 0  # synchronised ones that ended, with the hook
        self.is_exact = True  # goes on as the run that it resumes, bit for bit
        self.counts = True  # whether hook.step is to be that
        self.active = self.world  # ranks that have input, the first ones

    def wrap(self) -> None:
        """Makes the DistributedDataParallel."""
        case, options = self.case, dict(self.case.ddp)
        if self.in_backward:
            from torch.distributed.optim import _apply_optimizer_in_backward

            parameters = [p for p in self.net.parameters() if p.requires_grad]
            _apply_optimizer_in_backward(Noting, parameters, {"lr": RATE})
        if "mixed_precision" in options:
            options["mixed_precision"] = ddp_core.MixedPrecision(self.low, self.reduce)
        if "delayed" in case.setting:
            late = [("out.weight", self.net.out.weight), ("out.bias", self.net.out.bias)]
            options["delay_all_reduce_named_params"] = late
            options["param_to_hook_all_reduce"] = self.net.first.weight
        if "mesh" in case.setting:
            from torch.distributed.device_mesh import init_device_mesh

            options["device_mesh"] = init_device_mesh("cpu", (self.world,))
        else:
            options["process_group"] = self.group
        if "through_group" in case.setting:
            scheme = build(case.scheme, case.options, case.wrap)
            self.through = commhooks.process_group(scheme, self.group, seed=case.seed)
            options["process_group"] = self.through
        host = ddp_core.DistributedDataParallel if case.host == "core" else DistributedDataParallel
        if "hold" in case.setting and not hasattr(host, "hold"):
            raise TypeError("torch's DistributedDataParallel has no hold()")
        self.ddp = host(self.net, **options)
        self.call: Any = self.ddp
        if "compiled" in case.setting:
            self.call = torch.compile(self.ddp, backend="aot_eager")
        if "recompute" in case.model:
            self.call = lambda *inputs: checkpoint(self.ddp, *inputs, use_reentrant=False)

    def register(self) -> None:
        """Registers the scheme."""
        case, options = self.case, {}
        for name in ("scheme", "shape"):
            if f"layout_{name}" in case.setting:
                options["layout"] = name
        scheme = build(case.scheme, case.options, case.wrap)
        self.hook = commhooks.register(self.ddp, scheme, seed=case.seed, **options)

    # ---- a step

    def step(self, number: int, plan: Plan) -> Record | None:
        """One synchronised step; None if it raised, as planned."""
        case = self.case
        self._zero(case.zero)
        sums = self._begin_reference()
        held = self.residuals()
        self.net.seen.clear()
        abandoned = False
        for micro in range(case.micro):
            last = micro == case.micro - 1
            gates = self._gates(plan) if last else {}
            quiet: Any = contextlib.nullcontext() if last else self.ddp.no_sync()
            if "hold" in case.setting:
                quiet = self.ddp.hold()
            try:
                with quiet:
                    self._pass(self.call, number, micro, gates, plan)
            except Boom:
                if "raise" not in gates.values():
                    raise
                abandoned = True
        if "raise" in plan.gates.values():
            if not abandoned:
                raise AssertionError("a backward pass that raises has not raised")
            self._zero("none")
            return None
        if "hold" in case.setting:
            self.ddp.reduce()
        self._reference_passes(number, plan, sums)
        return self._record(sums, held, plan)

    def _gates(self, plan: Plan) -> dict[str, str]:
        everybody = "raise" in plan.gates.values()
        return plan.gates if everybody or plan.rank == self.rank else {}

    def _pass(self, model: Any, number: int, micro: int, gates: dict[str, str], plan: Plan) -> None:
        """Forward and backward."""
        loss: Any = 0.0
        for again in range(2 if plan.two else 1):
            inputs = batch(self.case, number, micro + 100 * again, self.rank).requires_grad_()
            use = used(self.case, number, micro, self.rank)
            if self.low is not None and model is self.reference:
                inputs = inputs.detach().to(self.low).requires_grad_()
            output = model(inputs, use, gates, self.rank).float()
            loss = loss + output.square().mean() + output.mean()
            if plan.penalty:
                (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
                loss = loss + slope.float().square().mean()
        loss.backward()

    def _zero(self, kind: str) -> None:
        if kind != "keep":
            self.ddp.zero_grad(set_to_none=kind == "none")

    # ---- this rank's own gradient

    def _begin_reference(self) -> dict[str, Tensor]:
        """Takes over parameters; returns the gradients that the passes to come add to."""
        sums = {}
        local = dict(self.reference.named_parameters())
        for name, parameter in self.net.named_parameters():
            local[name].data.copy_(parameter.data)
            local[name].requires_grad_(parameter.requires_grad)
            local[name].grad = None
            if parameter.grad is not None:
                sums[name] = parameter.grad.detach().clone()
                if self.low is None:
                    local[name].grad = sums[name]
        return sums

    def _reference_passes(self, number: int, plan: Plan, sums: dict[str, Tensor]) -> None:
        self.reference.replay = list(self.net.seen)
        for micro in range(self.case.micro):
            gates = self._gates(plan) if micro == self.case.micro - 1 else {}
            self._pass(self.reference, number, micro, gates, plan)
            for name, parameter in self.reference.named_parameters():
                if self.low is None:
                    if parameter.grad is not None:
                        sums[name] = parameter.grad
                elif parameter.grad is not None:
                    wide = parameter.grad.to(torch.float32)
                    sums[name] = sums[name] + wide if name in sums else wide
                    parameter.grad = None

    # ---- what became of it

    def _record(self, sums: dict[str, Tensor], held: list[Tensor], plan: Plan) -> Record:
        applied = []
        for name, parameter in self._parameters():
            grad = parameter.grad
            if self.in_backward:
                grad = parameter.__dict__.pop("noted", None)
            elif grad is not None and (grad.dtype, grad.shape) != (
                parameter.dtype,
                parameter.shape,
            ):
                raise AssertionError(f"{name}.grad is {grad.dtype} of {tuple(grad.shape)}")
            applied.append(flat_of(parameter, grad))
        wanted = [flat_of(parameter, sums.get(name)) for name, parameter in self._parameters()]
        for name, local, ours in zip(self.trained, applied, wanted, strict=True):
            if name in self.ignored:  # as this rank made it, and in no sum
                if (local - ours).abs().nan_to_num().max() > 1e-6:
                    raise AssertionError(f"{name}.grad is not this rank's own")
                local.zero_(), ours.zero_()
        norms = [float((w + h).norm()) for w, h in zip(wanted, held, strict=True)]
        shown = [a for a, n in zip(applied, self.trained, strict=True) if n not in self.ignored]
        record = Record(
            torch.cat(applied),
            torch.cat(wanted),
            torch.tensor(norms, dtype=torch.float64),
            digest(shown),
            [parameter.grad is None for _, parameter in self._parameters()],
            [name not in sums for name in self.trained],
            least=self.least(),
            hooked=not plan.no_hook,
        )
        self.steps += not plan.no_hook
        record.counts = bool(record.applied.isfinite().all() and record.wanted.isfinite().all())
        if record.counts and not self.in_backward and self.case.averages:
            with torch.no_grad():
                for parameter in self.net.parameters():
                    if parameter.grad is not None:
                        rate = rate_of(parameter, parameter.grad) if self.case.scaled else RATE
                        parameter.add_(parameter.grad, alpha=-rate)
        elif not record.counts:
            self._zero("none")
        return record

    def residuals(self) -> list[Tensor]:
        """By trained parameter, flat, in float64; zero where nothing is held back."""
        results = []
        for name, parameter in self._parameters():
            value = None if self.hook is None else self.hook.residual(name)
            results.append(flat_of(parameter, value))
        return results

    def spacings(self) -> Tensor:
        """By trained parameter, the spacing of 1 in the types its gradient takes."""
        return self._of_types(lambda kind: kind.eps)

    def least(self) -> Tensor:
        """By trained parameter, the smallest number of these types."""
        return self._of_types(lambda kind: kind.eps * kind.tiny)

    def _of_types(self, figure: Callable[[Any], float]) -> Tensor:
        results = []
        for _, parameter in self._parameters():
            types = [parameter.dtype, self.low, self.reduce]
            kinds = [t for t in types if t is not None and (t.is_floating_point or t.is_complex)]
            results.append(max(figure(torch.finfo(kind)) for kind in kinds))
        return torch.tensor(results, dtype=torch.float64)

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        local = dict(self.net.named_parameters())
        return [(name, local[name]) for name in self.trained]

    # ---- states

    def weights(self) -> dict[str, Any]:
        """The model's state, of whole parameters."""
        return self.net.state_dict()

    def state(self, *, gather: bool = False) -> Any:
        """Returns the state that the hook continues from."""
        return self.hook.state_dict(gather=gather)

    def load(self, state: Any) -> None:
        """Continues from it."""
        self.hook.load_state_dict(state)

    def saved(self, states: list[Any]) -> Any:
        """Returns what to load of the states of all ranks."""
        return states[self.rank] if len(states) == self.world else states

    def memory(self) -> Iterator[tuple[str, str, Tensor, bool]]:
        """Yields what the hook keeps: key, name, value, and whether ranks have the same."""
        local = resizes_of(self.hook.scheme).keys()
        for key, values in self.hook.state_dict()[f"rank{self.hook.rank}"]["memory"].items():
            for name, value in values.items():
                yield key, name, value, key not in local

    def skipped(self) -> int:
        """Steps that were not finite, as the host counts them."""
        return int(self.hook.skipped_steps)

    def settle(self, record: Record) -> None:
        """Leaves out of a record what is in no sum."""

    def calls(self) -> int:
        """Steps of the host in one of the case."""
        return 1

    def shown(self) -> list[Tensor]:
        """Parameters that all ranks have alike."""
        return [p for n, p in self.net.named_parameters() if n not in self.ignored]

    def sizes(self) -> list[int]:
        """Entries of the trained parameters in the flat tensors of a record."""
        return [flat_of(p, None).numel() for _, p in self._parameters()]


def rate_of(parameter: Tensor, grad: Tensor) -> float:
    """A rate at which gradients of any size move a parameter by no more than ``RATE``."""
    flat = flat_of(parameter, grad)
    return RATE / max(1.0, float(flat.abs().max())) if len(flat) else RATE


def flat_of(parameter: Tensor, value: Tensor | None) -> Tensor:
    if value is None:
        value = torch.zeros_like(parameter)
    value = value.detach()
    if value.is_sparse:
        value = value.to_dense()
    if value.is_complex():
        value = torch.view_as_real(value)
    elif parameter.is_complex() and value.shape == parameter.shape:
        value = torch.stack([value, value], -1)
    return value.reshape(-1).to(torch.float64)


def digest(tensors: list[Tensor]) -> str:
    """The same text for the same bits; all NaN are one."""
    results = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        tensor = tensor.detach().contiguous()
        if tensor.is_floating_point():
            tensor = torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor)
        results.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return results.hexdigest()
