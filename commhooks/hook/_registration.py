"""Defines ``register``, which installs a scheme on a model, and ``unregister``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from functools import partial
from pkgutil import resolve_name
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commhooks._torch import comm_hooks, forward_pre_hooks
from commhooks.core._scheme import Scheme
from commhooks.errors import OptionError, RegistrationError
from commhooks.hook._attachment import AttachmentGuard
from commhooks.hook._handshake import HANDSHAKE_LIMIT
from commhooks.hook._hook_function import comm_hook
from commhooks.hook._parameters import find_ddp
from commhooks.hook._running import Running
from commhooks.hook._state import HookState
from commhooks.verify import Verification, verification_of
from commhooks.wrappers._feedback import keeps_residual
from ddp_core import DistributedDataParallel as CoreDDP

__all__ = [
    "BucketGroup",
    "BucketLayout",
    "group_function",
    "layout_facts",
    "register",
    "unregister",
]


# ---- layouts


Facts = dict[str, Any]
BucketGroup = Callable[[str, nn.Parameter], Hashable]
BucketLayout = Literal["scheme", "shape"] | BucketGroup


def group_function(layout: BucketLayout, state: Running) -> BucketGroup:
    """Returns the grouping function of ``layout``; parameters of two groups share no bucket.

    Args:
        layout: "scheme": parameters that the scheme treats in the same way share a bucket;
            "shape": matrices of one shape, all vectors together; or such a function.

    Raises:
        OptionError: ``layout`` is none of these.
    """
    if layout == "scheme":
        # The state, not its scheme: ``switch`` makes the model ask again. And the names that the
        # scheme sees, without what wrappers add, since rules choose by name.
        names = state.parameters
        return lambda name, parameter: state.scheme.bucket_group(
            names.name(parameter) or name, parameter.shape, parameter.dtype
        )
    if layout == "shape":
        return _shape
    if not callable(layout):
        raise OptionError(
            f"register(layout=...) is 'scheme', 'shape' or a function of name and parameter, "
            f"got {layout!r}"
        )
    # Here, before the hook is registered: DistributedDataParallel calls it in the next step.
    try:
        inspect.signature(layout).bind("name", None)
    except TypeError as error:
        raise OptionError(
            f"register(layout=...): {layout!r} cannot be called with a name and a parameter: "
            f"{error}"
        ) from error
    except ValueError:  # a builtin without a signature: nothing to check
        pass
    return layout


def layout_facts(layout: BucketLayout | None, group: BucketGroup | None, model: nn.Module) -> Facts:
    """Returns the facts about a layout that all ranks must have in common.

    Raises:
        OptionError: the layout's function fails, or its values cannot be compared.
    """
    if group is None:
        return {"layout": "none"}
    kind = layout if isinstance(layout, str) else "a function"
    # Numbers in order of appearance: the values may be any objects, which need not compare equal
    # between processes, and only which parameters go together matters.
    numbers: dict[Hashable, int] = {}
    listed = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            try:
                number = numbers.setdefault(group(name, parameter), len(numbers))
            except TypeError as error:
                raise OptionError(
                    f"register(layout=...): a function of name and parameter that gives something "
                    f"hashable; for {name!r} it raised: {error}"
                ) from error
            listed.append(f"{name} in group {number}")
    return {"layout": kind, "groups of parameters": listed}


def _shape(name: str, parameter: nn.Parameter) -> torch.Size | None:
    return parameter.shape if parameter.dim() > 1 else None


# ---- registration


def register(
    model: nn.Module,
    scheme: str | Scheme = "none",
    *,
    process_group: dist.ProcessGroup | None = None,
    layout: BucketLayout | None = None,
    seed: int = 0,
    history: int = 100_000,
    verify: int | Verification | None = None,
    replicate_group: Any = None,
    **options: Any,
) -> HookState:
    """Registers a scheme on a data-parallel model; all ranks call it.

    All ranks pass equal arguments.

    Args:
        model: torch's DistributedDataParallel, a module that holds exactly one, a module of the
            composable ``replicate()``, or a model of FSDP2 (``fully_shard``) or FSDP1, whose
            reduce-scatter the scheme replaces.
        scheme: a name (:func:`commhooks.scheme_names`) or a scheme; "auto" measures and chooses,
            see :class:`commhooks.auto.AutoHook`.
        process_group: ranks to average over; by default the model's.
        layout: grouping of parameters into buckets, on ``ddp_core.DistributedDataParallel``:
            "scheme" (parameters that the scheme treats in the same way), "shape" (matrices of one
            shape, all vectors together), or a function of name and parameter; None: any.
        seed: base of the scheme's random draws, the same on every rank.
        history: rows kept for ``report``, one per bucket and round; totals count all rows.
        verify: number of steps after which the result is compared with the uncompressed (dense)
            mean and across ranks; what is wrong is a warning. A :class:`commhooks.Verification` can
            raise instead. None: never. Not for ``replicate()``.
        replicate_group: for FSDP2: replicas to average over after FSDP2 has reduced within a node
            (HSDP), a process group or a mesh of one dimension; any scheme.
        options: options of the scheme, see :func:`commhooks.make`.

    Returns:
        The hook's state, which switches schemes, saves, loads and reports.

    Raises:
        RegistrationError: the model is not a DDP model or has a hook already, or there is no
            process group.
        UnknownSchemeError, OptionError: a name or an option is wrong; suggests the nearest.
        MismatchError: the ranks differ in scheme, options, versions or parameters, or
            (MissingRankError) some did not come within 5 minutes or the group's timeout.

    Example:
        >>> hook = commhooks.register(ddp_model, "powersgd", rank=4, start_step=100)
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RegistrationError(
            "register: no process group; call torch.distributed.init_process_group first"
        )
    verification = verification_of(verify, history)

    # Hand a model of another host to the module that serves it.
    # By its name: hosts are above this module, and most models have none.
    host = resolve_name("commhooks.hosts:host_of")(model)
    if host is not None:
        registers, takes = host
        _check_defaults(
            process_group=process_group,
            layout=layout,
            verify=None if "verification" in takes else verify,
            scheme="auto" if scheme == "auto" and "auto" not in takes else None,
        )
        if "verification" in options:
            raise OptionError("register(verification=...): it is called verify, as in verify=100")
        if "verification" in takes:
            options["verification"] = verification
        if "replicate_group" in takes:
            options["replicate_group"] = replicate_group
        elif replicate_group is not None:
            raise RegistrationError(
                "register(replicate_group=...) is for models of FSDP2 (fully_shard)"
            )
        state: HookState = registers(model, scheme, seed=seed, history=history, **options)
        return state
    if replicate_group is not None:
        raise RegistrationError(
            "register(replicate_group=...) is for models of FSDP2 (fully_shard)"
        )

    # Refuse a model that has a hook.
    ddp = find_ddp(model)
    _drop_stale(ddp)
    if comm_hooks(ddp):
        hook, present = comm_hooks(ddp)[0]
        if isinstance(present, HookState):
            raise RegistrationError(
                f"register: this model already has the hook {present}; change its scheme with "
                f"hook.switch(...)"
            )
        raise RegistrationError(
            f"register: this model already has the hook {getattr(hook, '__qualname__', hook)}, "
            f"and DistributedDataParallel takes one; "
            + (
                "call its remove_comm_hook() first"
                if isinstance(ddp, CoreDDP)
                else "wrap the module again to change it"
            )
        )

    # Make the hook, and compare it with those of the other ranks.
    core = None if layout is None else _core(ddp, "register(layout=...)")
    state = _make_state(scheme)(
        ddp, process_group=process_group, seed=seed, history=history, **options
    )
    state._verify_with(verification)
    group = None if layout is None else group_function(layout, state)
    facts: dict[str, Any] = {
        "DistributedDataParallel": f"{type(ddp).__module__}.{type(ddp).__qualname__}"
    }
    facts |= layout_facts(layout, group, ddp.module)
    facts |= {"trained before, with buckets that torch skips": _has_skipped(ddp)}
    # torch's class cannot remove a hook, so nothing is registered before all ranks have agreed.
    state.agree("commhooks.register", facts, HANDSHAKE_LIMIT)
    # After the handshake, which compares this fact: all ranks raise, or none does.
    if _has_skipped(ddp):
        state.close()
        raise RegistrationError(
            "register: this model was trained without a hook before, with "
            "skip_all_reduce_unused_params=True; torch's DistributedDataParallel fails at the next "
            "bucket that it skips, with any hook ('INTERNAL ASSERT FAILED'). Register before the "
            "first step, wrap the module again, or use ddp_core.DistributedDataParallel"
        )

    # Attach it.
    ddp.register_comm_hook(state, comm_hook)
    state.target.launches_ahead = True
    if core is not None:
        core.request_layout(group)
    ddp.register_forward_pre_hook(AttachmentGuard(state, ddp))
    return state


def _make_state(scheme: str | Scheme) -> Callable[..., HookState]:
    if scheme == "auto":
        # By its name: it predicts with hooks, so that its module is above this one.
        made: Callable[..., HookState] = resolve_name("commhooks.auto:AutoHook")
        return made
    return partial(HookState, scheme)


def _check_defaults(**arguments: object) -> None:
    given = [f"{name}={value!r}" for name, value in arguments.items() if value is not None]
    if given:
        raise RegistrationError(
            f"register({', '.join(given)}): not for models of FSDP and replicate(), which decide "
            f"themselves over which ranks, and in which buckets, they reduce; leave it out"
            + (", or name a scheme" if arguments.get("scheme") else "")
        )


def unregister(model: nn.Module) -> None:
    """Returns a model to the plain all-reduce; all ranks call it, between two steps.

    A residual of error feedback is added to the next gradient first. It is lost if that step is not
    finite, or where no rank uses a parameter in it; ``hook.switch("none")`` waits for a later one.

    Args:
        model: ``ddp_core.DistributedDataParallel`` (torch's cannot remove a hook), or a module
            that holds exactly one.

    Raises:
        RegistrationError: the model is torch's DistributedDataParallel, or has no hook of
            commhooks.

    Example:
        >>> commhooks.unregister(ddp_model)
    """
    ddp = find_ddp(model)
    core = _core(ddp, "unregister")
    state = comm_hooks(core)[0][1] if comm_hooks(core) else None
    if not isinstance(state, HookState):
        raise RegistrationError("unregister: no hook was registered by commhooks on this model")
    for key, guard in list(forward_pre_hooks(ddp).items()):
        if isinstance(guard, AttachmentGuard):
            del forward_pre_hooks(ddp)[key]
    if state.verification is not None:
        state.verification.close()  # the step that flushes is not verified
    if keeps_residual(state.scheme):
        # The hook runs one step more, which flushes the residual into the gradient.
        state.switch("none")
        core.schedule_comm_hook(core.reducer.launcher.step + 1, None, None)
    else:
        core.remove_comm_hook()


def _core(ddp: DistributedDataParallel, call: str) -> CoreDDP:
    if isinstance(ddp, CoreDDP):
        return ddp
    raise RegistrationError(
        f"{call}: torch's DistributedDataParallel cannot remove a hook or take a bucket layout; "
        f"wrap the module in ddp_core.DistributedDataParallel (hook.switch('none') turns "
        f"compression off with either class)"
    )


def _has_skipped(ddp: DistributedDataParallel) -> bool:
    """Whether torch trained without a hook, with buckets that it skips; hooks would then fail."""
    skips = not isinstance(ddp, CoreDDP) and getattr(ddp, "skip_all_reduce_unused_params", False)
    return bool(skips) and any(ddp.reducer.get_backward_stats())  # times of gradients


def _drop_stale(ddp: DistributedDataParallel) -> None:
    """Removes the hook that a pickled or copied DDP lists but its reducer does not have."""
    # A copy keeps ``_comm_hooks`` and the forward pre-hooks, but has a new reducer without a hook.
    # torch has no way to ask the reducer; the guard of another module shows that this is a copy.
    guards = [
        (key, guard)
        for key, guard in forward_pre_hooks(ddp).items()
        if isinstance(guard, AttachmentGuard)
    ]
    for key, guard in guards:
        if not guard.attached_to(ddp):
            del forward_pre_hooks(ddp)[key]
            comm_hooks(ddp).clear()
