"""A run that was killed and resumed equals one that was not; checkpoint formats keep each rank's.

What becomes of the buckets is in ``test_saved_buckets``. A run that asks for buckets of another
size gets them, which matters to sums over three ranks or more (Gloo adds them up in an order that
depends on the place) and to schemes that compress a bucket as a whole.
"""

from __future__ import annotations

import copy
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commhooks
from commhooks.errors import CheckpointError
from ddp_core import DistributedDataParallel as CoreDDP
from tests.tools.harness import Died, on_ranks, run_ranks
from tests.tools.models import loss_of
from tests.tools.training import (
    STATEFUL,
    averaged,
    batch,
    ddp,
    equal_bits,
    everyone,
    gradients,
    mlp,
    parameters,
    residuals,
    sealed,
)

SMALL, LARGE = 2.0, 4.0  # KiB a bucket: one or three of the weights below
KILLED, END = 8, 16  # after so many steps
CONFIGS = {**STATEFUL, "powersgd-late": ("powersgd", {"rank": 2, "start_step": 12})}
CONFIGS["powersgd-started"] = ("powersgd", {"rank": 2, "start_step": 4})
QUIET = ("find_unused",)  # DDP remarks that all parameters are used


class _Run:
    """A model, its momentum optimizer and its hook, that can be saved and loaded."""

    def __init__(
        self, rank: int, config: str, bucket_kb: float = SMALL, fixed: bool = False, seed: int = 5
    ):
        scheme, options = CONFIGS[config]
        self.rank = rank
        self.model = ddp(mlp(), bucket_kb, find_unused_parameters=fixed)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.hook = commhooks.register(self.model, scheme, seed=seed, **options)

    def steps(self, start: int, stop: int) -> None:
        for step in range(start, stop):
            self.optimizer.zero_grad()
            _loss(self.model, step, self.rank).backward()
            self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "hook": self.hook.state_dict(),
        }

    def load(self, state: dict[str, Any], hook_state: Any = None) -> None:
        self.model.module.load_state_dict(state["model"])
        # A copy: the optimizer would update the tensors that it is given.
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self.hook.load_state_dict(state["hook"] if hook_state is None else hook_state)

    def everything(self) -> tuple[Tensor, Tensor, Tensor]:
        """Weights, momentum and residuals."""
        momentum = [state["momentum_buffer"] for state in self.optimizer.state.values()]
        flat = torch.cat([buffer.reshape(-1) for buffer in momentum])
        return parameters(self.model), flat, residuals(self.hook, self.model)


def _loss(model: torch.nn.Module, step: int, rank: int) -> Tensor:
    inputs = batch(step, rank, 8, 16)
    return (model(inputs) - inputs.roll(1, 1)).square().mean()


def _path(directory: str, rank: int, config: str) -> Path:
    return Path(directory, f"{config}{rank}.pt")


# ---- killed and resumed


def _until_killed(
    rank: int, world_size: int, directory: str, configs: list[str], fixed: bool
) -> None:
    """Saves each run on the way, and at its end."""
    for config in configs:
        run = _Run(rank, config, SMALL, fixed)
        run.steps(0, KILLED)
        state = copy.deepcopy(run.state())
        run.steps(KILLED, END)
        torch.save((state, run.everything()), _path(directory, rank, config))
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def _resumed(
    rank: int, world_size: int, directory: str, configs: list[str], fixed: bool, bucket_kb: float
) -> list[tuple[Any, Any]]:
    """Weights, momentum and residuals of each run that was resumed and of the one that went on."""
    ends = []
    for config in configs:
        state, went_on = torch.load(_path(directory, rank, config))
        run = _Run(rank, config, bucket_kb, fixed, seed=6)  # draws go on with the saved seed
        run.load(state)
        run.steps(KILLED, END)
        ends.append((run.everything(), went_on))
    return ends


def _killed_and_resumed(
    world_size: int, configs: list[str], fixed: bool, sizes: list[float], directory: Path
) -> list[tuple[str, float, list[Any]]]:
    """Returns for each configuration and bucket size what ``_resumed`` has for it, by rank."""
    job = str(directory), configs, fixed
    quiet: dict[str, Any] = {"timeout": 120, "ignore_warnings": QUIET}
    died = run_ranks(_until_killed, world_size, *job, may_die=range(world_size), **quiet)
    assert died == [Died(-signal.SIGKILL)] * world_size
    results = []
    for size in sizes:
        ranks = run_ranks(_resumed, world_size, *job, size, **quiet)
        results += [(c, size, list(ends)) for c, *ends in zip(configs, *ranks, strict=True)]
    return results


# Those that keep different things; tests/fuzz/test_modes.py has all in one process.
_ON_TWO = ["powersgd", "powersgd-started", "fp16-feedback", "acpsgd"]
_ON_THREE = ["powersgd-late", "batched", "topk", "sdp4bit", "onebit_adam"]


# On 2 ranks a sum does not depend on where its entry lies in a message, so the bucket size is no
# part of the arithmetic of schemes that treat each parameter by itself.
@pytest.mark.parametrize(
    ("world_size", "configs", "fixed", "sizes"),
    [(2, _ON_TWO, False, [SMALL, LARGE]), (3, _ON_THREE, True, [SMALL])],
    ids=["two", "three"],
)
def test_kill_and_resume_is_no_interruption_bit_for_bit(
    world_size: int, configs: list[str], fixed: bool, sizes: list[float], tmp_path: Path
) -> None:
    for config, size, ranks in _killed_and_resumed(world_size, configs, fixed, sizes, tmp_path):
        for resumed, went_on in ranks:
            # Residuals of other buckets have the same sum, in another order.
            count = 3 if size == SMALL else 2
            for left, right in zip(resumed[:count], went_on[:count], strict=True):
                assert torch.equal(left, right), (config, size)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "config"), [(2, "batched"), (3, "powersgd")])
def test_resume_with_buckets_that_matter_goes_on_alike(
    world_size: int, config: str, tmp_path: Path
) -> None:
    for _, _, ranks in _killed_and_resumed(world_size, [config], False, [SMALL, LARGE], tmp_path):
        assert equal_bits([resumed[0] for resumed, _ in ranks])
        # Lossy in another way for eight steps, but along the same path.
        (resumed, *_), (went_on, *_) = ranks[0]
        way = torch.linalg.vector_norm(went_on - parameters(mlp()))
        assert torch.linalg.vector_norm(resumed - went_on) < 0.5 * way


# ---- another number of ranks


def _switched_states(rank: int, world_size: int) -> Any:
    model = ddp(mlp(), SMALL)
    hook = commhooks.register(model, "topk", ratio=0.1)
    loss_of(model(batch(0, rank, 4, 16))).backward()
    hook.switch("none")
    return hook.state_dict()


def _goes_on_with_more(rank: int, world_size: int, states: list[Any]) -> None:
    model = ddp(mlp(), SMALL)
    hook = commhooks.register(model, "none")
    hook.load_state_dict(states)
    loss_of(model(batch(1, rank, 4, 16))).backward()
    assert hook.step == 2
    assert hook.state_dict(gather=True)["scheme"] == "Dense()"


def test_a_rank_that_has_nothing_to_flush_is_no_mismatch() -> None:
    states = run_ranks(_switched_states, 2)
    run_ranks(_goes_on_with_more, 3, states)


# ---- formats


def _through_safetensors(run: _Run, directory: str) -> dict[str, Any]:
    import safetensors
    import safetensors.torch

    path = Path(directory, f"rank{run.rank}.safetensors")
    tensors, metadata = commhooks.checkpoint.flatten_state(run.hook.state_dict())
    safetensors.torch.save_file(tensors, path, metadata)
    with safetensors.safe_open(path, "pt") as file:
        loaded = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        return commhooks.checkpoint.unflatten_state(loaded, file.metadata())


def _through_torch(run: _Run, directory: str) -> dict[str, Any]:
    path = _path(directory, run.rank, "hook")
    torch.save({"hook": run.hook.state_dict()}, path)
    state: dict[str, Any] = torch.load(path, weights_only=True)["hook"]
    return state


def _through_dcp(run: _Run, directory: str) -> dict[str, Any]:
    dcp.save({"hook": run.hook.state_dict()}, checkpoint_id=f"{directory}/dcp")
    state = {"hook": _Run(run.rank, "powersgd").hook.state_dict()}
    dcp.load(state, checkpoint_id=f"{directory}/dcp")
    return state["hook"]


FORMATS = {"torch": _through_torch, "safetensors": _through_safetensors, "dcp": _through_dcp}


@on_ranks(2, ignore_warnings=(".*",))  # of dcp's planner and process group
def test_every_format_keeps_each_ranks_own_residuals_on_either_class(
    rank: int, tmp_path: Path
) -> None:
    directory = str(tmp_path)
    run = _Run(rank, "powersgd")
    run.steps(0, 5)
    held, saved = residuals(run.hook, run.model), copy.deepcopy(run.state())
    loaded = {name: through(run, directory) for name, through in FORMATS.items()}
    run.steps(5, 10)
    for name, state in loaded.items():
        resumed = _Run(rank, "powersgd")
        resumed.load({**saved, "hook": state})
        assert torch.equal(held, residuals(resumed.hook, resumed.model)), name
        resumed.steps(5, 10)
        assert torch.equal(parameters(run.model), parameters(resumed.model)), name
    for kinds in ((TorchDDP, CoreDDP), (CoreDDP, TorchDDP)):  # either class loads the other's
        models = [kind(mlp()) for kind in kinds]
        hooks = [commhooks.register(model, "powersgd", rank=1) for model in models]
        loss_of(models[0](batch(0, rank, 4, 16))).backward()
        folder = f"{directory}/{kinds[0].__module__}"
        dcp.save({"hook": hooks[0]}, checkpoint_id=folder)
        dcp.load({"hook": hooks[1]}, checkpoint_id=folder)
        assert hooks[1].step == 1
    assert not torch.equal(*everyone(held))


# ---- memory formats, loading in place, frozen layers


@on_ranks(2, ignore_warnings=("Grad strides",))
def test_a_channels_last_residual_is_saved_in_the_order_of_the_dimensions_and_resumes(
    rank: int,
) -> None:
    def build(memory_format: Any, scheme: str, **options: Any) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = ddp(torch.nn.Conv2d(8, 16, 3).to(memory_format=memory_format))
        return model, commhooks.register(model, scheme, **options)

    def step(model: Any, number: int) -> None:
        model.zero_grad()
        model(batch(number, rank, 2, 8, 6, 6)).square().mean().backward()

    held = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        # Rounding of each entry by itself: the same in either order.
        model, hook = build(memory_format, "fp16", error_feedback=True)
        step(model, 0)
        saved = hook.state_dict()[f"rank{rank}"]["memory"]["residual"]["weight"]
        assert torch.equal(saved, hook.residual("weight"))
        held.append(saved)
    (model, hook), (other, resumed) = (
        build(torch.channels_last, "powersgd", rank=2) for _ in range(2)
    )
    step(model, 0)
    resumed.load_state_dict(hook.state_dict())
    for number in range(1, 4):
        step(model, number)
        step(other, number)
    assert torch.equal(model.module.weight.grad, other.module.weight.grad)
    plain, channels_last = held[0], held[1]
    assert plain.shape == channels_last.shape
    # The two convolutions may round differently, and then so does the cast; not permuted.
    agree = (plain - channels_last).abs() <= 1e-6
    assert agree.double().mean() > 0.9


@on_ranks(2)
def test_loading_in_place_loses_nothing(rank: int) -> None:
    """Applied plus residual over a save and load are the true sum."""
    run = _Run(rank, "powersgd")
    run.optimizer.param_groups[0]["lr"] = 0.0
    total, local = torch.zeros(()), mlp()
    for step in range(3):
        run.steps(step, step + 1)
        total = total + gradients(run.model)
        _loss(local, step, rank).backward()
    state = run.hook.state_dict()
    _loss(run.model, 3, rank).backward()
    run.hook.load_state_dict(state)
    for value in state[f"rank{rank}"]["memory"]["residual"].values():
        value.zero_()  # the caller's
    run.hook.residual("0.weight").zero_()  # a copy
    assert run.hook.report()["step"].max() == 2  # no row of the step that was taken back
    wanted = averaged(gradients(local))
    kept = total + averaged(residuals(run.hook, run.model))
    torch.testing.assert_close(kept, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


@on_ranks(2, ignore_warnings=("Grad strides",))
def test_a_layer_that_is_frozen_for_a_while_keeps_its_memory(rank: int) -> None:
    torch.manual_seed(0)
    first = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    module = torch.nn.Sequential(first, torch.nn.Tanh(), torch.nn.Conv2d(8, 4, 3))

    def trained_on(state: Any) -> commhooks.HookState:
        model = ddp(module)
        hook = commhooks.register(model, "powersgd", rank=1)
        if state is not None:
            frozen = not first.weight.requires_grad and rank == 0
            warns = pytest.warns(RuntimeWarning, match=r"frozen now: 0.weight\. It is not sent")
            with warns if frozen else nullcontext():
                hook.load_state_dict(state)
            assert torch.equal(hook.residual("0.weight"), left)
        model(batch(0, rank, 2, 3, 9, 9)).square().mean().backward()
        return hook

    hook = trained_on(None)
    left: Any = hook.residual("0.weight")
    assert left.shape == first.weight.shape
    assert left.any()
    first.requires_grad_(False)
    hook = trained_on(hook.state_dict(gather=True))
    assert torch.equal(hook.residual("0.weight"), left)
    first.requires_grad_(True)
    hook = trained_on(hook.state_dict(gather=True))
    assert not torch.equal(hook.residual("0.weight"), left)


@on_ranks(1)
def test_memory_of_the_step_of_a_state_is_complete() -> None:
    """A schedule keeps other memory at the step of the state than at the hook's."""
    scheme = commhooks.wrappers.Schedule(
        [(0, commhooks.make("none")), (2, commhooks.schemes.PowerSGD(rank=1))]
    )
    model = ddp(mlp())
    hook = commhooks.register(model, scheme, error_feedback=False)
    for step in range(3):
        _loss(model, step, 0).backward()
    state = hook.state_dict()
    state["rank0"]["memory"] = {}
    hook = commhooks.register(ddp(mlp()), scheme, error_feedback=False)
    with pytest.raises(CheckpointError, match="powersgd"):
        hook.load_state_dict(sealed(state))


@on_ranks(1)
def test_a_summary_after_a_load_counts_from_the_step_of_the_state() -> None:
    model = ddp(mlp())
    hook = commhooks.register(model, "int8")
    _loss(model, 0, 0).backward()
    state = hook.state_dict()
    _loss(model, 1, 0).backward()
    hook.switch("int8")
    hook.load_state_dict(state)
    _loss(model, 1, 0).backward()
    assert "nothing has been exchanged" not in hook.summary()
