"""Raises when gradients arrive twice, late or not at all, or would not be averaged."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from ddp_core.exchange._errors import listed
from ddp_core.reducer._autograd import NO_BACKWARD, backward_number
from ddp_core.reducer._launch import Launcher, Step
from ddp_core.reducer._optimizer import before_every_step
from ddp_core.reducer._parameters import Trained
from ddp_core.reducer._unused import Usage

__all__ = [
    "GraphErrors",
    "LocalGradients",
    "changed_error",
    "full_precision_error",
    "late_error",
    "local_error",
    "twice_error",
    "unused_error",
]


class GraphErrors:
    """Raises on this rank after reporting the error to the others, which would wait for it.

    Args:
        parameters: of the model, which messages name.
        launcher: reports errors to the other ranks.
    """

    def __init__(self, parameters: Sequence[Trained], launcher: Launcher) -> None:
        self._parameters, self._launcher = parameters, launcher
        self._rank = launcher.group.rank()

    def changed(self, indices: Sequence[int], *, came: bool) -> NoReturn:
        """Raises because a static graph has changed; see :func:`changed_error`."""
        self._raise(changed_error(self._names(indices), self._rank, came=came))

    def twice(self, index: int) -> NoReturn:
        """Raises because a gradient arrived twice."""
        self._raise(twice_error(self._parameters[index].name, index))

    def full_precision(self, index: int) -> NoReturn:
        """Raises because a gradient arrived for the full-precision copy of a parameter."""
        self._raise(full_precision_error(self._parameters[index].name))

    def only_backward(self) -> NoReturn:
        """Raises because backward is within ``no_sync`` or ``hold``, and its forward was not."""
        self._raise(
            "a backward pass is within no_sync() or hold(), and its forward pass was outside: the "
            "forward pass decides, so gradients would be averaged all the same. Put the forward "
            "pass inside as well, or leave the context out"
        )

    def loaded(self) -> NoReturn:
        """Raises because backward would use other buckets than those of the loaded state."""
        self._raise(
            f"a state was loaded between the forward pass and backward of step "
            f"{self._launcher.step}: this step would be exchanged in other buckets than those "
            f"of the state. Load it before the forward pass"
        )

    def unused(self, missing: Sequence[int], *, finds: bool) -> NoReturn:
        """Raises because parameters got no gradient; other ranks have ended this backward pass."""
        text = unused_error(missing, self._names(missing), self._rank, finds=finds)
        frozen = [i for i in missing if not self._parameters[i].parameter.requires_grad]
        if frozen:
            text += (
                f". Frozen since the model was wrapped: {_shown(self._names(frozen))}; wrap the "
                f"module again after freezing"
            )
        self._launcher.error = text
        raise RuntimeError(text)

    def _raise(self, message: str) -> NoReturn:
        self._launcher.report(message)
        raise RuntimeError(message)

    def _names(self, indices: Sequence[int]) -> list[str]:
        return [self._parameters[index].name for index in indices]


def unused_error(missing: Sequence[int], names: Sequence[str], rank: int, *, finds: bool) -> str:
    """Returns torch's message for parameters without gradients, with their names."""
    # torch's words: users search for them.
    text = (
        "Expected to have finished reduction in the prior iteration before starting a new one. "
        "This error indicates that your module has parameters that were not used in producing "
        "loss. "
    )
    if finds:
        text += (
            "find_unused_parameters=True is set: make sure that all `forward` outputs take part "
            "in the loss, and that backward runs once for every forward. "
        )
    else:
        text += (
            "You can enable unused parameter detection by passing the keyword argument "
            "`find_unused_parameters=True` to DistributedDataParallel, and by making sure all "
            "`forward` function outputs participate in calculating loss. "
        )
    return (
        f"{text}Parameters which did not receive grad for rank {rank}: {_shown(names)}. "
        f"Parameter indices which did not receive grad for rank {rank}: {list(missing)}"
    )


def changed_error(names: Sequence[str], rank: int, *, came: bool) -> str:
    """Returns torch's message for a static graph that changed, with the parameters' names.

    Args:
        names: parameters that are not used as in the first step.
        came: whether they were used more often than in the first step, or less often.
    """
    first, then = ("unused", "used") if came else ("used", "unused")
    verb = "came more often than" if came else "did not come as often as"
    return (
        f"Your training graph has changed in this iteration, e.g., one parameter is {first} in "
        f"first iteration, but then got {then} in the second iteration. this is not compatible "
        f"with static_graph set to True. On rank {rank} the gradients of these parameters {verb} "
        f"in the first iteration: {_shown(names)}. Leave static_graph=True out, and set "
        f"find_unused_parameters=True where parameters are unused; backward runs once for every "
        f"forward"
    )


def late_error(name: str) -> str:
    """Returns the message for a gradient that arrived after its parameter counted as unused."""
    return (
        f"the gradient of {name} came in a backward pass after the one that averaged this step's "
        f"gradients, where it counted as unused, so it would stay this rank's own. With "
        f"find_unused_parameters=True backward runs once for every forward: add the losses and "
        f"call backward on the sum"
    )


def local_error(name: str, landed: bool, wrapper: str = "DistributedDataParallel") -> str:
    """Returns the message for a gradient that arrived outside of any step.

    Args:
        landed: whether a step's gradients were averaged since the latest forward pass.
        wrapper: the class that averages.
    """
    how = (
        "after this step's gradients were averaged"
        if landed
        else f"without a forward pass of {wrapper}"
    )
    return (
        f"the gradient of {name} came {how}: it would stay this rank's own, and ranks would drift "
        f"apart. Compute the loss through the wrapper, not through its module; of several losses, "
        f"or of several forward passes, add them and call backward once. Passes that are to stay "
        f"on this rank go within no_sync() or hold()"
    )


def twice_error(name: str, index: int) -> str:
    """Returns the message for a gradient that arrived twice."""
    return (
        f"Expected to mark a variable ready only once. Parameter at index {index} with name {name} "
        f"has been marked as ready twice. This means that its gradient came twice in one backward "
        f"pass: it is used outside of the module's forward, or by several reentrant backward "
        f"passes (activation checkpointing with use_reentrant=True of a shared layer, or with "
        f"find_unused_parameters=True). Set static_graph=True if the graph does not change between "
        f"steps, or use_reentrant=False"
    )


def _shown(names: Sequence[str]) -> str:
    # A model may have thousands; torch names all of them on request only, too.
    everything = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL"
    return listed(names, len(names) if everything else 20)


def full_precision_error(name: str) -> str:
    """Returns the message for a parameter that the loss uses in full precision."""
    return (
        f"the loss uses the parameter {name} as it was before the forward pass, with full "
        f"precision: with mixed_precision that gradient comes too late to be averaged. Compute "
        f"the term (a penalty on the weights, say) after the forward pass, or under no_sync"
    )


# ---- gradients that are not averaged


_HELD = "came within hold(): call reduce() after the last backward pass and before the step"
_MIXED = (
    "came in a backward pass outside of no_sync() whose forward pass was inside: the forward pass "
    "decides, so it was not averaged. Put both inside, or both outside"
)


class LocalGradients:
    """Detects optimizer steps on gradients that were accumulated but not averaged.

    Within ``no_sync`` and ``hold`` gradients are local until they are averaged, and no optimizer
    may step with held gradients. Elsewhere each gradient belongs to a step, which a forward pass
    of the wrapper begins; a gradient that arrives in no step raises.

    Args:
        parameters: of the model.
        errors: raises if passes contradict each other.

    Attributes:
        in_hold: whether passes are within ``hold``.
        has_new: whether a gradient has arrived since gradients were averaged.
        is_syncing: returns whether the module is outside of ``no_sync`` and ``hold`` now.
        is_shared: returns whether another wrapper has a parameter, too, and may average it.
        forward_synchronised: whether the latest forward pass with a graph was outside of them.
    """

    def __init__(
        self,
        parameters: Sequence[Trained],
        usage: Usage,
        errors: GraphErrors,
    ) -> None:
        self._parameters, self._usage, self._errors = parameters, usage, errors
        self.in_hold = self.has_new = False
        self.is_syncing: Callable[[], bool] = _always
        self.is_shared: Callable[[Tensor], bool] = _never
        self._landed: Step | None = None  # the last step, until the next forward
        self._landed_before: Step | None = None  # the last one at that forward
        self.forward_synchronised = True
        self._order: dict[int, None] = {}
        self._block_reason = ""  # no optimizer may step by gradients of now
        # Of all optimizers: the ones with these parameters are not known.
        before_every_step(self._optimizer_steps)

    @property
    def order(self) -> list[int]:
        """Returns the parameters in the order of their last gradients within ``hold``."""
        return list(self._order)

    def gradient_came(self, index: int, step: Step) -> None:
        """Records a gradient that this pass does not average.

        Raises:
            RuntimeError: the gradient would stay local outside of ``no_sync`` and ``hold``.
        """
        self.has_new = True
        if self.in_hold:
            self._order.pop(index, None)
            self._order[index] = None
            self._block_reason = self._block_reason or _HELD
        self._check_late(index)
        # After an error of the same pass (in another thread of autograd) that one counts.
        if self.in_hold or step.ready or not self.is_syncing():
            return
        if not self.forward_synchronised:
            self._block_reason = self._block_reason or _MIXED
        elif not self.is_shared(self._parameters[index].parameter):
            raise RuntimeError(local_error(self._parameters[index].name, self._landed is not None))

    def _check_late(self, index: int) -> None:
        """Raises if a gradient contradicts what ranks agreed on in the last step."""
        landed, name = self._landed, self._parameters[index].name
        if landed is None:
            return
        if landed.was_nested or backward_number() == landed.recomputed_in != NO_BACKWARD:
            raise RuntimeError(twice_error(name, index))
        if index in landed.unused and self._usage.is_static:
            self._errors.changed([index], came=True)
        if self._usage.finds_unused and not landed.used[index]:
            raise RuntimeError(late_error(name))

    def forward_begins(self) -> None:
        """Counts gradients from now on as the next step's."""
        self._landed_before, self._landed = self._landed, None

    def forward_was_recomputed(self) -> None:
        """Undoes the record of a forward pass that activation checkpointing ran again."""
        self._landed = self._landed_before
        self.forward_synchronised = False

    def begin_averaging_pass(self) -> None:
        """Begins a backward pass that averages, at its first gradient."""
        if self.forward_synchronised and not self.is_syncing():
            self._errors.only_backward()
        self.allow_optimizers()

    def allow_optimizers(self) -> None:
        """Allows optimizers to step again, those in backward first."""
        self._block_reason = ""

    def gradients_written(self, step: Step) -> None:
        """Clears the record of local gradients, which are averaged now."""
        self.has_new, self._landed = False, step
        self._order.clear()

    def _optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises before an optimizer steps with gradients of this rank only."""
        name = self._first_with_gradient(optimizer) if self._block_reason else None
        if name is not None:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step would use this rank's own gradient of {name}, "
                f"and ranks would drift apart: it {self._block_reason}. To drop such gradients "
                f"call zero_grad(set_to_none=True)"
            )

    def _first_with_gradient(self, optimizer: torch.optim.Optimizer) -> str | None:
        name_of = {id(entry.parameter): entry.name for entry in self._parameters}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in name_of and parameter.grad is not None:
                    return name_of[id(parameter)]
        return None


def _always() -> bool:
    return True


def _never(_: Tensor) -> bool:
    return False
