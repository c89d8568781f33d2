"""Defines ``ZeroOptimizer``, whose state is sharded over the ranks of a data-parallel model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from commhooks.core.packed import PackedCodec
from commhooks.core.scheme import Scheme, walk
from commhooks.errors import RegistrationError
from commhooks.hook.attachment import AttachmentGuard
from commhooks.hook.handshake import MEETING
from commhooks.hook.hook_function import comm_hook
from commhooks.hook.sharded_bucket import need_shards
from commhooks.zero import saving
from commhooks.zero.checks import groups_of, need_elementwise, need_model
from commhooks.zero.gather import Gather
from commhooks.zero.hook import InShards, ZeroHook
from commhooks.zero.shard import BucketShard, Piece
from ddp_core import Task

__all__ = ["ZeroOptimizer"]

Future = torch.futures.Future


class ZeroOptimizer(torch.optim.Optimizer):
    """Steps one shard of each bucket on each rank with any elementwise optimizer (ZeRO-1).

    Buckets of gradients are reduced to shards during backward: each rank gets the float32 mean of
    its shard, rounded once. ``step`` updates this rank's shards and gathers the results, so that
    the optimizer's state takes 1/n of the memory on n ranks.

    All ranks make it and call its methods alike. ``.grad`` of parameters has no mean: use
    :meth:`clip_grad_norm_`. A step in which a gradient of any rank is not finite changes nothing.

    Args:
        model: ``ddp_core.DistributedDataParallel`` without a hook.
        optimizer: a class of ``torch.optim``, or another one that steps each entry by itself.
        scheme: reduces gradients: a name or a scheme that exchanges blocks of entries.
        gather: how new values travel: "none" as they are; a codec ("int8", "int4", ...): packed
            differences, whose rounding errors the owner sends later.
        params: groups of parameters, as for any optimizer; None: all trained ones.
        seed: base of random draws, the same on every rank.
        history: rows kept by ``hook.report``.
        settings: of the optimizer, such as ``lr``.

    Attributes:
        hook: reduces gradients; its ledger has all bytes.
        skipped_steps: number of steps with gradients that were not finite.

    Raises:
        RegistrationError: the model, the optimizer or a scheme cannot be sharded.
        MismatchError: the ranks differ in settings.

    Example:
        >>> zero = ZeroOptimizer(ddp_model, torch.optim.AdamW, scheme="int8", gather="int8", lr=1e-3)
        >>> loss(ddp_model, batch).backward()
        >>> zero.step()
        >>> zero.zero_grad()

    References: Rajbhandari et al., ZeRO, 2020; Jia et al., SDP4Bit, 2024 (differences).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: type[torch.optim.Optimizer],
        *,
        scheme: str | Scheme = "none",
        gather: str | Scheme = "none",
        params: Iterable[Any] | None = None,
        seed: int = 0,
        history: int = 100_000,
        **settings: Any,
    ) -> None:
        ddp = need_model(model)
        self._groups = groups_of(ddp, params)
        need_elementwise(optimizer, {**settings, **self._groups[0][0]})
        self._gather = Gather(gather)
        self.hook = ZeroHook(scheme, ddp, seed=seed, history=history)
        need_shards(self.hook.scheme, "ZeroOptimizer")
        self._model, self._reducer = ddp, ddp.reducer
        facts = {
            "optimizer": f"{optimizer.__module__}.{optimizer.__qualname__}",
            "gather": repr(self._gather.codec),
            "groups": repr([({**settings, **own}, self._names(p)) for own, p in self._groups]),
        }
        self.hook.agree("commhooks.ZeroOptimizer", facts, MEETING)
        ddp.register_comm_hook(self.hook, comm_hook)
        ddp.register_forward_pre_hook(AttachmentGuard(self.hook, ddp))
        ddp.register_forward_pre_hook(_drop_stand_ins)
        ddp._parts.uneven.overlaps_zero = True  # a rank without inputs would not step
        ddp.reducer.plan.stay_as_registered()
        ddp.reducer.rebuild()
        self._finite, self.skipped_steps = True, 0
        self._cut()
        groups = [{**own, "params": self._values(p)} for own, p in self._groups]
        self._inner = optimizer(groups, **settings)
        super().__init__(self._inner.param_groups, self._inner.defaults)
        # The same objects: schedulers and scalers write here, and the optimizer inside reads.
        self.param_groups, self.state = self._inner.param_groups, self._inner.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "_inner" in vars(self) and "state" in vars(self) and self.state is self._inner.state:
            raise RegistrationError(
                "ZeroOptimizer.add_param_group: groups are settled when it is made: give all "
                "parameters as params=..."
            )
        super().add_param_group(param_group)

    # ---- shards

    def _cut(self) -> None:
        """Cuts the model's present buckets into shards."""
        hook, group = self.hook, self._model.process_group
        known = hook._parameters
        codecs = [one for one in walk(hook.scheme) if isinstance(one, PackedCodec)]

        def flat(name: str, value: Tensor) -> Tensor:
            return known.in_memory_order(name, value).reshape(-1)

        self._shards = [
            BucketShard(
                bucket.number,
                bucket.parameters,
                known.layout(bucket.parameters),
                flat,
                rank=group.rank(),
                world_size=group.size(),
                # 64: the optimizer's vector instructions then take the entries of a parameter as
                # they would without a cut.
                unit=math.lcm(64, *(codec.granularity for codec in codecs)),
            )
            for bucket in self._reducer.buckets
        ]
        hook.serve(self._shards, self._landed)

    def _pieces(self) -> list[Piece]:
        return [piece for shard in self._shards for piece in shard.pieces]

    def _values(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        members = set(map(id, parameters))
        return [piece.value for piece in self._pieces() if id(piece.parameter) in members]

    def _names(self, parameters: Iterable[nn.Parameter]) -> list[str]:
        return self.hook._binding.names(parameters)

    def _landed(self, finite: bool) -> None:
        self._finite &= finite

    # ---- one step

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients: the shards' means, and what ``no_sync`` has accumulated.

        Args:
            set_to_none: gradients become None in any case.
        """
        for one in [piece.value for piece in self._pieces()] + list(self._model.parameters()):
            one.grad = None
        for shard in self._shards:
            shard.arrived = False
        self._finite = True

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales gradients down to a norm over all parameters, as torch's function of this name.

        A collective.

        Args:
            max_norm: the largest norm that is left as it is.
            norm_type: 2, another power, or infinity.

        Returns:
            The norm before, the same on all ranks; not finite if a gradient of any rank is not.
        """
        grads = [piece.value.grad for piece in self._pieces() if piece.value.grad is not None]
        device = self._shards[0].exact.device
        norms = torch.stack(
            [torch.zeros((), device=device)]
            + [torch.linalg.vector_norm(grad, norm_type).float() for grad in grads]
        )
        largest = norm_type == math.inf
        total = norms.max() if largest else norms.pow(norm_type).sum()
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        dist.all_reduce(total, op, group=self._model.process_group)
        total = total if largest else total.pow(1.0 / norm_type)
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(factor)
        return total

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Updates this rank's shards, and all parameters by what their owners send.

        Buckets without a gradient since ``zero_grad`` stay as they are, and so does everything if a
        gradient of any rank was not finite.

        Args:
            closure: computes the loss again, as for other optimizers.

        Raises:
            RegistrationError: gradients were accumulated, and not averaged.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        arrived = [shard for shard in self._shards if shard.arrived]
        if not arrived:
            self._need_none_accumulated()
        if not self._finite:
            self.skipped_steps += 1
            return loss
        gradients = {piece.value: piece.value.grad for piece in self._pieces()}
        for value in gradients:
            value.grad = None
        under_way = []
        for shard in arrived:
            shard.take_over()
            values = [piece.value for piece in shard.pieces]
            for value in values:
                value.grad = gradients[value]
            # One bucket at a time: its values travel while the next one is stepped.
            self._inner.step()
            for value in values:
                value.grad = None
            under_way.append(self._send(shard))
        for shard, future in zip(arrived, under_way, strict=True):
            self._gather.apply(shard, future.wait())
            shard.note_versions()
        for value, gradient in gradients.items():
            value.grad = gradient
        return loss

    def _send(self, shard: BucketShard) -> Future[Tensor]:
        hook, engine = self.hook, self.hook._engine
        differences = shard.exact - shard.held() if self._gather.packs(shard) else shard.exact
        bucket = engine.bucket(differences, shard.layout)
        task = Task(
            self._gather.exchange(shard, bucket),
            step=max(hook.step - 1, 0),  # that in which the gradients came
            bucket=shard.number,
            dense_bytes=0,
            world_size=engine.world_size,
            max_rounds=1,
            record=hook.ledger.add,
        )
        return hook._drivers.run(task, differences.device, self._model.process_group)

    def _need_none_accumulated(self) -> None:
        for parameter in self._model.parameters():
            if parameter.requires_grad and parameter.grad is not None:
                raise RegistrationError(
                    "ZeroOptimizer.step: there are gradients, and none were averaged since "
                    "zero_grad: the last backward pass was within no_sync(), or its forward pass "
                    "did not go through the DistributedDataParallel"
                )

    # ---- checkpoint

    def state_dict(self, *, gather: bool = False, to: int | None = None) -> dict[str, Any]:  # type: ignore[override]
        """Returns a copy of all that a later run continues from, besides the model's own state.

        Args:
            gather: returns one state of all ranks, by parameter, on the CPU, which loads on any
                number of ranks; all ranks call it. False: this rank's pieces.
            to: with ``gather``, the only rank that gets it; the others get an empty dict.
        """
        pieces: saving.Saved | None = saving.saved_pieces(self._pieces(), self.state)
        hook = self.hook.state_dict(gather=gather, to=to)
        if gather:
            pieces = saving.gathered(
                pieces or {}, self.hook._parameters, self._model.process_group, to
            )
        if pieces is None:
            return {}
        groups = self._saved_groups()
        return {"version": saving.VERSION, "hook": hook, "groups": groups, "pieces": pieces}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Continues from a saved state; all ranks call it, after the model has loaded its own.

        Args:
            state_dict: a gathered state, on any number of ranks, or this rank's own.

        Raises:
            CheckpointError: it is foreign, or of another model, other groups or other ranks.
        """
        known = self.hook._parameters
        saving.check(state_dict, self._saved_groups(), known.shapes)
        self.hook.load_state_dict(state_dict["hook"])
        self._reducer.rebuild()  # the saved run's buckets
        self._cut()
        self.state.clear()
        self._finite = True
        rows = zip(self.param_groups, self._groups, state_dict["groups"], strict=True)
        for group, (_, parameters), saved in rows:
            group.update({key: value for key, value in saved.items() if key != "names"})
            group["params"] = self._values(parameters)
        for piece in self._pieces():
            state = saving.load_piece(piece, state_dict["pieces"], known)
            if state:
                self.state[piece.value] = state

    def _saved_groups(self) -> list[dict[str, Any]]:
        return [
            {
                **{key: value for key, value in group.items() if key != "params"},
                "names": self._names(parameters),
            }
            for group, (_, parameters) in zip(self.param_groups, self._groups, strict=True)
        ]


def _drop_stand_ins(module: nn.Module, inputs: Any) -> None:
    """Removes what stands for gradients before another backward pass."""
    if torch.is_grad_enabled():
        for parameter in module.parameters():
            if type(parameter.grad) is InShards:
                parameter.grad = None
