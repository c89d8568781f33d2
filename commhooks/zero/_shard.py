"""Defines ``BucketShard``, the part of a bucket that this rank's optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from commhooks._torch import made_subclass, without_overrides
from commhooks.core._layout import Layout, Span
from commhooks.core._packed import spans
from commhooks.errors import RegistrationError
from ddp_core._torch import version_of
from ddp_core.exchange._errors import listed

__all__ = ["BucketShard", "Piece", "ShardedGrad", "ShardedGradPlaceholders", "copied"]


_CONVERSIONS: tuple[Any, ...] = (Tensor.to, Tensor.type, Tensor.cuda, Tensor.cpu)
_CONVERSIONS += (Tensor.double, Tensor.float, Tensor.half, Tensor.bfloat16)


class ShardedGrad(Tensor):
    """Replaces ``.grad`` of a parameter while its averaged gradient lies in shards.

    Code that reads it, such as ``torch.nn.utils.clip_grad_norm_``, gets an error instead of the
    gradient of this rank alone. Setting ``.grad`` to None drops the mean.
    """

    def __new__(cls, parameter: Tensor) -> ShardedGrad:
        # One entry of memory for all.
        nothing = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
        made: ShardedGrad = made_subclass(cls, nothing.expand(parameter.shape))
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What ``Module.to`` asks before it converts.
        if func in (Tensor.is_floating_point, Tensor.is_complex):
            with without_overrides():
                return func(*args)
        if func in _CONVERSIONS:
            raise RegistrationError(
                f"a model whose gradients lie in shards (ZeroOptimizer) is converted to another "
                f"dtype or device (.{func.__name__}): convert the module before it is wrapped, or "
                f"wrap it again and make another ZeroOptimizer"
            )
        raise RegistrationError(
            "the mean of this gradient lies in shards on the ranks (ZeroOptimizer), and .grad has "
            "none: use ZeroOptimizer.clip_grad_norm_, or the gradients in its param_groups"
        )


class ShardedGradPlaceholders:
    """Installs placeholders in ``.grad``, and removes them before a backward pass."""

    def __init__(self) -> None:
        self._away: set[nn.Parameter] = set()

    def install(self, parameters: Iterable[nn.Parameter], unused: Collection[nn.Parameter]) -> None:
        """Installs placeholders in parameters whose mean has arrived."""
        for parameter in parameters:
            if parameter not in unused:
                parameter.grad = ShardedGrad(parameter)
                self._away.discard(parameter)

    def remove(self, parameters: Iterable[nn.Parameter]) -> None:
        """Empties ``.grad`` for another backward pass; the means stay."""
        for parameter in parameters:
            if type(parameter.grad) is ShardedGrad:
                parameter.grad = None
                self._away.add(parameter)

    def is_present(self, parameter: nn.Parameter) -> bool:
        """Whether the placeholder of a parameter was not dropped."""
        return type(parameter.grad) is ShardedGrad or parameter in self._away

    def forget(self) -> None:
        """Resets the placeholders, after all means were dropped."""
        self._away.clear()


# ---- a shard


class Piece(NamedTuple):
    """Describes the part of one parameter that this rank owns.

    Attributes:
        name: name of the parameter.
        parameter: the whole parameter.
        entries: range of the owned entries, in the memory order of buckets.
        value: the exact values, a view of the shard's, which the optimizer steps.
    """

    name: str
    parameter: nn.Parameter
    entries: slice
    value: nn.Parameter


class BucketShard:
    """Holds this rank's shard of one bucket: exact values, gradients, pieces of parameters.

    Args:
        number: number of the bucket.
        parameters: parameters of the bucket, in its order.
        layout: names and shapes of the parameters.
        flat: returns a parameter's values in the memory order of buckets, flat.
        rank, world_size: rank of this process, and number of ranks.
        unit: number of entries of which shards are multiples.

    Attributes:
        spans: begin and end of the shard of each rank.
        exact: flat, float32 (float64 if the parameters are): the values that the optimizer has
            computed. Ranks may have others, where differences are compressed.
        pieces: the parts of parameters in it.
        arrived: whether a gradient has arrived since the optimizer's ``zero_grad``.
        gathered: gathered values that are not applied yet, or None.
        dropped: parameters that do not take gathered values.
    """

    def __init__(
        self,
        number: int,
        parameters: Sequence[nn.Parameter],
        layout: Layout,
        flat: Callable[[str, Tensor], Tensor],
        *,
        rank: int,
        world_size: int,
        unit: int,
    ) -> None:
        self.number, self.parameters, self.layout = number, list(parameters), layout
        self.spans: tuple[Span, ...] = tuple(spans(layout.numel, world_size, unit))
        self.arrived, self._flat = False, flat
        self.gathered: Tensor | None = None
        self.dropped: Collection[nn.Parameter] = ()
        first = self.parameters[0]
        self.dtype = first.dtype
        begin, end = self.spans[rank]
        wide = torch.promote_types(self.dtype, torch.float32)
        self.exact = torch.empty(end - begin, dtype=wide, device=first.device)
        self.pieces: list[Piece] = []
        rows = zip(layout.names, self.parameters, layout.offsets, layout.sizes, strict=False)
        for name, parameter, offset, size in rows:
            start, stop = max(begin, offset), min(end, offset + size)
            if start < stop:
                value = nn.Parameter(self.exact[start - begin : stop - begin])
                entries = slice(start - offset, stop - offset)
                self.pieces.append(Piece(name, parameter, entries, value))
        self._before: tuple[Tensor, list[dict[str, Any]]] | None = None
        self._versions: list[int] = []
        self.exact.copy_(self.shared_values())
        self._shared = self.exact  # what all ranks had after the latest step

    @torch.no_grad()
    def shared_values(self) -> Tensor:
        """Returns a copy of the values that all ranks have of this shard's entries."""
        values = torch.empty_like(self.exact)
        for piece, part in self.parts(values):
            part.copy_(self._flat(piece.name, piece.parameter.detach())[piece.entries])
        return values

    @torch.no_grad()
    def adopt_written(self) -> None:
        """Adopts entries of parameters that other code has written since the latest step.

        Loaded, reset or clipped entries would go back to the owner's values otherwise.
        """
        held = self.shared_values()
        # Entry by entry, since the others keep differences that are not sent yet, and not by the
        # versions of parameters, which a write to ``.data`` does not change.
        self.exact.copy_(torch.where(held == self._shared, self.exact, held))

    def settle(self, *, rounded: bool) -> None:
        """Ends a step, after which the parameters are as the optimizer left them.

        Args:
            rounded: whether ranks have other values than the exact ones.
        """
        self._before, self.gathered, self.dropped = None, None, ()
        self._shared = self.shared_values() if rounded else self.exact

    def parts(self, flat: Tensor) -> list[tuple[Piece, Tensor]]:
        """Returns each piece with its part of a flat tensor of this shard."""
        sizes = [piece.value.numel() for piece in self.pieces]
        return list(zip(self.pieces, flat.split(sizes), strict=True))

    def add_mean(self, mean: Tensor, unused: Collection[nn.Parameter]) -> None:
        """Adds the mean of this shard's gradients to the pieces'.

        Args:
            mean: flat, with one value per entry of the shard.
            unused: parameters that no rank has used.
        """
        for piece, part in self.parts(mean):
            if piece.parameter in unused:
                continue
            if piece.value.grad is None:
                piece.value.grad = part
            else:
                piece.value.grad += part

    # ---- a step that may have to be undone

    def back_up(self, states: MutableMapping[Any, Any]) -> None:
        """Copies the exact values and the optimizer's state, for :meth:`roll_back`."""
        optimizer_states = [copied(states.get(piece.value, {})) for piece in self.pieces]
        self._before = self.exact.clone(), optimizer_states
        self._versions = self._present_versions()

    def check_unwritten(self) -> None:
        """Raises if a parameter was written since the backup; writes to ``.data`` are not seen."""
        rows = zip(self.layout.names, self._versions, self._present_versions(), strict=False)
        written = [name for name, before, now in rows if before != now]
        if written and self._before is not None:
            raise RegistrationError(
                f"ZeroOptimizer.step: {listed(written)} written since backward, where "
                f"in_backward=True has stepped the values before; write parameters after step(), "
                f"or before backward"
            )

    def _present_versions(self) -> list[int]:
        return list(map(version_of, self.parameters))

    def drop(self, parameters: Collection[nn.Parameter], states: MutableMapping[Any, Any]) -> None:
        """Drops the gradients of some parameters, and undoes the step that used them."""
        for piece in self.pieces:
            if piece.parameter in parameters:
                piece.value.grad = None
        self._take_back(parameters, states)

    def roll_back(self, states: MutableMapping[Any, Any]) -> None:
        """Restores the backup, if there is one."""
        self._take_back(set(self.parameters), states)
        self._before, self.gathered, self.dropped = None, None, ()

    @torch.no_grad()
    def _take_back(
        self, parameters: Collection[nn.Parameter], states: MutableMapping[Any, Any]
    ) -> None:
        if self._before is None:
            return
        self.dropped = parameters
        exact, optimizer_states = self._before
        for (piece, before), state in zip(self.parts(exact), optimizer_states, strict=True):
            if piece.parameter in parameters:
                piece.value.copy_(before)
                states.pop(piece.value, None)
                if state:  # an empty one would be taken for one that has begun
                    states[piece.value] = state


def copied(state: Mapping[str, Any], device: str | torch.device | None = None) -> dict[str, Any]:
    """Returns an optimizer's state of a tensor with copies of the tensors in it."""
    return {
        key: value.detach().to(device or value.device, copy=True)
        if isinstance(value, Tensor)
        else value
        for key, value in state.items()
    }
