"""Defines ``Calls``: a hook's scheme, memory and ledger for collectives that a program calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.checkpoint.form import FLOATS, MAX_STEP, SavedBuckets, read, whole_number
from commhooks.core.layout import Layout
from commhooks.core.scheme import Scheme, slots_of
from commhooks.core.settings import from_json, is_shape
from commhooks.core.step_info import number_of
from commhooks.errors import CheckpointError, RegistrationError
from commhooks.hook.call import Call, Handle, Kind, travels_coded
from commhooks.hook.capture import need_no_capture
from commhooks.hook.engine import Engine
from commhooks.hook.exchanges import Exchanges
from commhooks.hook.named_tensors import NamedTensors
from commhooks.hook.state import HookState
from commhooks.hook.step import Step
from commhooks.hook.tracing import not_traced
from ddp_core import Exchange, borrow_memory, clock_of, completed

__all__ = ["Calls"]

Future = torch.futures.Future
_DENSE_SENDS = {"all_reduce": 2.0, "reduce_scatter": 1.0}  # see ``Task``


class Calls(HookState):
    """Exchanges named tensors, one at each call, without a model and without a backward pass.

    Each call is one step of the tensor of that name, and is over with its exchange. So calls of
    different names overlap; a call waits for the one before of the same name if the scheme keeps
    memory, which both of them read and write.
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
        self._tensors = self._binding.parameters = NamedTensors()
        self._steps: dict[str, int] = {}  # of the next call of each name
        self._kinds: dict[str, Kind] = {}  # of the calls of each name
        self._numbers: dict[str, int] = {}  # of each name, in the ledger
        self._first_step = 0  # of a name that is new
        self._pending: list[tuple[str, Future[Tensor]]] = []
        self._drivers.ensure(_rounds(scheme))

    def _bind(self) -> None:
        group = self._binding.group()
        self._engine.rank, self._engine.world_size = group.rank(), group.size()

    def _engine_at(self, step: int) -> Engine:
        """Returns the engine of a call, whose draws are those of groups with ranks so far apart.

        What ranks in a row have averaged, those in a column may average as well. A dither has to be
        independent of its input, in which the draws of the first average are. All rows draw alike,
        as ranks of tensor parallelism do: what is equal on several of them stays so.
        """
        engine = self._engine.at(step)
        with suppress(KeyError, ValueError, RuntimeError):  # a group that torch has not made
            ranks = sorted(dist.get_process_group_ranks(self._binding.group()))
            if len(ranks) < dist.get_world_size():
                apart = [rank - ranks[0] for rank in ranks]
                engine.seed = number_of(f"{engine.seed}/{apart}") >> 1
        return engine

    @not_traced
    def run(self, call: Call, name: str | None, async_op: bool) -> Handle | None:
        """Makes a call, and waits for its end unless ``async_op``."""
        if self._closed:
            raise RegistrationError(f"Collectives.{call.kind}: it was closed; make another")
        self._bind()
        call.check(self._engine.world_size)
        call.need(self.scheme)
        # Tensors of inference mode could not be written by the threads that go on with the call.
        with torch.inference_mode(False), torch.no_grad():
            future = self._start(call, self._named(call, name), async_op)
        if async_op:
            return Handle(future, call.given.device)
        future.wait()
        return None

    def _named(self, call: Call, name: str | None) -> str:
        """Returns the name of a call's tensor, which memory and random bits belong to."""
        if name is not None and not isinstance(name, str):
            raise TypeError(f"Collectives.{call.kind}(name=...): a text, got {name!r}")
        if self._engine.keeps_memory and not call.is_plain(self.scheme):
            if name is None:
                raise ValueError(
                    f"Collectives.{call.kind}: {self.scheme} keeps memory of each tensor between "
                    f"calls; give every tensor a name=..., the same on every rank"
                )
            self._tensors.declare(name, call.given.shape, call.given.dtype)
            kind = self._kinds.setdefault(name, call.kind)
            if kind != call.kind:
                raise ValueError(
                    f"Collectives.{call.kind}(name={name!r}): {self.scheme} keeps memory of this "
                    f"name for {kind}, which is of other values; give this call a name of its own"
                )
        return "tensor" if name is None else name

    def _start(self, call: Call, name: str, async_op: bool) -> Future[Tensor]:
        device, keeps = call.given.device, self._engine.keeps_memory
        if not call.given.numel():  # on every rank, so that nobody waits for it
            return completed(call.into)
        if not call.is_plain(self.scheme):
            need_no_capture(device, self.scheme, agreed=self._agreed)
        if not self._agreed:
            self._binding.also_on = device
            self.agree(f"{self._called}.{call.kind}, the first call or the first after loading")
        if keeps:
            self._wait_for(name)
            self._drivers.join()
        self._pending = [one for one in self._pending if not one[1].done() or _failed(one[1])]
        number = self._numbers.setdefault(name, len(self._numbers))
        at = self._steps.get(name, self._first_step)
        self._steps[name] = at + 1
        self._engine.step = max(self._engine.step, at + 1)
        engine, agree = self._engine_at(at), keeps and call.kind == "reduce_scatter"
        step = Step(at, self._binding.group(), holds=False, timed=self.ledger.times(at))
        step.clock = clock_of(device, timed=step.timed)
        exchange = call.exchange(engine, Layout([name], [call.given.shape]), number, agree=agree)
        future = Exchanges(engine, self._drivers, self.ledger).start(
            step,
            self._counted(engine, call, exchange, async_op),
            bucket=number,
            dense_bytes=call.given.nbytes,
            device=device,
            is_last=True,
            further_rounds=int(agree),
            dense_sends=_DENSE_SENDS.get(call.kind, engine.world_size),
        )
        self.ledger.launched_last(at, step.clock.now())
        self._attendance.calls += 1
        self._pending.append((name, future))
        return future

    def _counted(self, engine: Engine, call: Call, exchange: Exchange, async_op: bool) -> Exchange:
        if async_op:
            # On a GPU the caller may give its tensors back before a side stream has read them.
            for tensor in (call.given, call.into):
                borrow_memory(tensor)
        result = yield from exchange
        self._engine.skipped += engine.skipped
        # Else the caller's stream has waited. A future keeps its value's memory until a GPU has
        # come there: hosts that gather parameters layer by layer would need that of several.
        return result if async_op else result.new_empty(0)

    def wait(self) -> None:
        """Waits for all calls that were made with ``async_op=True``; raises if one has failed."""
        self._wait_for(None)

    def _wait_for(self, name: str | None) -> None:
        """Waits for the calls of a name, or for all, and forgets them; raises if one has failed."""
        errors = []
        for one in [one for one in self._pending if name in (None, one[0])]:
            self._pending.remove(one)
            try:
                one[1].wait()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    # ---- between calls

    def switch(self, scheme: str | Scheme, **options: Any) -> None:
        """Runs another scheme from the next call on; see :meth:`commhooks.HookState.switch`."""
        self.wait()
        super().switch(scheme, **options)

    def _replace(self, built: Scheme) -> None:
        super()._replace(built)
        self._drivers.ensure(_rounds(built))

    def declare(self, name: str, like: Tensor) -> None:
        """Tells name, shape and dtype of a tensor before its first call.

        Needed only to load a state that a hook on a model has saved. Whole and complex numbers
        travel exactly, so that nothing is kept for them.

        Raises:
            ValueError: a tensor of this name has another shape or dtype.
        """
        if travels_coded(like):
            self._tensors.declare(name, like.shape, like.dtype)

    def state_dict(self, *, gather: bool = False, to: int | None = None) -> dict[str, Any]:
        """Returns what a later run continues from; see :meth:`commhooks.HookState.state_dict`."""
        self.wait()
        return super().state_dict(gather=gather, to=to)

    def load_state_dict(
        self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, strict: bool = True
    ) -> None:
        """Continues from a saved state; see :meth:`commhooks.HookState.load_state_dict`."""
        self.wait()
        saved = read(state, "load_state_dict", verify=False)
        steps, tensors, first = _tensors_of(saved.common.get("plan", ""))
        if not strict:  # else a size that only the plan tells would be that of the next saved state
            tensors = tensors.having(
                name for part in saved.parts for of_key in part.memory.values() for name in of_key
            )
        before = self._tensors
        self._tensors = self._binding.parameters = before.and_also(tensors)
        try:
            super().load_state_dict(state, strict=strict)
        except BaseException:
            self._tensors = self._binding.parameters = before
            raise
        # Of a hook on a model: all tensors go on from its step.
        self._steps, self._first_step = steps, self.step if first is None else first

    def saved_plan(self) -> str:
        """Returns names, steps and shapes of the tensors, as JSON."""
        known = {name: (step, self._tensors.described(name)) for name, step in self._steps.items()}
        return json.dumps({"tensors": known, "first": self._first_step})

    def follow_plan(self, plan: str, scheme: str) -> None:
        """Counts calls as the ranks that this one joins; random draws and schedules go by them."""
        self._steps, tensors, first = _tensors_of(plan)
        self._tensors = self._binding.parameters = self._tensors.and_also(tensors)
        self._first_step = first or 0

    def ranks_changed(self) -> None:
        """Forgets calls of the former ranks; handles of those that had not ended raise."""
        self._pending.clear()

    def _take_up(self, buckets: SavedBuckets) -> None:
        """Ignores the buckets of a state, since every call is an exchange of its own."""

    def close(self) -> None:
        """Ends all calls, stops the driver thread and gives back groups. Safe to call twice."""
        for _, future in self._pending:
            with suppress(Exception):  # whoever has the handle hears of it
                future.wait()
        self._pending = []
        super().close()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("Collectives is not pickled or copied; save what state_dict() returns")


def _failed(future: Future[Tensor]) -> bool:
    """Whether a call that is over has failed."""
    try:
        future.value()
    except Exception:
        return True
    return False


def _rounds(scheme: Scheme) -> int:
    """Returns the number of lanes: one more where ranks agree on what their shards were like."""
    keeps = bool(slots_of(scheme))
    return scheme.traits.rounds + (keeps and scheme.traits.shards)


def _tensors_of(plan: str) -> tuple[dict[str, int], NamedTensors, int | None]:
    """Returns the steps of the tensors that a plan names, those whose shapes it has, and the first.

    The first step is that of a tensor which is new. None: the plan is of a hook on a model.

    Raises:
        CheckpointError: the plan does not describe tensors.
    """
    steps, tensors = {}, NamedTensors()
    try:
        # Another text is of a hook that chooses its scheme: it names no tensors.
        told = from_json(plan or "{}")
        for name, (step, known) in told.get("tensors", {}).items():
            steps[name] = _step_of(step)
            if known is not None:
                tensors.declare(name, *_shape_of(*known))
        first = _step_of(told.get("first", 0)) if steps or "first" in told else None
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"load_state_dict: 'plan' does not describe tensors, got {plan[:80]!r}; damaged"
        ) from error
    return steps, tensors, first


def _step_of(step: Any) -> int:
    if not whole_number(step, 0, MAX_STEP):
        raise ValueError("no number of a step")
    number: int = step
    return number


def _shape_of(shape: Any, dtype: Any) -> tuple[torch.Size, torch.dtype]:
    kinds = {str(kind).split(".")[1]: kind for kind in FLOATS}  # others are not compressed
    if not is_shape(shape) or dtype not in kinds:
        raise ValueError("no tensor")
    return torch.Size(shape), kinds[dtype]
