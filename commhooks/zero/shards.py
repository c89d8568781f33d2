"""Defines ``Shards``: this rank's shards of all buckets, how they are stepped and gathered."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from commhooks.core.packed import PackedCodec
from commhooks.core.scheme import walk
from commhooks.errors import RegistrationError
from commhooks.zero.gather import Gather
from commhooks.zero.hook import ZeroHook
from commhooks.zero.shard import BucketShard, Piece
from ddp_core import DistributedDataParallel as CoreDDP
from ddp_core import Exchange, RoundRecord, Task

__all__ = ["Shards"]

Future = torch.futures.Future


class Shards:
    """Holds this rank's shards of a model's buckets.

    Args:
        hook: reduces gradients to them.
        model: whose buckets they are of.
        gather: sends what was stepped.
        in_backward: a bucket is stepped, and sent, as soon as its gradients have arrived.

    Attributes:
        optimizer: steps the pieces.
        finite: whether all gradients since ``zero_grad`` were finite, on all ranks.
    """

    optimizer: torch.optim.Optimizer

    def __init__(self, hook: ZeroHook, model: CoreDDP, gather: Gather, in_backward: bool) -> None:
        self._hook, self._model, self._gather = hook, model, gather
        self._in_backward = in_backward
        self.finite = True
        self.cut()

    def cut(self) -> None:
        """Cuts the model's present buckets into shards, which begin with its parameters."""
        hook, group = self._hook, self._model.process_group
        known = hook._parameters
        codecs = [one for one in walk(hook.scheme) if isinstance(one, PackedCodec)]
        # 64: vector instructions then take all entries of a parameter as they do without a cut.
        unit = math.lcm(64, *(codec.granularity for codec in codecs))

        def flat(name: str, value: Tensor) -> Tensor:
            return known.in_memory_order(name, value).reshape(-1)

        self._all = [
            BucketShard(
                *(bucket.number, bucket.parameters, known.layout(bucket.parameters), flat),
                rank=group.rank(),
                world_size=group.size(),
                unit=unit,
            )
            for bucket in self._model.reducer.buckets
        ]
        hook.serve(self._all, self.landed, self.go_on if self._in_backward else None)

    def pieces(self) -> list[Piece]:
        """Returns this rank's parts of parameters."""
        return [piece for shard in self._all for piece in shard.pieces]

    def values(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Returns what the optimizer steps of some parameters on this rank."""
        members = set(map(id, parameters))
        return [piece.value for piece in self.pieces() if id(piece.parameter) in members]

    @property
    def waiting(self) -> bool:
        """Whether a bucket was stepped in backward, and its values were not applied."""
        return any(shard.gathered is not None for shard in self._all)

    # ---- gradients

    def landed(self, finite: bool) -> None:
        """Hears that a step's gradients have arrived, and whether those of all ranks are finite."""
        self.finite &= finite

    def zero_grad(self) -> None:
        """Drops the gradients, and takes back what was stepped and not applied."""
        # Exchanges of a backward pass that raised may still run, and write what is rolled back.
        self._model.reducer.drop_raised_step()
        for shard in self._all:
            shard.arrived = False
            shard.roll_back(self.optimizer.state)
            for piece in shard.pieces:
                piece.value.grad = None
        self.finite = True

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        """Scales gradients down to a norm over those of all ranks, and returns the norm before."""
        if self._in_backward:
            raise RegistrationError(
                "ZeroOptimizer.clip_grad_norm_: with in_backward=True buckets are stepped before "
                "the norm over all of them is known; make it with in_backward=False"
            )
        grads = [piece.value.grad for piece in self.pieces() if piece.value.grad is not None]
        zero = torch.zeros((), device=self._all[0].exact.device)
        norms = [torch.linalg.vector_norm(grad, norm_type).float() for grad in grads]
        own, largest = torch.stack([zero, *norms]), norm_type == math.inf
        total = own.max() if largest else own.pow(norm_type).sum()
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        dist.all_reduce(total, op, group=self._model.process_group)
        total = total if largest else total.pow(1.0 / norm_type)
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(factor)
        return total

    # ---- steps

    def step(self) -> bool:
        """Steps all buckets with gradients and makes parameters final; returns whether any was."""
        arrived = [shard for shard in self._all if shard.arrived]
        if not self.finite:
            for shard in arrived:
                shard.roll_back(self.optimizer.state)
            return False
        if self._in_backward and any(shard.gathered is None for shard in arrived):
            raise RegistrationError(
                "ZeroOptimizer.step: with in_backward=True buckets are stepped once in each "
                "backward pass, and this step was made: call zero_grad() after it"
            )
        gradients = {piece.value: piece.value.grad for piece in self.pieces()}
        _show(dict.fromkeys(gradients))
        under_way: list[tuple[BucketShard, Future[Tensor]]] = []
        for shard in arrived:
            if not self._in_backward:
                own = {piece.value: gradients[piece.value] for piece in shard.pieces}
                self._step_one(shard, own)
                # Values of one bucket travel while the next one is stepped.
                under_way.append((shard, self._send(shard)))
        for shard, future in under_way:
            shard.gathered = future.wait()
        for shard in arrived:
            if shard.gathered is not None:
                self._gather.apply(shard, shard.gathered)
                shard.settle()
        _show(gradients)
        return bool(arrived)

    def _step_one(self, shard: BucketShard, gradients: dict[nn.Parameter, Tensor | None]) -> None:
        """Steps the pieces of one shard; no other piece has a gradient meanwhile."""
        shard.take_over()
        _show(gradients)
        self.optimizer.step()
        _show(dict.fromkeys(gradients))

    def _exchange(self, shard: BucketShard) -> Exchange:
        own = shard.exact - shard.held() if self._gather.packs(shard) else shard.exact
        bucket = self._hook._engine.bucket(own, shard.layout)
        return self._gather.exchange(shard, bucket)

    def _send(self, shard: BucketShard) -> Future[Tensor]:
        hook = self._hook

        def record(row: RoundRecord) -> None:
            row.round += 1  # the reduction is the first
            hook.ledger.add(row)

        task = Task(
            self._exchange(shard),
            step=max(hook.step - 1, 0),  # that in which the gradients came
            bucket=shard.number,
            dense_bytes=0,
            world_size=len(shard.spans),
            max_rounds=1,
            record=record,
        )
        return hook._drivers.run(task, shard.exact.device, self._model.process_group)

    def go_on(self, shard: BucketShard, mean: Tensor) -> Exchange:
        """Steps a bucket whose mean has arrived, and gathers it: the end of its exchange."""
        with torch.no_grad():
            shard.roll_back(self.optimizer.state)  # that of a step that was abandoned
            shard.take_over()
            shard.back_up(self.optimizer.state)
            self._step_one(shard, {piece.value: part for piece, part in shard.parts(mean)})
            exchange = self._exchange(shard)
        shard.gathered = yield from exchange
        return shard.gathered


def _show(gradients: dict[nn.Parameter, Tensor | None]) -> None:
    """Shows the optimizer these gradients."""
    for value, gradient in gradients.items():
        value.grad = gradient
