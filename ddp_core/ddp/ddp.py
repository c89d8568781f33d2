"""DistributedDataParallel: the module around a model whose gradients all ranks average."""

from __future__ import annotations

import copy
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel.scatter_gather import scatter_kwargs

from ddp_core.ddp import construct as _construct
from ddp_core.ddp.buffers import Buffers
from ddp_core.ddp.compile import splitting_at_buckets
from ddp_core.ddp.delayed import DelayedAllReduce
from ddp_core.ddp.hooks import CommHooks
from ddp_core.ddp.join import Plans, ShadowHook, common_rank, tell_joined_ranks
from ddp_core.ddp.logging_data import log_construction, log_recorded_steps
from ddp_core.ddp.sink import through_sink
from ddp_core.ddp.torch_names import TorchNames
from ddp_core.ddp.torch_reducer import TorchReducer
from ddp_core.reducer.layout import BucketCaps
from ddp_core.reducer.optimizer import OptimizersInBackward, has_optimizer_in_backward, take_over
from ddp_core.reducer.parameters import (
    broadcast_coalesced,
    refuse_thawed,
    trained_parameters,
    verify_across_ranks,
)
from ddp_core.reducer.precision import Precision, Use
from ddp_core.reducer.ranges import named_range
from ddp_core.reducer.step import ReducerSettings
from ddp_core.reducer.timeline import Timeline

if TYPE_CHECKING:  # what is torch's own behind the methods below does not matter to their types

    class TorchDDP(nn.Module, Joinable):
        _join_config: Any
        _divide_by_initial_world_size: bool
else:
    from torch.nn.parallel import DistributedDataParallel as TorchDDP

__all__ = ["DistributedDataParallel"]

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _not_traced(*, recursive: bool) -> Callable[[_Method], _Method]:
    """The compiler leaves the method alone, and what it calls if ``recursive``."""
    decorator: Any = torch._disable_dynamo(recursive=recursive)  # type: ignore[attr-defined]
    return decorator  # type: ignore[no-any-return]


_STATIC_FINDS_UNUSED = (
    "You passed find_unused_parameters=true to DistributedDataParallel, `_set_static_graph` will "
    "detect unused parameters automatically, so you do not need to set "
    "find_unused_parameters=true, just be sure these unused parameters will not change during "
    "training loop while calling `_set_static_graph`."
)


class _Mode(NamedTuple):
    """How a forward pass runs."""

    recomputed: bool  # a part of the backward pass of a step under way
    low: Use | None = None  # it uses low-precision parameters


_numbers = itertools.count()  # all ranks construct their modules in the same order


class DistributedDataParallel(TorchNames, TorchDDP):
    """torch's ``DistributedDataParallel`` in Python: same arguments, same semantics.

    A subclass of torch's, so that ``isinstance`` checks (checkpoints, trainers, optimizers) hold;
    what it does is here and in :class:`ddp_core.Reducer`. Beyond torch's: hooks can be replaced and
    removed between steps, a scheme can ask for its own bucket layout, every bucket leaves a
    timeline, and a rank that fails tells the others.

    Args:
        module: the model.
        device_ids, output_device: one CUDA device, or None.
        broadcast_buffers: as ``forward_sync_buffers``; False leaves buffers alone at the start too.
        init_sync: verify shapes and take rank 0's parameters and buffers.
        process_group, device_mesh: ranks; the default group, or a mesh of one dimension.
        bucket_cap_mb: MiB at which a bucket is full; by default 1 for the first one, then 25, or
            8 on the CPU (25 there as well gives torch's buckets, and so its last bits).
        bucket_cap_mb_list: the same, bucket by bucket.
        find_unused_parameters: ask autograd at every step which parameters get no gradient.
        gradient_as_bucket_view: gradients are views of the buckets: no second copy.
        static_graph: every step uses the same parameters in the same way.
        delay_all_reduce_named_params, param_to_hook_all_reduce: those parameters are averaged
            together when the gradient of that one is ready.
        mixed_precision: :class:`ddp_core.MixedPrecision`, or torch's.
        skip_all_reduce_unused_params: buckets that no rank uses are not sent. With
            ``find_unused_parameters`` the ranks agree on them in a small all-reduce before the
            first bucket, so they may use different parameters (torch's need the same on all).
        forward_sync_buffers: take rank 0's buffers before every forward.
        check_reduction, dim, batched_grad_copy: accepted for compatibility; small gradients are
            always copied in batches.

    Raises:
        RuntimeError, ValueError: as torch's.
        MismatchError: the ranks' models differ; names the first parameter that does.

    Example:
        >>> ddp_model = ddp_core.DistributedDataParallel(model)
        >>> loss = ddp_model(inputs).square().mean()
        >>> loss.backward()
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        self.process_group = _construct.process_group(module, process_group, device_mesh)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        delayed = _construct.delayed(delay_all_reduce_named_params, param_to_hook_all_reduce)
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.parameters_to_ignore |= {name for name, _ in delayed}
        managed = [
            parameter
            for name, parameter in module.named_parameters()
            if name not in self.parameters_to_ignore
        ]
        everything_delayed = _construct.check_parameters(managed, delayed)
        placement = _construct.placement(
            managed or [parameter for _, parameter in delayed], device_ids, output_device
        )
        self.device_ids, self.output_device = placement.device_ids, placement.output_device
        self.device, self.device_type = placement.device, placement.device.type
        self.is_multi_device_module = placement.several
        if check_reduction:
            warnings.warn(
                "The `check_reduction` argument in `DistributedDataParallel` module is "
                "deprecated. Please avoid using it.",
                FutureWarning,
                stacklevel=2,
            )
        self.module = module
        self.dim = dim
        self.logger = None
        self._ddp_sink_clone = True
        self.forward_sync_buffers = _first(forward_sync_buffers, broadcast_buffers, True)
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.mixed_precision = mixed_precision
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.batched_grad_copy = batched_grad_copy
        self.broadcast_bucket_size = 250 * 1024 * 1024
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self._caps = BucketCaps.of(bucket_cap_mb, bucket_cap_mb_list, self.device_type)
        self._hooks = CommHooks(self._caps)
        self._in_backward: bool | None = None  # whether optimizers step in backward
        self.has_joined = False  # ranks may run out of inputs (join)
        self.overlaps_zero = False  # see ddp_core.zero
        self._delay_all_reduce_all_params = everything_delayed
        self._delayed: DelayedAllReduce | None = None
        if delayed:
            assert param_to_hook_all_reduce is not None
            self._delayed = DelayedAllReduce(
                [parameter for _, parameter in delayed],
                param_to_hook_all_reduce,
                self.process_group,
                chunk_nbytes=self.broadcast_bucket_size,
            )
        if everything_delayed:
            return
        trained = trained_parameters(module, self.parameters_to_ignore)
        self._buffers_in_sync = self._find_buffers()
        if init_sync:
            verify_across_ranks(trained, self.process_group)
            own_buffers = forward_sync_buffers is None and broadcast_buffers is False
            self._take_states(0, buffers=not own_buffers)
        self._build_reducer()
        if static_graph and find_unused_parameters:
            warnings.warn(_STATIC_FINDS_UNUSED, stacklevel=2)
        log_construction(self)

    # ---- training

    @_not_traced(recursive=False)
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward; a rank-0 broadcast of buffers before it, accounting after it."""
        if self._delay_all_reduce_all_params:
            assert self._delayed is not None
            output = self.module(*inputs, **kwargs)
            if torch.is_grad_enabled():
                self._delayed.prepare(synchronises=self.require_backward_grad_sync)
            return output
        inputs, kwargs, mode = self._before_forward(inputs, kwargs)
        try:
            with named_range("forward"), splitting_at_buckets(self, self.reducer.plan):
                output = self.module(*inputs, **kwargs)
        except BaseException:
            if mode.low is not None:
                mode.low.end()
            raise
        return self._after_forward(output, mode)

    @_not_traced(recursive=True)
    def _before_forward(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], _Mode]:
        if self.device_ids:
            moved = scatter_kwargs(inputs, kwargs, [self.device_ids[0]], dim=self.dim)
            inputs, kwargs = moved[0][0], moved[1][0]
        recomputed, low = self.reducer.is_recomputed(), None
        if not recomputed:
            self._begin_step()
        if self._precision is not None:
            low = self._precision.begin_forward()
            if torch.is_grad_enabled() and not self._precision.is_watched:
                self._precision.is_watched = True
                self.reducer.accumulators.watch()
            inputs = self._precision.cast_inputs(inputs)
            kwargs = self._precision.cast_inputs(kwargs)
        return inputs, kwargs, _Mode(recomputed, low)

    def _begin_step(self) -> None:
        """What a forward pass does before it computes, all ranks alike."""
        reducer = self.reducer
        if self._in_backward is None:
            self._set_up_optimizers_in_backward()
        grads = torch.is_grad_enabled()
        sync = grads and self.require_backward_grad_sync
        work = Join.notify_join_context(self)
        if self._join_config.enable:
            tell_joined_ranks(self.process_group, self.device, Plans(grads, sync))
        if grads:
            reducer.prepare_for_forward()
            if sync:
                self._hooks.follow_schedule(self)
                reducer.time_forward()
        if work is not None:
            reducer.set_effective_ranks(work, static_world_size=self._divide_by_initial_world_size)
        if self._synchronises_buffers(after_forward=False):
            self._synchronise_buffers(backward_follows=sync)

    @_not_traced(recursive=True)
    def _after_forward(self, output: Any, mode: _Mode) -> Any:
        if not mode.recomputed:
            output = self._end_step_forward(output)
        if mode.low is not None:
            assert self._precision is not None
            self._precision.end_forward(mode.low, output)
        return output

    def _end_step_forward(self, output: Any) -> Any:
        reducer = self.reducer
        sync = torch.is_grad_enabled() and self.require_backward_grad_sync
        if self._synchronises_buffers(after_forward=True):
            self._synchronise_buffers(backward_follows=sync)
        self.require_forward_param_sync = sync
        if sync:
            reducer.prepare_for_backward()
        if sync and reducer.usage.needs_sink:
            output = through_sink(output, weakref.ref(reducer.backward), clone=self._ddp_sink_clone)
        if self._delayed is not None and torch.is_grad_enabled():
            self._delayed.prepare(synchronises=sync)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of forward and backward passes inside stay on this rank and accumulate.

        They are averaged, with its own, by the first backward pass whose forward is outside.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    # ---- buffers

    def _synchronises_buffers(self, *, after_forward: bool) -> bool:
        hook = self._buffers_in_sync.hook
        return self.will_sync_module_buffers() and after_forward == (
            hook is not None and hook.after_forward
        )

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward makes buffers equal on all ranks."""
        return (
            self.require_forward_param_sync
            and self.forward_sync_buffers
            and bool(self._buffers_in_sync.named)
        )

    def _synchronise_buffers(self, *, backward_follows: bool, candidate: bool = True) -> None:
        source = 0
        if self._join_config.enable:  # rank 0 may have no input left and old buffers
            source = common_rank(self.process_group, self.device, candidate=candidate)
        futures = self._buffers_in_sync.synchronise(source)
        if backward_follows:  # at its end
            self.reducer.await_futures(futures)
        else:
            self.reducer.launcher.await_futures(futures)

    # ---- uneven inputs

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Context in which ranks may run out of inputs at different times.

        Args:
            divide_by_initial_world_size: gradients are divided by the number of ranks; else by
                the number of those that have inputs. Holds for hooks, too.
            throw_on_early_termination: all ranks raise as soon as one has no inputs.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> ShadowHook:
        """What :class:`torch.distributed.algorithms.join.Join` runs on a rank without inputs."""
        if self.overlaps_zero:
            raise RuntimeError(
                "DistributedDataParallel.join: a ZeroRedundancyOptimizer steps while gradients are "
                "averaged (hook_with_zero_step), for which all ranks need inputs. Construct it "
                "with overlap_with_ddp=False"
            )
        if self._delayed is not None:
            raise RuntimeError(
                "DistributedDataParallel.join: a rank without inputs does not take part in the "
                "delayed all-reduce of delay_all_reduce_named_params. Give all ranks as many "
                "inputs, or construct it without that argument"
            )
        self._divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        self.has_joined = True
        return ShadowHook(self)

    def _take_model_of(self, candidate: bool) -> None:
        source = common_rank(self.process_group, self.device, candidate=candidate)
        self._take_states(source, buffers=self.forward_sync_buffers)

    # ---- state

    def _take_states(self, source: int, *, buffers: bool) -> None:
        ignored = self.parameters_to_ignore
        tensors: list[Tensor] = [p for n, p in self.module.named_parameters() if n not in ignored]
        if buffers:
            tensors += [b for n, b in self.module.named_buffers() if n not in ignored]
        broadcast_coalesced(
            tensors, self.process_group, source=source, chunk_nbytes=self.broadcast_bucket_size
        )

    def _find_buffers(self) -> Buffers:
        return Buffers(
            self.module,
            self.parameters_to_ignore,
            self.process_group,
            chunk_nbytes=self.broadcast_bucket_size,
        )

    def _start_anew(self) -> None:
        self._buffers_in_sync = self._find_buffers()
        self._build_reducer()

    def _build_reducer(self) -> None:
        trained = trained_parameters(self.module, self.parameters_to_ignore)
        refuse_thawed(self, self.parameters_to_ignore)
        config = self.mixed_precision
        self._precision = None
        reduce_dtype = None
        if config is not None:
            self._precision = Precision(config, self.module, trained, self.parameters_to_ignore)
            reduce_dtype = config.reduce_dtype or config.param_dtype
        self.reducer = TorchReducer(
            trained,
            self.process_group,
            ReducerSettings(
                self._caps,
                find_unused=self.find_unused_parameters,
                static_graph=self.static_graph,
                as_view=self.gradient_as_bucket_view and config is None,
                skip_unused=self.skip_all_reduce_unused_params,
                dtype=reduce_dtype,
            ),
            precision=self._precision,
            name=str(next(_numbers)),
        )
        if self._precision is not None:
            self.reducer.accumulators.refuse_other_nodes()
        log_recorded_steps(self)
        if self.device_type == "cpu":
            _construct.refuse_sync_batch_norm(self.module)

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not dist.group.WORLD:
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default "
                "process group. That is, when you have called init_process_group and have not "
                "passed process_group argument to DDP constructor"
            )
        attributes = copy.copy(self.__dict__)
        for own in (
            "process_group",
            "reducer",
            "logger",
            "_precision",
            "_buffers_in_sync",
        ):
            attributes.pop(own, None)
        attributes["_hooks"] = CommHooks(self._caps)  # a hook belongs to this reducer
        return attributes

    def __setstate__(self, state: dict[str, Any]) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "unpickling DistributedDataParallel needs a process group: call "
                "torch.distributed.init_process_group first"
            )
        assert dist.group.WORLD is not None
        nn.Module.__setstate__(self, state)
        self.process_group = dist.group.WORLD
        if self._delayed is not None:
            self._delayed.attach(self.process_group)
        self.logger = None
        self._in_backward = None
        self._start_anew()

    def _set_static_graph(self) -> None:
        if self.static_graph:
            warnings.warn(
                "You've set static_graph to be True, no need to set it again.", stacklevel=2
            )
            return
        if self.find_unused_parameters:
            warnings.warn(_STATIC_FINDS_UNUSED, stacklevel=2)
        self.static_graph = True
        self.reducer._set_static_graph()

    def _set_up_optimizers_in_backward(self) -> None:
        parameters = [one.parameter for one in self.reducer.parameters]
        self._in_backward = has_optimizer_in_backward(parameters)
        if self._in_backward:
            take_over(parameters)
            self.reducer.in_flight.optimizer = OptimizersInBackward()

    # ---- what users look at

    @property
    def timeline(self) -> Timeline:
        """When each bucket's gradients came, travelled and were awaited."""
        return self.reducer.timeline


def _first(*values: bool | None) -> bool:
    return next(value for value in values if value is not None)
