"""Defines DistributedDataParallel, the module around a model whose gradients all ranks average."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable

from ddp_core._torch import dynamo_disable, dynamo_disable_shallow
from ddp_core.ddp import _construct as _construct
from ddp_core.ddp._agreement import check_across_ranks, frozen_facts, module_facts
from ddp_core.ddp._compile import splitting_at_buckets
from ddp_core.ddp._ddp_state import DDPState
from ddp_core.ddp._delayed import DelayedAllReduce
from ddp_core.ddp._forward import ForwardPass, before_forward
from ddp_core.ddp._logging_data import log_construction, log_recorded_steps
from ddp_core.ddp._replica import BufferHook, Buffers, JoinFlags
from ddp_core.ddp._tensor_parallel import localize
from ddp_core.ddp._torch_names import TorchNames
from ddp_core.reducer._autograd import NO_BACKWARD, backward_number
from ddp_core.reducer._launch import CommHook, ReducerSettings, named_range
from ddp_core.reducer._plan import BucketCaps, BucketGroup, SavedBuckets
from ddp_core.reducer._reducer import reduce_at_point
from ddp_core.reducer._timeline import Timeline

if TYPE_CHECKING:  # what is torch's own behind the methods below does not matter to their types

    class TorchDDP(nn.Module, Joinable):
        _join_config: Any
else:
    from torch.nn.parallel import DistributedDataParallel as TorchDDP

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(TorchNames, TorchDDP):
    """Averages gradients in Python, with the arguments and semantics of torch's class.

    The class derives from torch's, so that ``isinstance`` checks (checkpoints, trainers,
    optimizers) hold; its work is done here and in ``Reducer``. Beyond torch's class:
    hooks can be replaced and removed between steps, a scheme can request a bucket layout, every
    bucket leaves a timeline, a rank that fails notifies the others, and gradients can be averaged
    at a named point (:meth:`hold`, :meth:`reduce`).

    Args:
        module: the model.
        device_ids, output_device: one CUDA device, or None.
        broadcast_buffers: as ``forward_sync_buffers``; False skips the first broadcast, too.
        init_sync: verify shapes and take rank 0's parameters and buffers.
        process_group, device_mesh: ranks; the default group, or a mesh of one dimension.
        bucket_cap_mb: MiB at which a bucket is full; by default 1 for the first one, then 25, or
            8 on the CPU (25 there as well gives torch's buckets, and so its last bits).
        bucket_cap_mb_list: MiB at which the first, second, ... bucket is full.
        find_unused_parameters: ask autograd at every step which parameters get no gradient.
        gradient_as_bucket_view: gradients are views of the buckets: no second copy.
        static_graph: every step uses the same parameters in the same way.
        delay_all_reduce_named_params, param_to_hook_all_reduce: the named parameters are averaged
            together when the gradient of the hook parameter is ready.
        mixed_precision: :class:`ddp_core.MixedPrecision`, or torch's.
        skip_all_reduce_unused_params: buckets that no rank uses are not sent. With
            ``find_unused_parameters`` the ranks agree on them in a small all-reduce before the
            first bucket, so they may use different parameters (torch's need the same on all).
        forward_sync_buffers: take rank 0's buffers before every forward.
        check_reduction, dim, batched_grad_copy: accepted for compatibility; small gradients are
            always copied in batches.

    Raises:
        RuntimeError, ValueError: as torch's class raises them.
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
        # Attributes that trainers read keep the given values.
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
        self._ddp_state = DDPState(
            replica,
            settings,
            Buffers(replica, enabled=sync_buffers),
            mixed_precision=mixed_precision,
            delayed=DelayedAllReduce.of(delayed, param_to_hook_all_reduce, replica),
            reduces=bool(trained),
        )
        if trained and init_sync:
            # First, for a broadcast into tensors of other sizes would hang or mix them up.
            # `broadcast_buffers=False` skips their first broadcast, too.
            own_buffers = forward_sync_buffers is None and broadcast_buffers is False
            arguments = [f"takes rank 0's buffers: {not own_buffers}"]
            facts = module_facts(self, taken=not own_buffers, arguments=arguments)
            check_across_ranks(trained, facts | frozen_facts(replica), group)
            replica.broadcast_from(0, buffers=not own_buffers)
        self._ddp_state.build(self)
        log_recorded_steps(self._ddp_state)
        if trained and static_graph and find_unused_parameters:
            _construct.warn_that_static_finds_unused(stacklevel=3)
        log_construction(self._ddp_state, mixed_precision)

    # ---- training

    @dynamo_disable_shallow
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module's forward: first takes rank 0's buffers, then prepares backward."""
        if not self._ddp_state.reduces:
            return self._after_delayed(self.module(*inputs, **kwargs))
        inputs, kwargs, under_way = before_forward(self._ddp_state, self, inputs, kwargs)
        try:
            with named_range("forward"), splitting_at_buckets(self, self.reducer.plan):
                output = self.module(*inputs, **kwargs)
        except BaseException:
            under_way.broke_off()
            raise
        return under_way.end(output)

    @dynamo_disable
    def _after_delayed(self, output: Any) -> Any:
        assert self._ddp_state.delayed is not None  # all parameters are: there is no reducer
        if torch.is_grad_enabled():
            self._ddp_state.known.check()
            self._ddp_state.delayed.prepare(synchronises=self.require_backward_grad_sync)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keeps gradients of the passes inside on this rank, where they accumulate.

        The first backward pass whose forward is outside averages them with its own gradients.
        Forward and backward have to be inside: backward alone is an error.
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
            throw_on_early_termination: all ranks raise as soon as a rank has no inputs.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    # ---- state

    # ---- hooks, layouts, other ranks

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        # torch's built-in ones are C++ and take a C++ bucket; these compute the same.
        hooks = {
            "ALLREDUCE": default_hooks.allreduce_hook,
            "FP16_COMPRESS": default_hooks.fp16_compress_hook,
        }
        self.register_comm_hook(self.process_group, hooks[comm_hook_type.name])
        self.reducer.launcher.hook_name = str(comm_hook_type)

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Averages gradients by ``hook(state, bucket) -> Future[Tensor]`` from the next step on.

        All ranks call it alike. ``bucket`` is a :class:`ddp_core.GradBucket`; it is not divided by
        the number of ranks. A state with a method ``bucket_group(name, parameter)`` gets buckets
        of parameters for which that returns the same; its ``bucket_cap_mb`` is used unless the
        user has set a size.

        A state is notified of the course of each synchronised step, by those of these methods
        that it has when the hook is set:

        ``backward_finished()``: backward has ended well, so no bucket follows. A hook that holds
        buckets back starts their exchange now at the latest; nothing was waited for yet.
        ``gradients_written(unused)``: the averaged gradients are in ``.grad``, but for those of
        the parameters in ``unused``: no rank has used them, and DistributedDataParallel
        does not write their ``.grad``. The hook's results for them are not used.
        ``step_aborted()``: the step has begun and its results will not be used: backward, the
        hook or an exchange raised, or parameters got no gradient. It comes before the reducer
        waits for what it has launched, so that held buckets can be released.

        ``compare_ranks()``: a forward pass that records a graph begins. Nothing of it was sent yet,
        so that ranks may compare here what decides which messages follow.

        A rank without inputs (``join``) is notified of the other ranks' steps alike.

        A state whose ``owns_gradients`` is True keeps what its hook averages: the future may hold
        any tensor, and ``.grad`` stays as it is (a rank then needs a part of the mean only).

        Raises:
            RuntimeError: there is a hook already; see ``replace_comm_hook``.
        """
        if self._ddp_state.hooks.registered:
            raise RuntimeError(
                "register_comm_hook or register_builtin_comm_hook can only be called once; "
                "replace_comm_hook(state, hook) changes the hook, remove_comm_hook() removes it"
            )
        self._ddp_state.hooks.set(hook, state)

    def replace_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Uses another hook from the next step on; all ranks call it alike, between two steps."""
        self._ddp_state.hooks.set(hook, state)

    def remove_comm_hook(self) -> None:
        """Averages by a plain all-reduce from the next step on; all ranks call it alike."""
        self._ddp_state.hooks.set(None, None)

    def schedule_comm_hook(self, step: int, state: Any, hook: CommHook | None) -> None:
        """Uses a hook (None: the plain all-reduce) from synchronised step ``step`` on."""
        self._ddp_state.hooks.schedule(step, hook, state)

    def request_layout(self, group_of: BucketGroup | None) -> None:
        """Puts only parameters with equal ``group_of(name, parameter)`` into one bucket.

        This holds from the next step on, besides dtype and device; all ranks call it alike. With
        None only dtype and device count.
        """
        self._ddp_state.reducer.plan.request(group_of)

    def saved_layout(self) -> tuple[list[list[nn.Parameter]], list[int], list[nn.Parameter]]:
        """Returns what a resumed run needs to have the same buckets.

        Returns:
            The parameters of each bucket, without those of sparse gradients, empty before the first
            step or if buckets are to be laid out anew; the bytes of a full bucket, empty if buckets
            are not final yet, as in the first step; all parameters in the order in which gradients
            arrived in the last step, empty if unknown.
        """
        reducer = self._ddp_state.reducer
        # Sparse gradients are always a bucket each, which needs no saving.
        present = [bucket.members for bucket in reducer.buckets if not bucket.sparse]
        members, limits, order = reducer.plan.to_save(present)
        parameter_of = [entry.parameter for entry in reducer.parameters]
        buckets = [[parameter_of[index] for index in bucket] for bucket in members]
        arrival = [parameter_of[index] for index in order]
        return buckets, list(limits), arrival

    def restore_layout(
        self,
        buckets: Sequence[Sequence[nn.Parameter]],
        limits: Sequence[int],
        arrival: Sequence[nn.Parameter],
    ) -> None:
        """Restores what :meth:`saved_layout` gave from the next step on; all ranks call it.

        If the saved buckets do not suit this model and its bucket sizes, ``arrival`` decides.

        Args:
            buckets, limits, arrival: what :meth:`saved_layout` gave, in this model's parameters.
        """
        index_of = {
            id(entry.parameter): index
            for index, entry in enumerate(self._ddp_state.reducer.parameters)
        }
        known = all(
            id(parameter) in index_of for bucket in [*buckets, arrival] for parameter in bucket
        )
        if not known:  # another model's, or of one that has trained other parameters
            buckets, arrival = (), ()
        members = tuple(
            tuple(index_of[id(parameter)] for parameter in bucket) for bucket in buckets
        )
        order = tuple(index_of[id(parameter)] for parameter in arrival)
        self._ddp_state.reducer.plan.resume(SavedBuckets(members, tuple(limits), order))

    def refresh_layout(self) -> None:
        """Asks the hook's state again for its layout, since its answers have changed."""
        self._ddp_state.hooks.refresh_layout()

    def _register_buffer_comm_hook(
        self, state: Any, hook: Callable[..., Any], comm_hook_location: Any = None
    ) -> None:
        """Synchronises buffers by ``hook(state, {name: buffer})``, not by rank 0's broadcast."""
        if not callable(hook):
            raise TypeError("Buffer communication hook must be callable.")
        # By name: torch's enumeration of locations is private.
        before = getattr(comm_hook_location, "name", "POST_FORWARD") == "PRE_FORWARD"
        self._ddp_state.buffers.hook = BufferHook(hook, state, after_forward=not before)

    # ---- other ranks

    def change_group(self, group: dist.ProcessGroup) -> None:
        """Continues with other ranks, from buckets that they agree on anew.

        All ranks of ``group`` call it alike, between two steps; ranks of the old group take no
        part, and may be gone. A hook follows if its state has a method ``change_group(group)``.
        Parameters are not changed: a new rank copies them from another rank itself.

        Raises:
            RuntimeError: a hook cannot change its group; nothing was changed.

        Example:
            >>> ddp_model.change_group(torch.distributed.new_group([0, 2, 3]))
        """
        self._ddp_state.change_group(group)

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Calls :meth:`change_group`, under torch's name for it."""
        self._ddp_state.change_group(new_process_group)

    # ---- steps without a backward pass

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keeps gradients of the passes inside on this rank until :meth:`reduce` averages them.

        No gradients or buffers are exchanged inside, so ranks may run different numbers of passes,
        in any order, or none: pipelines, several losses, schedules of your own. An optimizer that
        would step with held gradients raises. A later backward pass whose forward pass is outside
        averages the held gradients as well, as after :meth:`no_sync`.

        Example:
            >>> with ddp_model.hold():
            ...     for inputs in micro_batches:
            ...         ddp_model(inputs).square().mean().backward()
            >>> ddp_model.reduce()
            >>> optimizer.step()
        """
        synchronises, held = self.require_backward_grad_sync, self._set_holding(True)
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = synchronises
            self._set_holding(held)

    def _set_holding(self, holds: bool) -> bool:
        """Sets whether passes are within ``hold``; returns whether they were before."""
        if not self._ddp_state.reduces:  # all parameters are delayed
            return False
        unreduced = self._ddp_state.reducer.backward.unreduced
        before, unreduced.in_hold = unreduced.in_hold, holds
        return before

    @dynamo_disable
    def reduce(self) -> None:
        """Averages the gradients accumulated in ``.grad``, bucket by bucket, as one step.

        All ranks call it alike. A rank without gradients takes part with zeros. Buffers are
        synchronised here, and otherwise in the next forward pass.

        Raises:
            RuntimeError: no rank has new gradients since the last average, or a rank lacks those
                of some parameters (without ``find_unused_parameters``), or backward runs.
            CollectiveError: the exchange failed, here or on another rank.
        """
        if backward_number() != NO_BACKWARD:
            raise RuntimeError("reduce() within a backward pass: call it after backward has ended")
        state = self._ddp_state
        with torch.no_grad():
            if state.reduces:
                held = self._set_holding(False)
                try:
                    step = ForwardPass(state, self)
                    step.begin_step(JoinFlags(grads=True, sync=True, at_point=True))
                    step.end_step(sync=True)
                    reducer = state.reducer
                    reducer.begin_step()
                    reduce_at_point(reducer.backward, reducer.exchange, reducer.plan)
                finally:
                    self._set_holding(held)
            if state.delayed is not None:
                state.delayed.reduce()

    # ---- copies

    def __getstate__(self) -> dict[str, Any]:
        return vars(self).copy()  # torch's would look for what its constructor makes

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)
        self._ddp_state.restore()
        self._ddp_state.build(self)
        log_recorded_steps(self._ddp_state)

    # ---- what users look at

    @property
    def timeline(self) -> Timeline:
        """Returns when each bucket's gradients were ready, travelled and were waited for."""
        return self.reducer.timeline


def _first(*values: bool | None) -> bool:
    return next(value for value in values if value is not None)
