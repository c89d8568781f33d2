"""What is said of a backward pass whose gradients do not come as agreed."""

from __future__ import annotations

import os
from collections.abc import Sequence

__all__ = [
    "changed_error",
    "full_precision_error",
    "late_error",
    "twice_error",
    "unused_error",
]


def unused_error(missing: Sequence[int], names: Sequence[str], rank: int, *, finds: bool) -> str:
    """What users of DistributedDataParallel know, with the names."""
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
    """What users of a static graph know, with the names.

    Args:
        names: parameters that are not used as in the first step.
        came: whether they were used more often than there, or less.
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
    """A parameter counted as unused, then its gradient came."""
    return (
        f"the gradient of {name} came in a backward pass after the one that averaged this step's "
        f"gradients, where it counted as unused, so it would stay this rank's own. With "
        f"find_unused_parameters=True backward runs once for every forward: add the losses and "
        f"call backward on the sum"
    )


def twice_error(name: str, index: int) -> str:
    """A gradient came twice."""
    return (
        f"Expected to mark a variable ready only once. Parameter at index {index} with name {name} "
        f"has been marked as ready twice. This means that its gradient came twice in one backward "
        f"pass: it is used outside of the module's forward, or by several reentrant backward "
        f"passes (activation checkpointing with use_reentrant=True of a shared layer, or with "
        f"find_unused_parameters=True). Set static_graph=True if the graph does not change between "
        f"steps, or use_reentrant=False"
    )


def _shown(names: Sequence[str]) -> str:
    everything = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL"
    return ", ".join(names if everything else names[:20]) + (
        ", ..." if len(names) > 20 and not everything else ""
    )


def full_precision_error(name: str) -> str:
    """Of a parameter that the loss uses with full precision, beside the low-precision model."""
    return (
        f"the loss uses the parameter {name} as it was before the forward pass, with full "
        f"precision: with mixed_precision that gradient comes too late to be averaged. Compute "
        f"the term (a penalty on the weights, say) after the forward pass, or under no_sync"
    )
