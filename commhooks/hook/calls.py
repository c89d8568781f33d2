"""Defines ``Calls``: a hook's scheme, memory and ledger for collectives that a program calls."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.checkpoint.form import MAX_STEP, SavedBuckets, read
from commhooks.core.layout import Layout
from commhooks.core.scheme import Scheme, slots_of
from commhooks.errors import CheckpointError, RegistrationError
from commhooks.hook.call import Call, Handle
from commhooks.hook.engine import Engine
from commhooks.hook.exchanges import Exchanges
from commhooks.hook.named_tensors import NamedTensors
from commhooks.hook.state import HookState
from commhooks.hook.step import Step
from ddp_core import Exchange, clock_of

__all__ = ["Calls"]

Future = torch.futures.Future


class Calls(HookState):
    """Exchanges named tensors, one at each call, without a model and without a backward pass.

    Each call is one step of the tensor of that name, and is over with its exchange. So calls of
    different names overlap; a call waits for the one before of the same name if the scheme keeps
    memory, which both of them read and write.
    """

    def _init(
        self,
        scheme: Scheme,
        seed: int,
        history: int,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super()._init(scheme, seed, history, process_group)
        self._tensors = self._binding.parameters = NamedTensors()
        self._steps: dict[str, int] = {}  # of the next call of each name
        self._numbers: dict[str, int] = {}  # of each name, in the ledger
        self._first_step = 0  # of a name that is new
        self._pending: list[tuple[str, Future[Tensor]]] = []
        self._drivers.ensure(_rounds(scheme))

    def _bind(self) -> None:
        group = self._binding.group()
        self._engine.rank, self._engine.world_size = group.rank(), group.size()

    def run(self, call: Call, name: str | None, async_op: bool) -> Handle | None:
        """Makes a call, and waits for its end unless ``async_op``."""
        if self._closed:
            raise RegistrationError(f"Collectives.{call.kind}: it was closed; make another")
        self._bind()
        call.check(self._engine.world_size)
        call.need(self.scheme)
        handle = Handle(self._start(call, self._named(call, name)))
        if async_op:
            return handle
        handle.wait()
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
        return "tensor" if name is None else name

    def _start(self, call: Call, name: str) -> Future[Tensor]:
        if not call.given.numel():  # on every rank, so that nobody waits for it
            future: Future[Tensor] = Future()
            future.set_result(call.into)
            return future
        device, keeps = call.given.device, self._engine.keeps_memory
        if not self._agreed:
            self._binding.also_devices.add(device.type)
            self.agree(f"Collectives.{call.kind}, the first call or the first after loading")
        if keeps:
            self._wait(future for other, future in self._pending if other == name)
            self._drivers.join()
        self._pending = [one for one in self._pending if not one[1].done()]
        number = self._numbers.setdefault(name, len(self._numbers))
        at = self._steps.get(name, self._first_step)
        self._steps[name] = at + 1
        self._engine.step = max(self._engine.step, at + 1)
        engine, agree = self._engine.at(at), keeps and call.kind == "reduce_scatter"
        step = Step(at, self._binding.group(), holds=False, timed=self.ledger.times(at))
        step.clock = clock_of(device, timed=step.timed)
        layout = Layout([name], [call.given.shape])
        future = Exchanges(engine, self._drivers, self.ledger).start(
            step,
            self._counted(engine, call.exchange(engine, layout, number, agree=agree)),
            bucket=number,
            dense_bytes=call.given.nbytes,
            device=device,
            is_last=True,
            further_rounds=int(agree),
        )
        self.ledger.launched_last(at, step.clock.now())
        self._attendance.calls += 1
        self._pending.append((name, future))
        return future

    def _counted(self, engine: Engine, exchange: Exchange) -> Exchange:
        result = yield from exchange
        self._engine.skipped += engine.skipped
        return result

    def wait(self) -> None:
        """Waits for all calls that were made with ``async_op=True``; raises if one has failed."""
        pending, self._pending = self._pending, []
        self._wait(future for _, future in pending)

    @staticmethod
    def _wait(futures: Iterable[Future[Tensor]]) -> None:
        for future in futures:
            future.wait()

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

        Needed only to load a state that a hook on a model has saved.

        Raises:
            ValueError: a tensor of this name has another shape or dtype.
        """
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
        steps, tensors = _saved_tensors(state)
        before = self._tensors
        self._tensors = self._binding.parameters = before.and_also(tensors)
        try:
            super().load_state_dict(state, strict=strict)
        except BaseException:
            self._tensors = self._binding.parameters = before
            raise
        self._steps, self._first_step = steps, 0 if steps else self.step

    def saved_plan(self) -> str:
        """Returns names, steps and shapes of the tensors, as JSON."""
        known = {name: (step, self._tensors.described(name)) for name, step in self._steps.items()}
        return json.dumps({"tensors": known})

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


def _rounds(scheme: Scheme) -> int:
    """Returns the number of lanes: one more where ranks agree on what their shards were like."""
    keeps = bool(slots_of(scheme))
    return scheme.traits.rounds + (keeps and scheme.traits.shards)


def _saved_tensors(state: Any) -> tuple[dict[str, int], NamedTensors]:
    """Returns the steps of the tensors that a state names, and those whose shapes it has.

    Raises:
        CheckpointError: the state is none, or these are no tensors.
    """
    plan = read(state, "load_state_dict", verify=False).common.get("plan", "")
    steps, tensors = {}, NamedTensors()
    try:
        # Another text is of a hook that chooses its scheme: it names no tensors.
        for name, (step, known) in json.loads(plan or "{}").get("tensors", {}).items():
            steps[name] = range(MAX_STEP)[step]
            if known is not None:
                shape, dtype = known
                tensors.declare(name, torch.Size(shape), getattr(torch, dtype))
    except (ValueError, TypeError, IndexError, AttributeError) as error:
        raise CheckpointError(
            f"load_state_dict: 'plan' does not describe tensors, got {plan[:80]!r}; damaged"
        ) from error
    return steps, tensors
