"""Defines ``Shards``, which steps and gathers this rank's shards of all buckets."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from commhooks._torch import foreach_add
from commhooks.core._dense import Dense
from commhooks.core._packed import PackedCodec
from commhooks.core._scheme import Scheme, walk
from commhooks.errors import RegistrationError
from commhooks.hook._engine import Engine
from commhooks.kernels import all_finite
from commhooks.schemes.casts import TwoPhaseCast
from commhooks.schemes.quantized import Blockwise
from commhooks.wrappers._make import make
from commhooks.zero._hook import ZeroHook
from commhooks.zero._shard import BucketShard, Piece, ShardedGradPlaceholders
from ddp_core import DistributedDataParallel as CoreDDP
from ddp_core import Exchange, RoundRecord, Task
from ddp_core._torch import foreach_copy
from ddp_core.reducer._buckets import views_of

__all__ = ["Gather", "Shards"]


_CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Gather:
    """Gathers the shards of a bucket.

    Args:
        scheme: "none" sends new values as they are. A codec packs differences: the exact value
            minus the value that all ranks have. Rounding errors are a part of the next difference,
            so nothing is lost.

    Attributes:
        codec: packs differences; None: values are sent as they are.
    """

    def __init__(self, scheme: str | Scheme) -> None:
        self.codec = _codec_of_differences(scheme)

    def packs(self, shard: BucketShard) -> bool:
        """Whether differences of this bucket are packed: a small payload would save nothing."""
        if self.codec is None:
            return False
        nbytes = self.codec.shards_at(shard.layout, shard.spans)[0].nbytes
        return nbytes < shard.spans[0][1] * shard.dtype.itemsize

    def exchange(self, shard: BucketShard, engine: Engine) -> Exchange:
        """Gathers the shards of one bucket, and returns them one after the other."""
        # Within the exchange, on a GPU on its stream: memory is given back when the exchange is
        # over on the host, and only its own stream knows whether it is still read.
        scheme: Scheme = Dense()
        message = shard.exact.to(shard.dtype)
        if self.codec is not None and self.packs(shard):
            scheme, message = self.codec, shard.exact - shard.shared_values()
        whole = message.new_empty(shard.layout.numel)
        bucket = engine.bucket(message, shard.layout, output=whole)
        return (yield from scheme.all_gather(bucket, shard.spans)).mean

    @torch.no_grad()
    def apply(self, shard: BucketShard, gathered: Tensor) -> None:
        """Writes the result of :meth:`exchange` to the parameters, the same bits on all ranks."""
        parameters = [parameter.detach() for parameter in shard.parameters]
        views, packed = views_of(gathered, parameters), self.packs(shard)
        rows = zip(shard.parameters, parameters, views, strict=True)
        pairs = [(into, view) for parameter, into, view in rows if parameter not in shard.dropped]
        if pairs:
            write = foreach_add if packed else foreach_copy
            write([into for into, _ in pairs], [view for _, view in pairs])
        shard.settle(rounded=packed or shard.dtype != shard.exact.dtype)


def _codec_of_differences(scheme: str | Scheme) -> PackedCodec | None:
    """Returns the codec of a scheme; one that is given by name rounds to nearest.

    Returns:
        The codec; None: the scheme is "none", which rounds nothing.

    Raises:
        RegistrationError: the scheme packs no shard by itself, or rounds so coarsely that what is
            not sent would grow.
    """
    codec: Any = make(scheme, error_feedback=False)
    if codec == make("none"):
        return None
    if isinstance(scheme, str) and scheme in _CASTS:
        return TwoPhaseCast(_CASTS[scheme])
    if not isinstance(codec, PackedCodec) or codec.traits.returns != "mean":
        raise RegistrationError(
            f"ZeroOptimizer(gather=...): {codec} does not pack a shard by itself; choose bf16, "
            f"fp16, int8, int4, fp8, onebit, eden or topk"
        )
    if isinstance(scheme, str) and isinstance(codec, Blockwise):
        # The owner keeps the error: to nearest, which needs no draws, loses nothing.
        return codec.to_nearest()
    if not math.isfinite(codec.error.variance) or codec.error.variance > 1:
        raise RegistrationError(
            f"ZeroOptimizer(gather=...): {codec} has a variance of {codec.error.variance:.3g}, and "
            f"what the owner has not sent would grow; use more bits, or one that rounds to nearest"
        )
    return codec


# ---- all shards


Future = torch.futures.Future


class Shards:
    """Holds this rank's shards of a model's buckets.

    Args:
        hook: reduces gradients to the shards.
        model: the model, whose buckets are cut into shards.
        gather: sends the stepped values.
        in_backward: steps and sends each bucket as soon as its gradients have arrived.

    Attributes:
        optimizer: steps the pieces.
        unit: shards of a bucket begin at multiples of this number of entries.
        finite: whether all gradients since ``zero_grad`` were finite, on all ranks.
        overflow_probe: a one-element parameter that is never stepped; its gradient is NaN after an
            overflow, so that a GradScaler sees that on ranks without a shard, too.
    """

    optimizer: torch.optim.Optimizer

    def __init__(self, hook: ZeroHook, model: CoreDDP, gather: Gather, in_backward: bool) -> None:
        self._hook, self._model, self._gather = hook, model, gather
        self.in_backward, self.finite = in_backward, True
        self._placeholders = ShardedGradPlaceholders()
        self.overflow_probe = nn.Parameter(torch.zeros(1, device=model.reducer.device))
        self.cut()

    def cut(self, unit: int | None = None) -> None:
        """Cuts the model's present buckets into shards, which begin with its parameters.

        Args:
            unit: that of a saved run, whose scheme may have been another one when it began. None:
                the unit that fits the hook's scheme.
        """
        hook, group = self._hook, self._model.process_group
        known = hook.parameters
        if unit is None:
            codecs = [codec for codec in walk(hook.scheme) if isinstance(codec, PackedCodec)]
            # 64: vector instructions then take all entries of a parameter as without a cut.
            unit = math.lcm(64, *(codec.granularity for codec in codecs))
        self.unit = unit

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
        hook.attach_shards(self, self._all)

    def pieces(self) -> list[Piece]:
        """Returns this rank's parts of parameters."""
        return [piece for shard in self._all for piece in shard.pieces]

    def values(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Returns this rank's shards of some parameters, which the optimizer steps."""
        members = set(parameters)
        return [piece.value for piece in self.pieces() if piece.parameter in members]

    def on_loaded(self) -> None:
        """Ends loading: exact values and states were loaded, and parameters before them."""
        for shard in self._all:
            shard.settle(rounded=True)

    @property
    def any_arrived(self) -> bool:
        """Whether a bucket has a gradient since ``zero_grad``."""
        return any(shard.arrived for shard in self._all)

    @property
    def waiting(self) -> bool:
        """Whether a bucket was stepped in backward, and its values were not applied."""
        return any(shard.gathered is not None for shard in self._all)

    # ---- gradients

    def forward_begins(self) -> None:
        """Removes placeholders, for the gradients of another backward pass."""
        self.drop_with_placeholders()
        for shard in self._all:
            self._placeholders.remove(shard.parameters)

    def receive_means(self, means: Mapping[int, Tensor], unused: Collection[nn.Parameter]) -> bool:
        """Takes a backward pass's means by bucket; returns whether they are finite on all ranks."""
        finite = _on_all_ranks(means, self._model.process_group)
        self.finite &= finite
        for number, mean in means.items():
            shard = self._all[number]
            # Gradient scalers look at gradients rank by rank: all of them see the same verdict.
            if not self.in_backward:
                shard.add_mean(mean if finite else mean.fill_(torch.nan), unused)
            shard.arrived = True
            self._placeholders.install(shard.parameters, unused)
        if means and not self.in_backward:
            self.overflow_probe.grad = torch.full_like(
                self.overflow_probe, 0.0 if finite else torch.nan
            )
        return finite

    def drop_with_placeholders(self) -> None:
        """Drops the means of parameters whose placeholder was dropped, as by ``model.zero_grad()``.

        The same on all ranks, as each has all parameters.
        """
        arrived = [shard for shard in self._all if shard.arrived]
        is_present = self._placeholders.is_present
        if arrived and not any(
            is_present(parameter) for shard in arrived for parameter in shard.parameters
        ):
            self.zero_grad()
            return
        for shard in arrived:
            shard.drop(
                {parameter for parameter in shard.parameters if not is_present(parameter)},
                self.optimizer.state,
            )

    def zero_grad(self) -> None:
        """Drops the gradients, and undoes steps that were not applied."""
        # Exchanges of a backward pass that raised may still run, and write what is rolled back.
        self._model.reducer.drop_raised_step()
        for shard in self._all:
            shard.arrived = False
            shard.roll_back(self.optimizer.state)
            for piece in shard.pieces:
                piece.value.grad = None
        self._placeholders.forget()
        self.finite, self.overflow_probe.grad = True, None

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        """Scales gradients down to a norm over those of all ranks, and returns the norm before."""
        if self.in_backward:
            raise RegistrationError(
                "ZeroOptimizer.clip_grad_norm_: with in_backward=True buckets are stepped before "
                "the norm over all of them is known; make it with in_backward=False"
            )
        self.drop_with_placeholders()
        values, largest = [piece.value for piece in self.pieces()], norm_type == math.inf
        grads = [value.grad for value in values if value.grad is not None]
        norm = nn.utils.get_total_norm(grads, norm_type).to(self._all[0].exact.device)
        total = norm.float() if largest else norm.float().pow(norm_type)
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        dist.all_reduce(total, op, group=self._model.process_group)
        total = total if largest else total.pow(1.0 / norm_type)
        nn.utils.clip_grads_with_norm_(values, max_norm, total)
        return total

    # ---- steps

    def step(self) -> None:
        """Steps all buckets with gradients, and writes the gathered values to the parameters."""
        self.drop_with_placeholders()
        arrived = [shard for shard in self._all if shard.arrived]
        if not self.finite:
            for shard in arrived:
                shard.roll_back(self.optimizer.state)
            return
        if self.in_backward and any(shard.gathered is None for shard in arrived):
            raise RegistrationError(
                "ZeroOptimizer.step: with in_backward=True buckets are stepped once in each "
                "backward pass, and this step was made: call zero_grad() after it"
            )
        for shard in arrived:
            shard.check_unwritten()
        if arrived and not self.in_backward:
            self._model._ddp_state.before_collectives()
        shown = [self.overflow_probe, *(piece.value for piece in self.pieces())]
        gradients = {value: value.grad for value in shown}
        _set_gradients(dict.fromkeys(gradients))
        under_way: list[tuple[BucketShard, Future[Tensor]]] = []
        for shard in () if self.in_backward else arrived:
            self._step(shard, {piece.value: gradients[piece.value] for piece in shard.pieces})
            # Values of one bucket travel while the next one is stepped.
            under_way.append((shard, self._send(shard)))
        for shard, future in under_way:
            shard.gathered = future.wait()
        for shard in arrived:
            if shard.gathered is not None:
                self._gather.apply(shard, shard.gathered)
        _set_gradients(gradients)

    def _step(self, shard: BucketShard, gradients: dict[nn.Parameter, Tensor | None]) -> None:
        """Steps the pieces of one shard; no other piece has a gradient meanwhile."""
        shard.adopt_written()
        if self.in_backward:
            shard.back_up(self.optimizer.state)
        _set_gradients(gradients)
        self.optimizer.step()
        _set_gradients(dict.fromkeys(gradients))

    def _send(self, shard: BucketShard) -> Future[Tensor]:
        hook = self._hook

        def record(row: RoundRecord) -> None:
            row.round += 1  # the reduction is the first
            hook.ledger.add(row)

        task = Task(
            self._gather.exchange(shard, hook.engine),
            step=max(hook.step - 1, 0),  # that in which the gradients came
            bucket=shard.number,
            dense_bytes=0,
            world_size=len(shard.spans),
            max_rounds=1,
            record=record,
        )
        return hook.drivers.run(task, shard.exact.device, self._model.process_group)

    def step_and_gather(self, shard: BucketShard, mean: Tensor) -> Exchange:
        """Steps a bucket whose mean has arrived, and gathers it, as the end of its exchange."""
        with torch.no_grad():
            shard.roll_back(self.optimizer.state)  # undoes an aborted step
            self._step(shard, {piece.value: part for piece, part in shard.parts(mean)})
            exchange = self._gather.exchange(shard, self._hook.engine)
        shard.gathered = yield from exchange
        return shard.gathered


def _set_gradients(gradients: dict[nn.Parameter, Tensor | None]) -> None:
    """Sets the gradients that the optimizer sees."""
    for value, gradient in gradients.items():
        value.grad = gradient


def _on_all_ranks(means: Mapping[int, Tensor], group: dist.ProcessGroup) -> bool:
    """Whether all shards of all ranks are finite."""
    if not means:
        return True
    flags = torch.stack([all_finite(mean) for mean in means.values()])
    wrong = (~flags.all()).to(torch.float32)
    dist.all_reduce(wrong, dist.ReduceOp.MAX, group=group)
    return not wrong.item()
