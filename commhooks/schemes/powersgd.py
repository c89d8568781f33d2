"""PowerSGD: gradients as products of two thin matrices, found by one power iteration a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from commhooks._memory import Layout, Memory
from commhooks._registry import register_scheme
from commhooks._scheme import Context, Exchanged, Scheme, SchemeExchange
from commhooks.kernels import (
    all_finite,
    decode_low_rank,
    multiply_left,
    multiply_right,
    orthonormalize,
    subtract_low_rank,
    unit_rows,
)
from ddp_core import AllReduce

__all__ = ["BatchedPowerSGD", "PowerSGD", "payload_numel"]

KEY = "powersgd.q"
BATCHED_KEY = "batched_powersgd.q"
# Four products a run cost 30 us in calls; to copy 2^14 entries there and back takes 10 us.
_MANY_RUNS, _SMALL = 4, 1 << 14


def payload_numel(
    shapes: Sequence[Sequence[int]], rank: int, min_compression_rate: float = 2.0
) -> int:
    """Entries that both rounds of :class:`PowerSGD` send together, for parameters of ``shapes``.

    Args:
        min_compression_rate: 0 gives the numbers of the paper, 2 those of torch's hook.

    Example:
        >>> payload_numel([(512, 256, 3, 3), (512,)], rank=4)
        11776
    """
    total = 0
    for shape in map(torch.Size, shapes):
        used = _rank(shape, rank, min_compression_rate)
        total += used * sum(_as_matrix(shape)) if used else shape.numel()
    return total


def _as_matrix(shape: torch.Size) -> tuple[int, int]:
    """Rows and columns of a parameter with at least two dimensions."""
    return shape[0], shape[1:].numel()


def _rank(shape: torch.Size, rank: int, min_compression_rate: float) -> int:
    """The rank at which a parameter is compressed; 0 if it travels as it is."""
    if len(shape) < 2:
        return 0
    rows, columns = _as_matrix(shape)
    rank = min(rank, rows, columns)
    return rank if (rows + columns) * rank * min_compression_rate < rows * columns else 0


class _Run(NamedTuple):
    """Equal pieces at a constant distance in the bucket: one strided view shows them all."""

    first: int  # position of its first piece among its equals
    pieces: int
    offset: int
    stride: int

    def view(self, flat: Tensor, *shape: int) -> Tensor:
        """All pieces of the run, shape ``(pieces, *shape)``; no copy."""
        inner = (shape[1], 1) if len(shape) == 2 else (1,)
        begin = flat.storage_offset() + self.offset
        return flat.as_strided((self.pieces, *shape), (self.stride, *inner), begin)


_Views = list[tuple[slice, Tensor]]


class _Group(NamedTuple):
    """Matrices of equal shape; their factors lie side by side in the payloads."""

    rows: int
    columns: int
    rank: int
    positions: tuple[int, ...]
    runs: tuple[_Run, ...]
    scattered: bool = False  # small and at irregular offsets: computed on a stacked copy

    def views(self, flat: Tensor) -> _Views:
        """For each run, which members of the group it holds, and the view of them."""
        return [
            (slice(run.first, run.first + run.pieces), run.view(flat, self.rows, self.columns))
            for run in self.runs
        ]

    def matrices(self, flat: Tensor) -> _Views:
        """The matrices to compute with: ``views``, or one copy of all where that is faster."""
        views = self.views(flat)
        if not self.scattered:
            return views
        return [(slice(0, len(self.positions)), torch.cat([view for _, view in views]))]

    def put(self, matrices: Tensor, flat: Tensor) -> None:
        """Writes what ``matrices`` copied back to where it was."""
        for part, view in self.views(flat):
            view.copy_(matrices[part])


@dataclass(frozen=True, eq=False)
class _Plan:
    """How a bucket is compressed: groups of matrices, and the dense tail, everything else.

    The first payload is all left factors and then the tail, the second all right factors.
    """

    groups: tuple[_Group, ...]
    tails: tuple[tuple[int, _Run], ...]  # length of the pieces, and where they are
    factors: Layout  # of the second payload; also how the warm start is remembered
    left_numel: int
    tail_numel: int

    def left(self, flat: Tensor) -> list[Tensor]:
        """The left factors (b, r, n) of each group in the first payload."""
        shapes = [(len(group.positions), group.rank, group.rows) for group in self.groups]
        return _blocks(flat, shapes)

    def right(self, flat: Tensor) -> list[Tensor]:
        """The right factors (b, r, m) of each group in the second payload."""
        shapes = [(len(group.positions), group.rank, group.columns) for group in self.groups]
        return _blocks(flat, shapes)

    def tail_views(self, flat: Tensor) -> list[Tensor]:
        """The pieces of the tail in a bucket."""
        return [run.view(flat, length) for length, run in self.tails]


def _blocks(flat: Tensor, shapes: list[tuple[int, int, int]]) -> list[Tensor]:
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


@lru_cache(maxsize=1024)
def _plan(layout: Layout, rank: int, min_compression_rate: float, batch: bool) -> _Plan:
    matrices: dict[tuple[int, int, int, int], list[int]] = {}
    dense: list[tuple[int, int]] = []
    for position, shape in enumerate(layout.shapes):
        used = _rank(shape, rank, min_compression_rate)
        if used:
            key = (*_as_matrix(shape), used, 0 if batch else position)
            matrices.setdefault(key, []).append(position)
        elif shape.numel():
            dense.append((layout.offsets[position], layout.offsets[position + 1]))
    groups = tuple(
        _group(layout, rows, columns, used, positions)
        for (rows, columns, used, _), positions in matrices.items()
    )
    order = [(i, (group.rank, group.columns)) for group in groups for i in group.positions]
    factors = Layout([layout.names[i] for i, _ in order], [shape for _, shape in order])
    left_numel = sum(len(group.positions) * group.rank * group.rows for group in groups)
    tails, tail_numel = _tails(dense)
    return _Plan(groups, tails, factors, left_numel, tail_numel)


def _group(layout: Layout, rows: int, columns: int, rank: int, positions: list[int]) -> _Group:
    runs = _runs([layout.offsets[i] for i in positions])
    scattered = len(runs) >= _MANY_RUNS and rows * columns <= _SMALL
    return _Group(rows, columns, rank, tuple(positions), runs, scattered)


def _tails(spans: list[tuple[int, int]]) -> tuple[tuple[tuple[int, _Run], ...], int]:
    """The spans of the tail, neighbours joined, as runs; and their entries."""
    joined: list[tuple[int, int]] = []
    for begin, end in spans:
        if joined and joined[-1][1] == begin:
            begin = joined.pop()[0]
        joined.append((begin, end))
    by_length: dict[int, list[int]] = {}
    for begin, end in joined:
        by_length.setdefault(end - begin, []).append(begin)
    tails = [(length, run) for length, begins in by_length.items() for run in _runs(begins)]
    return tuple(tails), sum(end - begin for begin, end in joined)


def _runs(offsets: list[int]) -> tuple[_Run, ...]:
    """Splits increasing offsets into stretches of constant distance, from the left."""
    runs: list[_Run] = []
    first = 0
    while first < len(offsets):
        end = first + 1
        stride = offsets[end] - offsets[first] if end < len(offsets) else 0
        while end < len(offsets) and offsets[end] - offsets[end - 1] == stride:
            end += 1
        runs.append(_Run(first, end - first, offsets[first], stride))
        first = end
    return tuple(runs)


@register_scheme("powersgd")
@dataclass(frozen=True)
class PowerSGD(Scheme):
    """Sends each gradient matrix M (n x m) as two thin factors of rank r.

    With Q from the last step: ``P = orthonormalise(mean(M Q^T))``, ``Q = mean(P^T M)``, and the
    mean gradient is ``P Q``, its projection on the columns of P. Both means are all-reduces;
    parameters that do not pay (vectors among them) ride along in the first. A parameter of more
    than two dimensions is a matrix of ``shape[0]`` rows.

    Biased: use with ``ErrorFeedback``. Payload per matrix: ``r * (n + m)`` entries, in float32
    for 16-bit gradients; ``Cast`` around it halves that. Gradients of rank r arrive exactly.
    If any value of any rank is not finite, every matrix entry of the bucket arrives as NaN.

    Args:
        rank: rows of Q; clipped to ``min(n, m)`` per matrix.
        min_compression_rate: a matrix is compressed if its factors, times this, are smaller.
        warm_start: starts from the last step's Q, which over steps finds the best rank-r
            approximation; else from a new random Q each step.
        batch_same_shape: computes matrices of equal shape together; changes speed only.

    Example:
        >>> hook = register(ddp_model, ErrorFeedback(PowerSGD(rank=4)))

    Reference: Vogels, Karimireddy and Jaggi, PowerSGD, 2019.
    """

    rank: int = 1
    min_compression_rate: float = 2.0
    warm_start: bool = True
    batch_same_shape: bool = True

    rounds = 2
    biased = True
    linear = True

    def __post_init__(self) -> None:
        _check_rank(self, self.rank)
        rate = self.min_compression_rate
        if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate < math.inf:
            raise ValueError(
                "PowerSGD(min_compression_rate=...) is a finite number, 0 or more "
                f"(0 compresses every matrix), got {rate!r}"
            )
        _check_flag(self, "warm_start", self.warm_start)
        _check_flag(self, "batch_same_shape", self.batch_same_shape)

    @property
    def stateful(self) -> bool:  # type: ignore[override]
        return self.warm_start

    def memory_error(self, key: str, value: Tensor, parameter: torch.Size) -> str | None:
        if key != KEY:
            return "unknown"
        if len(parameter) < 2:
            return f"belongs to a matrix, the parameter has shape {tuple(parameter)}"
        columns = _as_matrix(parameter)[1]
        if value.dim() != 2 or value.shape[1] != columns:
            return f"has shape {tuple(value.shape)}, the parameter needs (rank, {columns})"
        return None

    def initial_memory(self, name: str, shape: torch.Size, ctx: Context) -> dict[str, Tensor]:
        used = _rank(shape, self.rank, self.min_compression_rate)
        if not self.warm_start or not used:
            return {}
        drawn = _draw(name, (used, _as_matrix(shape)[1]), ctx, 0)
        return {KEY: drawn.to(_compute_dtype(ctx.output))}

    def exchange(self, grad: Tensor, ctx: Context) -> SchemeExchange:
        plan = _plan(ctx.layout, self.rank, self.min_compression_rate, self.batch_same_shape)
        if not plan.groups:
            return (yield from _dense(grad, ctx))
        grad = grad.to(_compute_dtype(grad))
        right, q = self._right_factors(plan, grad, ctx)

        matrices = [group.matrices(grad) for group in plan.groups]
        first = AllReduce(_first_payload(plan, grad, matrices, right))
        payload = yield first
        p, tail = payload.split((plan.left_numel, plan.tail_numel))
        finite = all_finite(payload)
        left = _orthonormal(plan.left(p), finite)

        for views, factor, out in zip(matrices, left, plan.right(q), strict=True):
            for part, view in views:
                multiply_left(view, factor[part], out=out[part])
        own = q.clone() if ctx.keep_unsent else q
        second = AllReduce(q)
        q = yield second
        finite = finite & all_finite(q)
        q.add_(_poison(finite))
        if self.warm_start:
            ctx.memory.write(KEY, plan.factors, q)

        unsent = None
        if ctx.keep_unsent:
            own = own if second.sent is None else second.sent
            sent_tail = None if first.sent is None else first.sent[plan.left_numel :]
            unsent = _subtract_sent(plan, grad, matrices, left, own, sent_tail)
        _decode(plan, left, q, tail, ctx.output)
        return Exchanged(ctx.output, unsent=unsent, finite=finite & _fits(ctx.output))

    def _right_factors(
        self, plan: _Plan, grad: Tensor, ctx: Context
    ) -> tuple[list[Tensor], Tensor]:
        """The right factors to start from, per group, and a flat tensor for the new ones."""
        factors, memory = plan.factors, ctx.memory
        if not self.warm_start:
            flat = _random(factors, ctx, ctx.step, grad)
            return plan.right(flat), torch.empty_like(flat)

        def initial(name: str, shape: torch.Size) -> Tensor:
            return _initial(name, shape, memory.get(KEY, name), ctx)

        old = memory.read(KEY, factors, device=grad.device, dtype=grad.dtype, initial=initial)
        old = old.to(grad.dtype)

        def fresh(group: int) -> Tensor:
            return plan.right(_fresh(factors, ctx.seed, grad.device, grad.dtype))[group]

        blocks = enumerate(plan.right(old))
        right = [unit_rows(block, partial(fresh, group)) for group, block in blocks]
        return right, memory.scratch(KEY, factors, old)


@register_scheme("batched_powersgd")
@dataclass(frozen=True)
class BatchedPowerSGD(Scheme):
    """PowerSGD on the whole bucket as one square matrix: fewer bytes and calls, less accurate.

    The bucket, padded by zeros to a square of side ``ceil(sqrt(numel))``, is never copied or
    resized: the padding takes part in the formulas only.

    Biased: use with ``ErrorFeedback``. Payload: ``2 * rank * side`` entries per bucket; a bucket
    that is no larger than this travels as it is. If any value of any rank is not finite, the whole
    bucket arrives as NaN. The warm start belongs to the bucket: it begins anew when DDP or a
    resumed job forms others.

    Args:
        rank: 1 or 2, usually.
        warm_start: starts from the last step's Q.

    Example:
        >>> hook = register(ddp_model, ErrorFeedback(BatchedPowerSGD(rank=2)))

    Reference: ``batched_powerSGD_hook`` of PyTorch.
    """

    rank: int = 1
    warm_start: bool = True

    rounds = 2
    biased = True
    linear = True

    def __post_init__(self) -> None:
        _check_rank(self, self.rank)
        _check_flag(self, "warm_start", self.warm_start)

    @property
    def stateful(self) -> bool:  # type: ignore[override]
        return self.warm_start

    def memory_error(self, key: str, value: Tensor, parameter: torch.Size) -> str | None:
        if key != BATCHED_KEY:
            return "unknown"
        return None if value.dim() == 2 else f"has shape {tuple(value.shape)}, needs (rank, side)"

    def exchange(self, grad: Tensor, ctx: Context) -> SchemeExchange:
        side = math.isqrt(max(grad.numel() - 1, 0)) + 1
        rank = min(self.rank, side)
        if 2 * rank * side >= grad.numel():
            return (yield from _dense(grad, ctx))
        grad = grad.to(_compute_dtype(grad))
        factors = Layout(ctx.layout.names[:1], [(rank, side)])
        right, q = self._right_factor(factors, grad, ctx)

        parts = _square(grad, side)
        p = right.new_zeros(rank, side)
        for rows, part in parts:
            p[:, rows] = right[:, : part.shape[1]] @ part.mT
        p = yield AllReduce(p)
        finite = all_finite(p)
        (left,) = _orthonormal([p[None]], finite)

        q.zero_()
        for rows, part in parts:
            q[:, : part.shape[1]].addmm_(left[0, :, rows], part)
        own = q.clone() if ctx.keep_unsent else q
        second = AllReduce(q)
        q = yield second
        finite = finite & all_finite(q)
        q.add_(_poison(finite))
        if self.warm_start:
            ctx.memory.write(BATCHED_KEY, factors, q.view(-1))

        if ctx.keep_unsent:
            own = own if second.sent is None else second.sent
            for rows, part in parts:
                part.addmm_(left[0, :, rows].mT, own[:, : part.shape[1]], alpha=-1)
        for rows, part in _square(ctx.output, side):
            decode_low_rank(left[..., rows], q[None, :, : part.shape[1]], out=part[None])
        unsent = grad if ctx.keep_unsent else None
        return Exchanged(ctx.output, unsent=unsent, finite=finite & _fits(ctx.output))

    def _right_factor(self, factors: Layout, grad: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """The right factor (r, side) to start from, and a tensor for the new one."""
        shape, memory = factors.shapes[0], ctx.memory
        if not self.warm_start:
            flat = _random(factors, ctx, ctx.step, grad)
            return flat.view(shape), torch.empty_like(flat).view(shape)

        def initial(name: str, shape: torch.Size) -> Tensor:
            return _draw(name, shape, ctx, 0)

        old = memory.read(
            BATCHED_KEY, factors, device=grad.device, dtype=grad.dtype, initial=initial
        ).to(grad.dtype)

        def fresh() -> Tensor:
            return _fresh(factors, ctx.seed, grad.device, grad.dtype).view(1, *shape)

        right = unit_rows(old.view(1, *shape), fresh)[0]
        return right, memory.scratch(BATCHED_KEY, factors, old).view(shape)


def _check_rank(scheme: Scheme, rank: object) -> None:
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        name = type(scheme).__name__
        raise ValueError(f"{name}(rank=...) is a whole number, 1 or more, got {rank!r}")


def _check_flag(scheme: Scheme, name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{type(scheme).__name__}({name}=...) is True or False, got {value!r}")


def _compute_dtype(grad: Tensor) -> torch.dtype:
    return torch.promote_types(grad.dtype, torch.float32)


def _dense(grad: Tensor, ctx: Context) -> SchemeExchange:
    """One all-reduce of a bucket that does not pay to compress."""
    request = AllReduce(grad.clone() if ctx.keep_unsent else grad)
    mean = yield request
    mean = mean if mean.dtype == ctx.output.dtype else ctx.output.copy_(mean)
    return Exchanged(mean, sent=request.sent)


# ---- random and remembered right factors


def _draw(name: str, shape: Sequence[int], ctx: Context, step: int) -> Tensor:
    """N(0, 1), the same on every rank and in every bucket layout."""
    generator = ctx.generator(f"{name}/q", shared=True, step=step)
    return torch.randn(tuple(shape), generator=generator)


def _random(factors: Layout, ctx: Context, step: int, like: Tensor) -> Tensor:
    """Random factors of all parameters, flat, with rows of about norm 1."""
    drawn = [
        _draw(name, shape, ctx, step).div_(math.sqrt(shape[1])).view(-1)
        for name, shape in zip(factors.names, factors.shapes, strict=True)
    ]
    return torch.cat(drawn).to(like)


def _initial(name: str, shape: torch.Size, old: Tensor | None, ctx: Context) -> Tensor:
    """A parameter's first right factor; takes over what rows one of another rank has."""
    new = _draw(name, shape, ctx, 0)
    if old is not None and old.dim() == 2 and old.shape[1] == shape[1] and old.numel():
        # New rows as long as the old ones, or these would vanish next to them, see unit_rows.
        new *= torch.linalg.vector_norm(old, dim=1).max().to(new) / math.sqrt(shape[1])
        rows = min(len(old), len(new))
        new[:rows] = old[:rows]
    return new


@lru_cache(maxsize=256)
def _fresh(factors: Layout, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """What dead rows are replaced by: random, the same on every rank, the same every time."""
    like = torch.empty(0, device=device, dtype=dtype)
    return _random(factors, Context(Memory(), like, seed=seed), 0, like)


# ---- payloads


def _first_payload(
    plan: _Plan, grad: Tensor, matrices: list[_Views], right: list[Tensor]
) -> Tensor:
    """All left factors ``M Q^T``, then the tail."""
    payload = grad.new_empty(plan.left_numel + plan.tail_numel)
    p, tail = payload.split((plan.left_numel, plan.tail_numel))
    for views, factor, out in zip(matrices, right, plan.left(p), strict=True):
        for part, view in views:
            multiply_right(view, factor[part], out=out[part])
    if plan.tails:
        torch.cat([view.reshape(-1) for view in plan.tail_views(grad)], out=tail)
    return payload


def _poison(finite: Tensor) -> Tensor:
    """0 if finite, else NaN: added to a factor, it makes every entry of the product NaN."""
    return torch.where(finite, 0.0, float("nan"))


def _fits(output: Tensor) -> Tensor | bool:
    """Whether a finite mean stayed finite in the gradient's own dtype."""
    return all_finite(output) if output.dtype == torch.float16 else True


def _orthonormal(left: list[Tensor], finite: Tensor) -> list[Tensor]:
    """Orthonormal left factors; all NaN unless ``finite``.

    The same bits come in on every rank, so all agree; what is not finite is kept from LAPACK.
    """
    poison = _poison(finite)
    clean = [torch.where(finite, factor, 0.0) for factor in left]
    return [orthonormalize(factor.mT).mT.add_(poison) for factor in clean]


def _subtract_sent(
    plan: _Plan,
    grad: Tensor,
    matrices: list[_Views],
    left: list[Tensor],
    own: Tensor,
    sent_tail: Tensor | None,
) -> Tensor:
    """``grad`` without this rank's share of the mean, in place."""
    shares = plan.right(own)
    for group, views, factor, share in zip(plan.groups, matrices, left, shares, strict=True):
        for part, view in views:
            subtract_low_rank(view, factor[part], share[part])
            if group.scattered:
                group.put(view, grad)
    tails = plan.tail_views(grad)
    if sent_tail is None:
        for tail in tails:
            tail.zero_()
    else:
        for tail, piece in _pieces(tails, sent_tail):
            tail.sub_(piece)
    return grad


def _decode(plan: _Plan, left: list[Tensor], q: Tensor, tail: Tensor, output: Tensor) -> None:
    """Writes the mean: products of the factors, and the tail."""
    for group, factor, right in zip(plan.groups, left, plan.right(q), strict=True):
        if group.scattered:
            group.put(torch.bmm(factor.mT, right), output)
            continue
        for part, view in group.views(output):
            decode_low_rank(factor[part], right[part], out=view)
    for view, piece in _pieces(plan.tail_views(output), tail):
        view.copy_(piece)


def _pieces(views: list[Tensor], flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each view with its part of a flat tensor."""
    parts = flat.split([view.numel() for view in views]) if views else ()
    for view, part in zip(views, parts, strict=True):
        yield view, part.view(view.shape)


def _square(flat: Tensor, side: int) -> list[tuple[slice, Tensor]]:
    """The rows of the square that hold entries, and views of them: full ones, and a short last."""
    rows, rest = divmod(flat.numel(), side)
    parts = [(slice(0, rows), flat[: rows * side].view(rows, side))]
    if rest:
        parts.append((slice(rows, rows + 1), flat[rows * side :].view(1, rest)))
    return parts
