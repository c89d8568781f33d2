"""DistributedDataParallel: the module around a model whose gradients all ranks average."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable

from ddp_core.ddp import construct as _construct
from ddp_core.ddp.agreement import frozen_facts, module_facts, verify_across_ranks
from ddp_core.ddp.buffers import Buffers
from ddp_core.ddp.compile import splitting_at_buckets
from ddp_core.ddp.delayed import DelayedAllReduce
from ddp_core.ddp.forward import before_forward, not_traced
from ddp_core.ddp.logging_data import log_construction, log_recorded_steps
from ddp_core.ddp.parts import Parts
from ddp_core.ddp.reduction import ReductionMethods
from ddp_core.ddp.tensor_parallel import localize
from ddp_core.ddp.torch_methods import TorchMethods
from ddp_core.reducer.layout import BucketCaps
from ddp_core.reducer.ranges import named_range
from ddp_core.reducer.step import ReducerSettings
from ddp_core.reducer.timeline import Timeline

if TYPE_CHECKING:  # what is torch's own behind the methods below does not matter to their types

    class TorchDDP(nn.Module, Joinable):
        _join_config: Any
else:
    from torch.nn.parallel import DistributedDataParallel as TorchDDP

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(ReductionMethods, TorchMethods, TorchDDP):
    """Averages gradients as torch's class of this name, in Python: same arguments, same semantics.

    A subclass of torch's, so that ``isinstance`` checks (checkpoints, trainers, optimizers) hold;
    what it does is here and in :class:`ddp_core.Reducer`. Beyond torch's: hooks can be replaced and
    removed between steps, a scheme can ask for its own bucket layout, every bucket leaves a
    timeline, a rank that fails tells the others, and gradients are averaged at a named point
    (:meth:`hold`, :meth:`reduce`).

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
        # Not torch's constructor: that would make torch's reducer, too.
        nn.Module.__init__(self)
        Joinable.__init__(self)
        group = _construct.process_group(process_group, device_mesh)
        localize(module)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        delayed = _construct.delayed(delay_all_reduce_named_params, param_to_hook_all_reduce)
        replica = _construct.replica(module, group, delayed, device_ids, output_device)
        if broadcast_buffers is not None:
            _construct.warn_of_broadcast_buffers(
                both=forward_sync_buffers is not None, stacklevel=3
            )
        if check_reduction:
            _construct.warn_of_check_reduction(stacklevel=3)
        self.module, self.dim, self.logger = module, dim, None
        # What trainers look at is kept as it was given.
        self.device, self.device_type = replica.device, replica.device.type
        _, self.device_ids, self.output_device, self.is_multi_device_module = replica.placement
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.mixed_precision = mixed_precision
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.batched_grad_copy = batched_grad_copy
        self.require_backward_grad_sync = True
        self._ddp_sink_clone = True
        settings = ReducerSettings(
            BucketCaps.of(bucket_cap_mb, bucket_cap_mb_list, self.device_type),
            find_unused=find_unused_parameters,
            static_graph=static_graph,
            as_view=gradient_as_bucket_view,
            skip_unused=skip_all_reduce_unused_params,
            dtype=_construct.reduced_dtype(mixed_precision),
        )
        sync_buffers = _first(forward_sync_buffers, broadcast_buffers, True)
        trained = replica.trained()
        self._parts = Parts(
            replica,
            settings,
            Buffers(replica, enabled=sync_buffers),
            mixed_precision=mixed_precision,
            delayed=DelayedAllReduce.of(delayed, param_to_hook_all_reduce, replica),
            reduces=bool(trained),
        )
        if trained and init_sync:
            # First, for a broadcast into tensors of other sizes would hang or mix them up.
            # `broadcast_buffers=False` leaves them alone at the start, too.
            own_buffers = forward_sync_buffers is None and broadcast_buffers is False
            arguments = [f"takes rank 0's buffers: {not own_buffers}"]
            facts = module_facts(self, taken=not own_buffers, arguments=arguments)
            verify_across_ranks(trained, facts | frozen_facts(replica), group)
            replica.take_from(0, buffers=not own_buffers)
        self._parts.put_together(self)
        log_recorded_steps(self._parts)
        if trained and static_graph and find_unused_parameters:
            _construct.warn_that_static_finds_unused(stacklevel=3)
        log_construction(self._parts, mixed_precision)

    # ---- training

    @not_traced(recursive=False)
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module's forward: first takes rank 0's buffers, then prepares backward."""
        if not self._parts.reduces:
            return self._after_delayed(self.module(*inputs, **kwargs))
        inputs, kwargs, under_way = before_forward(self._parts, self, inputs, kwargs)
        try:
            with named_range("forward"), splitting_at_buckets(self, self.reducer.plan):
                output = self.module(*inputs, **kwargs)
        except BaseException:
            under_way.broke_off()
            raise
        return under_way.end(output)

    @not_traced(recursive=True)
    def _after_delayed(self, output: Any) -> Any:
        assert self._parts.delayed is not None  # all parameters are: there is no reducer
        if torch.is_grad_enabled():
            self._parts.known.check()
            self._parts.delayed.prepare(synchronises=self.require_backward_grad_sync)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keeps gradients of the passes inside on this rank, where they accumulate.

        They are averaged, with its own, by the first backward pass whose forward is outside. Both
        passes have to be inside: backward alone is an error.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    # ---- uneven inputs

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Returns a context in which ranks may run out of inputs at different times.

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

    # ---- state

    def __getstate__(self) -> dict[str, Any]:
        return vars(self).copy()  # torch's would look for what its constructor makes

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)
        self._parts.revive()
        self._parts.put_together(self)
        log_recorded_steps(self._parts)

    # ---- what users look at

    @property
    def timeline(self) -> Timeline:
        """Returns when each bucket's gradients came, travelled and were awaited."""
        return self.reducer.timeline


def _first(*values: bool | None) -> bool:
    return next(value for value in values if value is not None)
