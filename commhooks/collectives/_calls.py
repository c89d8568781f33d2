"""Defines ``CollectiveState``, which runs a scheme in collectives that a program calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.checkpoint._format import FLOATS, MAX_STEP, SavedBuckets, is_int_between, read
from commhooks.core._bucket import Bucket, Result, SchemeExchange
from commhooks.core._dense import Dense
from commhooks.core._layout import Layout, equal_shards
from commhooks.core._scheme import Scheme, slots_of
from commhooks.core._settings import from_json, is_shape
from commhooks.core._slot import Slot, number_of
from commhooks.errors import CheckpointError, RegistrationError
from commhooks.hook._capture import check_cuda_graph
from commhooks.hook._engine import Engine
from commhooks.hook._exchanges import ExchangeLauncher, Step
from commhooks.hook._parameters import Parameter, Parameters
from commhooks.hook._state import HookState, asks_for_scheme
from commhooks.wrappers._make import make
from ddp_core import (
    AllGather,
    AllReduce,
    Exchange,
    ReduceScatter,
    clock_of,
    completed,
    event_after,
    record_stream,
)
from ddp_core._torch import dynamo_disable

__all__ = [
    "CollectiveCall",
    "CollectiveState",
    "Handle",
    "Kind",
    "NamedTensors",
    "is_compressible",
    "is_sum_op",
    "write_into",
]


class NamedTensors(Parameters):
    """Holds names, shapes and dtypes of tensors, which the first call of each name declares."""

    def __iter__(self) -> Iterator[Parameter]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def declare(self, name: str, shape: torch.Size, dtype: torch.dtype) -> None:
        """Adds a tensor, or checks shape and dtype of one that was declared before.

        Raises:
            ValueError: a tensor of this name has another shape or dtype.
        """
        known = self._by_name.get(name)
        if known is None:
            self._by_name[name] = Parameter(name, shape, dtype, tuple(range(len(shape))))
        elif (known.shape, known.dtype) != (shape, dtype):
            raise ValueError(
                f"name={name!r} is a tensor of shape {tuple(known.shape)} and {known.dtype}, which "
                f"the scheme's state belongs to; got shape {tuple(shape)} and {dtype}: give every "
                f"tensor a name of its own"
            )

    def is_portable(self, slot: Slot) -> bool:
        return False  # a name is the user's, whatever is in it: nothing is a piece of another

    def accepts_names(self, names: Collection[str]) -> bool:
        return True

    def merged_with(self, other: NamedTensors) -> NamedTensors:
        """Returns the tensors of both; where names are equal, those of ``other``."""
        both = NamedTensors()
        both._by_name = {**self._by_name, **other._by_name}
        return both

    def restricted_to(self, names: Iterable[str]) -> NamedTensors:
        """Returns the declared ones of the tensors with these names."""
        some = NamedTensors()
        some._by_name = {name: self._by_name[name] for name in names if name in self._by_name}
        return some

    def described(self, name: str) -> tuple[list[int], str] | None:
        """Returns shape and dtype of a tensor as JSON values; None if it is not declared."""
        known = self._by_name.get(name)
        return None if known is None else (list(known.shape), str(known.dtype).split(".")[1])


# ---- one call


Kind = Literal["all_reduce", "reduce_scatter", "all_gather"]
Run = Callable[[Bucket], SchemeExchange]
# What has no rounding of ours is committed as it is: nothing was kept of it.
_FINITE = torch.ones((), dtype=torch.bool, device="cpu")


class Handle(dist.Work):
    """Waits for one call that was made with ``async_op=True``, as torch's handles do.

    Args:
        future: future of the result.
        device: device of the result.
    """

    # A ``dist.Work``, since FSDP2 waits for nothing else.
    def __init__(self, future: torch.futures.Future[Any], device: torch.device) -> None:
        super().__init__()
        self._future, self._device = future, device
        self._happened: Callable[[], bool] | None = None

    def wait(self, timeout: Any = None) -> bool:
        """Waits until the result is there (on a GPU: makes the current stream wait), or raises.

        Args:
            timeout: has no effect: the collectives of the exchange have that of their group.
        """
        self._future.wait()
        return True

    def synchronize(self) -> None:
        """Waits as :meth:`wait` does."""
        self.wait()

    def block_current_stream(self) -> None:
        """Waits as :meth:`wait` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the call has ended, also on the device."""
        if self._device.type == "cpu" or not self._future.done():
            return self._future.done()
        if self._happened is None:  # the future is done when all is enqueued
            self._happened = event_after(self._future, self._device)
        return self._happened()

    def get_future(self) -> torch.futures.Future[Any]:
        """Returns the future of the tensor that has the result."""
        return self._future


@dataclass(frozen=True)
class CollectiveCall:
    """Describes one call of a collective.

    Attributes:
        kind: the collective.
        input: tensor of this rank, any shape and strides.
        output: tensor for the result; ``input`` itself in an all-reduce.
        is_sum: whether the result is the sum over ranks, not the mean.
    """

    kind: Kind
    input: Tensor
    output: Tensor
    is_sum: bool = False

    def check(self, world_size: int) -> None:
        """Raises unless the tensors fit each other and the collective."""
        call, (given, into) = f"commhooks.{self.kind}", (self.input, self.output)
        for tensor in (given, into):
            if not isinstance(tensor, Tensor):
                outputs = ", one output for all ranks" * (self.kind == "all_gather")
                raise TypeError(f"{call} takes tensors{outputs}, got {type(tensor).__name__}")
            if tensor.layout != torch.strided:
                raise TypeError(f"{call} takes dense tensors, got one of {tensor.layout}")
        many = {"all_reduce": (1, 1), "reduce_scatter": (1, world_size)}
        less, more = many.get(self.kind, (world_size, 1))
        if given.numel() * less != into.numel() * more:
            larger, smaller = ("input", "output") if more > less else ("output", "input")
            raise ValueError(
                f"{call}(output, input): {larger} needs {world_size} times the entries of "
                f"{smaller}, a part for each rank; got output {tuple(into.shape)} and input "
                f"{tuple(given.shape)}"
            )
        if (given.dtype, given.device) != (into.dtype, into.device):
            raise ValueError(
                f"{call}(output, input): both of one dtype on one device, got {into.dtype} on "
                f"{into.device} and {given.dtype} on {given.device}"
            )
        whole = not (given.is_floating_point() or given.is_complex())
        if whole and self.kind != "all_gather" and not self.is_sum:
            raise ValueError(f"{call}(op=AVG): a mean of {given.dtype} is not whole; use SUM")

    def is_plain(self, scheme: Scheme) -> bool:
        """Whether the tensor is sent without compression: integers, complex numbers, scheme "none".

        So are floating numbers of 8 bits, such as quantised weights.
        """
        return not is_compressible(self.input) or type(scheme) is Dense

    def check_scheme(self, scheme: Scheme) -> None:
        """Raises RegistrationError unless a scheme supports the collective."""
        if self.is_plain(scheme):
            return
        if self.kind == "all_gather" and not scheme.gathers:
            raise RegistrationError(
                f"commhooks.all_gather: {scheme} averages, and has no payload of a single rank's "
                f"tensor; int8, int4, fp8, eden, fp16, bf16, none and TwoPhase(codec) have"
            )
        if self.kind == "reduce_scatter" and not scheme.traits.shards:
            raise RegistrationError(
                f"commhooks.reduce_scatter: {scheme} averages whole tensors, of which every rank "
                f"would drop all but its part; use all_reduce, or int8, int4, fp8, eden, "
                f"onebit, fp16, bf16, none or TwoPhase(codec)"
            )
        if self.is_sum and self.kind != "all_gather" and scheme.traits.returns != "mean":
            raise RegistrationError(
                f"commhooks.{self.kind}(op=SUM): {scheme} returns no mean of tensors "
                f"({scheme.traits.returns!r}), so there is no sum; op=AVG gives what it returns"
            )

    def exchange(self, engine: Engine, layout: Layout, number: int, *, agree: bool) -> Exchange:
        """Runs the call as an exchange of ``engine``, and returns ``output``."""
        exact, ranks, into = self.is_plain(engine.scheme), engine.world_size, _real(self.output)
        run: Run = engine.scheme.exchange
        # A view of one dimension may have gaps, which neither kernels nor Gloo know of.
        raw, output, shards = _real(self.input).reshape(-1).contiguous(), None, None
        if self.kind == "all_reduce":
            raw = raw.clone() if raw.is_inference() else raw  # it is reduced in place
        else:
            # A tensor of inference mode is written at the end only.
            fits = into.is_contiguous() and not into.is_inference()
            output = into.view(-1) if fits else raw.new_empty(into.numel())
        if self.kind == "reduce_scatter":
            shards = equal_shards(raw.numel(), ranks)
            raw = raw if exact else raw.clone()  # schemes may overwrite a gradient
        if exact:
            run = _unrounded(self.kind, self.is_sum)
        elif output is not None and self.kind == "all_gather":
            parts = equal_shards(output.numel(), ranks)
            run = _gathering(engine.scheme, parts)
        elif self.is_sum:
            run = _times(run, ranks)
        arrived = yield from engine.exchange(
            raw, layout, number, shards=shards, output=output, run=run, agree=agree and not exact
        )
        if arrived.data_ptr() != into.data_ptr():
            write_into(into, arrived.view(into.shape))
        return self.output


def write_into(into: Tensor, values: Tensor) -> None:
    """Writes values to a tensor, which may be an inference tensor."""
    # Threads of drivers are not in the mode of the caller.
    with torch.inference_mode(into.is_inference()):
        into.copy_(values)


def is_sum_op(kind: Kind, op: Any) -> bool:
    """Whether ``op`` is SUM; raises ValueError unless it is SUM or AVG."""
    if op == dist.ReduceOp.SUM:
        return True
    if op == dist.ReduceOp.AVG:
        return False
    raise ValueError(
        f"commhooks.{kind}(op=...) is ReduceOp.SUM or ReduceOp.AVG, got {op}: schemes average; "
        f"torch.distributed has the other operations"
    )


def is_compressible(tensor: Tensor) -> bool:
    """Whether schemes compress a tensor: floating numbers of more than 8 bits."""
    return tensor.is_floating_point() and tensor.itemsize > 1


def _real(tensor: Tensor) -> Tensor:
    """Returns a detached tensor, complex numbers as pairs of reals."""
    plain = tensor.detach()
    return torch.view_as_real(plain) if plain.is_complex() else plain


def _unrounded(kind: Kind, total: bool) -> Run:
    """Returns an uncompressed exchange, bit-equal to torch's own collective.

    The mean of an all-reduce is that of DistributedDataParallel, which divides before the sum.
    """

    def run(bucket: Bucket) -> SchemeExchange:
        op: Literal["sum", "mean"] = "sum" if total else "mean"
        if kind == "all_gather":
            arrived = yield AllGather(bucket.raw)
        elif kind == "reduce_scatter":
            arrived = yield ReduceScatter(bucket.raw.view(bucket.world_size, -1), op)
        else:
            arrived = yield AllReduce(bucket.raw, op)
        return Result(arrived.view(-1), finite=_FINITE)

    return run


def _gathering(scheme: Scheme, parts: Any) -> Run:
    return lambda bucket: scheme.all_gather(bucket, parts)


def _times(run: Run, ranks: int) -> Run:
    """Returns an exchange whose result is the sum, ``ranks`` times the mean."""

    def total(bucket: Bucket) -> SchemeExchange:
        result = yield from run(bucket)
        # In place in the result's own memory only: a scheme may keep what it returns.
        in_output = result.mean.data_ptr() == bucket.output.data_ptr()
        mean = result.mean.mul_(ranks) if in_output else result.mean * ranks
        return result._replace(mean=mean)

    return total


# ---- all calls of one object


Future = torch.futures.Future
_DENSE_SENDS = {"all_reduce": 2.0, "reduce_scatter": 1.0}  # see ``Task``


class CollectiveState(HookState):
    """Exchanges named tensors, one at each call, without a model and without a backward pass.

    Each call is one step of the tensor of that name, and ends with its exchange. Calls of different
    names overlap; a call waits for the previous call of the same name if the scheme keeps memory,
    which both calls read and write.
    """

    _called = "Collectives"  # what the program calls, for messages

    def _init(
        self,
        scheme: Scheme,
        seed: int,
        history: int,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super()._init(scheme, seed, history, process_group)
        self.compared_with = "exchange"
        self._tensors = self.target.parameters = NamedTensors()
        self._steps: dict[str, int] = {}  # of the next call of each name
        self._kinds: dict[str, Kind] = {}  # of the calls of each name
        self._numbers: dict[str, int] = {}  # of each name, in the ledger
        self._first_step = 0  # of a name that is new
        self._pending: list[tuple[str, Future[Tensor]]] = []
        self.drivers.ensure(_rounds(scheme))

    def bind(self) -> None:
        group = self.target.group()
        self.engine.rank, self.engine.world_size = group.rank(), group.size()

    def _engine_at(self, step: int) -> Engine:
        """Returns the engine of a call, whose random bits depend on the distances of the ranks.

        Ranks in a column of a mesh may average what ranks in a row have averaged. A dither has to
        be independent of its input, which contains the draws of the first average. All rows draw
        the same bits: values that are equal on several tensor-parallel ranks stay equal.
        """
        engine = self.engine.at(step)
        with suppress(KeyError, ValueError, RuntimeError):  # a group that torch has not made
            ranks = sorted(dist.get_process_group_ranks(self.target.group()))
            if len(ranks) < dist.get_world_size():
                apart = [rank - ranks[0] for rank in ranks]
                engine.seed = number_of(f"{engine.seed}/{apart}") >> 1
        return engine

    @dynamo_disable
    def run(self, call: CollectiveCall, name: str | None, async_op: bool) -> Handle | None:
        """Makes a call, and waits for its end unless ``async_op``."""
        if self._closed:
            raise RegistrationError(f"Collectives.{call.kind}: it was closed; make another")
        self.bind()
        call.check(self.engine.world_size)
        call.check_scheme(self.scheme)
        # Tensors of inference mode could not be written by the threads that complete the call.
        with torch.inference_mode(False), torch.no_grad():
            future = self._start(call, self._named(call, name), async_op)
        if async_op:
            return Handle(future, call.input.device)
        future.wait()
        return None

    def _named(self, call: CollectiveCall, name: str | None) -> str:
        """Returns the name of a call's tensor, which memory and random bits belong to."""
        if name is not None and not isinstance(name, str):
            raise TypeError(f"Collectives.{call.kind}(name=...): a text, got {name!r}")
        if self.engine.keeps_memory and not call.is_plain(self.scheme):
            if name is None:
                raise ValueError(
                    f"Collectives.{call.kind}: {self.scheme} keeps state of each tensor between "
                    f"calls; give every tensor a name=..., the same on every rank"
                )
            self._tensors.declare(name, call.input.shape, call.input.dtype)
            kind = self._kinds.setdefault(name, call.kind)
            if kind != call.kind:
                raise ValueError(
                    f"Collectives.{call.kind}(name={name!r}): {self.scheme} keeps state of this "
                    f"name for {kind}, which is of other values; give this call a name of its own"
                )
        return "tensor" if name is None else name

    def _start(self, call: CollectiveCall, name: str, async_op: bool) -> Future[Tensor]:
        # Refuse what cannot run, and compare settings at the first call.
        device, keeps = call.input.device, self.engine.keeps_memory
        if not call.input.numel():  # empty on every rank, so that no rank waits
            return completed(call.output)
        if not call.is_plain(self.scheme):
            check_cuda_graph(device, self.scheme, agreed=self.has_compared)
        if not self.has_compared:
            self.target.exchange_device = device
            text = f"{self._called}.{call.kind}, the first call or the first after loading"
            self.compare_ranks(text)

        # Wait for the previous call of this name, which writes the memory that this one reads.
        if keeps:
            self._wait_for(name)
            self.drivers.join()
        self._pending = [
            pending for pending in self._pending if not pending[1].done() or _failed(pending[1])
        ]

        # Number the call, and make it a step of its own.
        number = self._numbers.setdefault(name, len(self._numbers))
        at = self._steps.get(name, self._first_step)
        self._steps[name] = at + 1
        self.engine.step = max(self.engine.step, at + 1)
        engine, agree = self._engine_at(at), keeps and call.kind == "reduce_scatter"
        step = Step(
            at, self.target.group(), holds_buckets=False, records_times=self.ledger.times(at)
        )
        step.clock = clock_of(device, timed=step.records_times)

        # Start the exchange.
        exchange = call.exchange(engine, Layout([name], [call.input.shape]), number, agree=agree)
        future = ExchangeLauncher(engine, self.drivers, self.ledger).start(
            step,
            self._counted(engine, call, exchange, async_op),
            bucket=number,
            dense_bytes=call.input.nbytes,
            device=device,
            is_last=True,
            extra_rounds=int(agree),
            dense_sends=_DENSE_SENDS.get(call.kind, engine.world_size),
        )
        self.ledger.record_last_launch(at, step.clock.now())
        self.call_monitor.calls += 1
        self._pending.append((name, future))
        return future

    def _counted(
        self, engine: Engine, call: CollectiveCall, exchange: Exchange, async_op: bool
    ) -> Exchange:
        if async_op:
            # On a GPU the caller may give its tensors back before a side stream has read them.
            for tensor in (call.input, call.output):
                record_stream(tensor)
        result = yield from exchange
        self.engine.skipped += engine.skipped
        # Else the caller's stream has waited. A future keeps its value's memory until a GPU has
        # come there: hosts that gather parameters layer by layer would need that of several.
        return result if async_op else result.new_empty(0)

    def wait(self) -> None:
        """Waits for all calls that were made with ``async_op=True``; raises if one has failed."""
        self._wait_for(None)

    def _wait_for(self, name: str | None) -> None:
        """Waits for the calls of a name, or for all calls; raises if one has failed."""
        errors = []
        for pending in [pending for pending in self._pending if name in (None, pending[0])]:
            self._pending.remove(pending)
            try:
                pending[1].wait()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    # ---- between calls

    @asks_for_scheme
    def switch(self, scheme: str | Scheme, **options: Any) -> None:
        """Runs another scheme from the next call on.

        See :meth:`commhooks.hook.HookState.switch`.
        """
        self.wait()
        # Tensors need not be gradients, and a rounded one no feedback.
        super().switch(make(scheme, **options), error_feedback=False)

    def _replace(self, built: Scheme) -> None:
        super()._replace(built)
        self.drivers.ensure(_rounds(built))

    def declare(self, name: str, like: Tensor) -> None:
        """Declares name, shape and dtype of a tensor before its first call.

        Needed only to load a state that a hook on a model has saved. Whole and complex numbers
        travel exactly, so that nothing is kept for them.

        Raises:
            ValueError: a tensor of this name has another shape or dtype.
        """
        if is_compressible(like):
            self._tensors.declare(name, like.shape, like.dtype)

    def state_dict(self, *, gather: bool = False, dst: int | None = None) -> dict[str, Any]:
        """Returns what a later run continues from.

        See :meth:`commhooks.hook.HookState.state_dict`.
        """
        self.wait()
        return super().state_dict(gather=gather, dst=dst)

    def load_state_dict(
        self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, strict: bool = True
    ) -> None:
        """Continues from a saved state; see :meth:`commhooks.hook.HookState.load_state_dict`."""
        self.wait()
        saved = read(state, "load_state_dict", verify=False)
        steps, tensors, first = _tensors_of(saved.common.get("plan", ""))
        if not strict:  # else a size that only the plan tells would be that of the next saved state
            tensors = tensors.restricted_to(
                name for part in saved.parts for of_key in part.memory.values() for name in of_key
            )
        before = self._tensors
        self._tensors = self.target.parameters = before.merged_with(tensors)
        try:
            super().load_state_dict(state, strict=strict)
        except BaseException:
            self._tensors = self.target.parameters = before
            raise
        # Of a hook on a model: all tensors continue from its step.
        self._steps, self._first_step = steps, self.step if first is None else first

    def plan_state(self) -> str:
        """Returns names, steps and shapes of the tensors, as JSON."""
        known = {name: (step, self._tensors.described(name)) for name, step in self._steps.items()}
        return json.dumps({"tensors": known, "first": self._first_step})

    def apply_plan(self, plan: str, scheme: str) -> None:
        """Takes the call numbers of the ranks that this rank joins: random bits depend on them."""
        self._steps, tensors, first = _tensors_of(plan)
        self._tensors = self.target.parameters = self._tensors.merged_with(tensors)
        self._first_step = first or 0

    def on_group_changed(self) -> None:
        """Drops calls of the former ranks; handles of calls that had not ended raise."""
        self._pending.clear()

    def _apply_buckets(self, buckets: SavedBuckets) -> None:
        """Ignores the buckets of a state, since every call is an exchange of its own."""

    def close(self) -> None:
        """Waits for all calls, stops the driver thread, releases groups. Safe to call twice."""
        for _, future in self._pending:
            with suppress(Exception):  # the handle raises as well
                future.wait()
        self._pending = []
        super().close()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("Collectives is not pickled or copied; save what state_dict() returns")


def _failed(future: Future[Tensor]) -> bool:
    """Whether a call that has ended failed."""
    try:
        future.value()
    except Exception:
        return True
    return False


def _rounds(scheme: Scheme) -> int:
    """Returns the number of lanes: one more where ranks agree on whether shards were finite."""
    keeps = bool(slots_of(scheme))
    return scheme.traits.rounds + (keeps and scheme.traits.shards)


def _tensors_of(plan: str) -> tuple[dict[str, int], NamedTensors, int | None]:
    """Reads a plan: the step of each tensor, the declared tensors, and the step of new tensors.

    The step of new tensors is None if the plan is that of a hook on a model.

    Raises:
        CheckpointError: the plan does not describe tensors.
    """
    steps, tensors = {}, NamedTensors()
    try:
        # Another text is of a hook that chooses its scheme: it names no tensors.
        fields = from_json(plan or "{}")
        for name, (step, known) in fields.get("tensors", {}).items():
            steps[name] = _step_of(step)
            if known is not None:
                tensors.declare(name, *_shape_of(*known))
        first = _step_of(fields.get("first", 0)) if steps or "first" in fields else None
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"load_state_dict: 'plan' does not describe tensors, got {plan[:80]!r}; damaged"
        ) from error
    return steps, tensors, first


def _step_of(step: Any) -> int:
    if not is_int_between(step, 0, MAX_STEP):
        raise ValueError("no number of a step")
    number: int = step
    return number


def _shape_of(shape: Any, dtype: Any) -> tuple[torch.Size, torch.dtype]:
    kinds = {str(kind).split(".")[1]: kind for kind in FLOATS}  # others are not compressed
    if not is_shape(shape) or dtype not in kinds:
        raise ValueError("no tensor")
    return torch.Size(shape), kinds[dtype]
