"""Modules of frameworks: the part that they share, and their use of published attributes.

The frameworks themselves are in tests/frameworks; stand-ins here have the attributes that the
modules read, so that these tests run everywhere.
"""

from __future__ import annotations

import gc
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.nn.parallel import DistributedDataParallel

from commhooks.errors import CheckpointError, MissingPackageError, RegistrationError
from commhooks.hosts import accelerate, fabric, ray
from commhooks.hosts._framework_hook import FrameworkHook
from commhooks.hosts.megatron import ReduceScatter
from tests.tools.harness import on_ranks
from tests.tools.training import same, train


def wrapped() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)))


def error_of(call: Any, kind: type[Exception] = RegistrationError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


# ---- state


@on_ranks(2)
def test_rank_0_has_the_state_of_all_and_everyone_goes_on_from_it(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    folder = str(tmp_path)
    model, host = wrapped(), FrameworkHook("topk", ratio=0.1)
    host._attach(model, world_size)
    train(model, rank, range(4), lr=0.01, width=8)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    host.save(folder)
    state = host.state_dict()
    assert bool(state) == (rank == 0)
    if rank == 0:
        assert {"rank0", "rank1"} <= set(state)
    expected = train(model, rank, range(4, 8), lr=0.01, width=8)
    dist.barrier()

    for loads_first in (True, False):
        model, host = wrapped(), FrameworkHook("topk", ratio=0.1)
        model.load_state_dict(weights)
        if loads_first:  # as Lightning: callbacks are restored before the model is wrapped
            host.load(folder)
            assert host.state_dict()["step"] == 4  # and saved again, if nothing trains
        host._attach(model, world_size)
        if not loads_first:
            host.load(folder)
        assert host.hook.step == 4
        assert same(train(model, rank, range(4, 8), lr=0.01, width=8), expected)


@on_ranks(2)
def test_every_rank_has_the_state_where_each_node_saves_a_copy(world_size: int) -> None:
    project = SimpleNamespace(save_on_each_node=True)
    accelerator = SimpleNamespace(
        ddp_handler=None, project_configuration=project, num_processes=world_size,
        register_for_checkpointing=lambda value: None,
    )  # fmt: skip
    comm = accelerate.CommHook("topk").attach(accelerator, wrapped())
    assert sorted(key for key in comm.state_dict() if key.startswith("rank")) == ["rank0", "rank1"]


# ---- what is refused


@on_ranks(2)
def test_a_hook_that_would_not_run_or_not_be_saved_is_an_error(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    folder = str(tmp_path)
    host = FrameworkHook("topk", ratio=0.1)
    assert "nothing is registered yet" in error_of(lambda: host.hook)
    assert "would never run: wrap the model" in error_of(lambda: host._attach(nn.Linear(2, 2), 2))
    assert "the state is empty" in error_of(lambda: host.load_state_dict({}), CheckpointError)
    assert "saved without this hook" in error_of(lambda: host.load(folder), CheckpointError)

    group = dist.new_group([rank], use_local_synchronization=True)
    alone = DistributedDataParallel(nn.Linear(2, 2), process_group=group)
    message = error_of(lambda: host._attach(alone, world_size))
    assert "has 2 ranks and gradients are averaged over 1 of them" in message
    assert not alone._comm_hooks
    # Registered for training by groups is what the option asks for, not the model.
    grouped = FrameworkHook("none", process_group=group)
    assert "over 1 of them" in error_of(lambda: grouped._attach(wrapped(), world_size))


@on_ranks(2)
def test_a_second_run_has_a_hook_of_its_own(rank: int, world_size: int) -> None:
    host = FrameworkHook("int8")
    with pytest.warns(RuntimeWarning, match="there is one process"):
        host._attach(nn.Linear(2, 2), 1)  # a run in one process comes before
    host._attach(wrapped(), world_size)
    first = host.hook
    model = wrapped()
    host._attach(model, world_size)
    assert first._closed
    assert host.hook is not first
    train(model, rank, range(2), width=8)
    assert host.hook.step == 2
    assert host.metrics()["comm/wire_bytes"] > 0


@pytest.mark.parametrize(
    ("scheme", "options"), [("topk", {"ratio": 0.1, "verify": 5}), ("auto", {"max_error": 0.1})]
)
def test_in_one_process_a_warning_says_that_nothing_is_exchanged(
    tmp_path: Path, scheme: str, options: dict[str, Any]
) -> None:
    model, host = nn.Linear(2, 2), FrameworkHook(scheme, **options)
    with pytest.warns(RuntimeWarning, match="there is one process") as caught:
        [host._attach(model, 1) for _ in range(2)]  # of two runs
    assert len(caught) == 1
    assert (host.hook.step, host.metrics()) == (0, {})
    assert "nothing has been exchanged" in host.hook.summary()
    host.save(tmp_path)
    later = FrameworkHook("topk", ratio=0.1)
    later.load(tmp_path)  # of several processes: there is nothing to restore
    assert later.state_dict() == {}
    # What a job of several ranks has saved goes through a job of one process.
    host.load_state_dict({"step": 4})
    assert host.state_dict() == {"step": 4}


def test_wrong_arguments_show_the_right_call() -> None:
    model, other = nn.Linear(2, 2), SimpleNamespace(world_size=2, ddp_handler=None)
    for call in (
        lambda: fabric.CommHook(other),
        lambda: fabric.CommHook("int8").attach(model, other),
        lambda: fabric.CommHook("int8").attach(model),
        lambda: accelerate.CommHook("int8").attach(),
        lambda: ray.CommHook("int8").attach(model, model),
        lambda: accelerate.CommHook("int8").attach(model, other),
        lambda: ray.CommHook("int8").attach(other),
    ):
        with pytest.raises(TypeError, match=r'Call CommHook\("int8"\).attach\('):
            call()
    with pytest.raises(TypeError, match=r'has no attach, .* Call CommHook\("int8"\)$'):
        FrameworkHook("int8").attach(model)  # as Lightning's, which registers by itself


def test_no_process_group_is_an_error() -> None:
    assert "training function of a TorchTrainer" in error_of(
        lambda: ray.CommHook().attach(nn.Linear(1, 1))
    )


@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_a_framework_that_is_missing_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"commhooks.hosts.{name}", raising=False)
    with pytest.raises(MissingPackageError, match=rf"commhooks.hosts.{name} needs {name}"):
        __import__(f"commhooks.hosts.{name}")


# ---- attributes of frameworks


@on_ranks(2)
def test_fabric_accelerate_and_ray_are_asked_for_what_they_have(world_size: int) -> None:
    comm = fabric.CommHook("int8").attach(
        SimpleNamespace(world_size=world_size), nn.Sequential(wrapped())
    )
    assert comm.hook.world_size == world_size
    ray.CommHook("int8").attach(wrapped())

    objects: list[Any] = []
    accelerator = SimpleNamespace(
        ddp_handler=SimpleNamespace(comm_hook=SimpleNamespace(value="no")),
        project_configuration=SimpleNamespace(save_on_each_node=False),
        num_processes=world_size,
        register_for_checkpointing=objects.append,
    )
    comm = accelerate.CommHook("int8").attach(accelerator, wrapped())
    assert objects == [comm]
    for given in (SimpleNamespace(value="power_sgd"), print):
        accelerator.ddp_handler.comm_hook = given
        message = error_of(lambda: accelerate.CommHook("int8").attach(accelerator, wrapped()))
        assert "Accelerate registers the members of its own enum" in message


def _module(name: str, **members: Any) -> None:
    sys.modules[name] = made = ModuleType(name)
    vars(made).update(members)


@on_ranks(2)
def test_lightning_by_what_it_has_published(rank: int, world_size: int) -> None:
    _module("lightning")
    _module("lightning.pytorch", Callback=type("Callback", (), {}))
    strategy_class = type("DDPStrategy", (), {"determine_ddp_device_ids": lambda self: None})
    _module("lightning.pytorch.strategies", DDPStrategy=strategy_class)
    from commhooks.hosts.lightning import CommHook, CoreDDPStrategy
    from ddp_core import DistributedDataParallel as CoreDDP

    rows: list[tuple[int, dict[str, float]]] = []
    logger = SimpleNamespace(log_metrics=lambda metrics, step: rows.append((step, metrics)))
    strategy = CoreDDPStrategy()
    strategy._ddp_kwargs, strategy._ddp_comm_hook = {"bucket_cap_mb": 1}, None
    strategy.model = model = strategy._setup_model(nn.Sequential(nn.Linear(8, 4)))
    assert isinstance(model, CoreDDP)
    trainer = SimpleNamespace(
        strategy=strategy,
        world_size=world_size,
        global_step=0,
        log_every_n_steps=2,
        loggers=[logger],
    )
    comm = CommHook("int8")
    comm.setup(trainer, None, "fit")
    comm.on_fit_start(trainer, None)
    for step in range(4):
        train(model, rank, [step], width=8)
        trainer.global_step += 1
        comm.on_train_batch_end(trainer, None, None, None, step)
    assert comm.hook.step == 4
    assert [step for step, _ in rows] == [2, 4]
    assert rows[0][1]["comm/payload_bytes"] > 0

    strategy._ddp_comm_hook = print
    CommHook("int8").setup(trainer, None, "validate")
    assert "takes one hook" in error_of(lambda: CommHook("int8").setup(trainer, None, "fit"))


@on_ranks(2)
def test_transformers_by_what_it_has_published(rank: int, world_size: int, tmp_path: Path) -> None:
    folder = str(tmp_path)
    _module("transformers", TrainerCallback=type("TrainerCallback", (), {}))
    from commhooks.hosts.transformers import CommHook

    def trainer(model: nn.Module, output: str) -> Any:
        args = SimpleNamespace(
            output_dir=f"{folder}/{output}", world_size=world_size, save_only_model=False,
            save_on_each_node=False,
        )  # fmt: skip
        logged: list[dict[str, float]] = []
        return SimpleNamespace(
            args=args, model_wrapped=model, callbacks=[], logged=logged, log=logged.append,
            add_callback=lambda value: None,
        )  # fmt: skip

    def begun(trainer: Any, state: Any, **options: Any) -> Any:
        comm = CommHook("topk", ratio=0.1, **options).attach(trainer)
        comm.on_train_begin(trainer.args, state, None, model=None)
        return comm

    model = wrapped()
    first, state = trainer(model, "a"), SimpleNamespace(global_step=0, stateful_callbacks={})
    comm = begun(first, state)
    for step in range(4):
        train(model, rank, [step], width=8)
        state.global_step += 1
        comm.on_step_end(first.args, state, SimpleNamespace(should_log=step == 2))
    assert len(first.logged) == 1
    assert "comm/wire_bytes" in first.logged[0]
    checkpoint = Path(folder, "a", "checkpoint-4")
    checkpoint.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    comm.on_save(first.args, state, None)
    dist.barrier()
    # The Trainer restores its state from rank 0's file.
    saved = [dict(state.stateful_callbacks)]
    dist.broadcast_object_list(saved, 0)

    def restored() -> Any:
        return SimpleNamespace(global_step=4, stateful_callbacks=dict(saved[0]))

    after = restored()
    assert begun(trainer(wrapped(), "a"), after).hook.step == 4
    assert after.stateful_callbacks != saved[0]  # each run has a name of its own
    elsewhere = trainer(wrapped(), "b")
    message = error_of(lambda: begun(elsewhere, restored()), CheckpointError)
    assert "checkpoint-4" in message
    resumed = begun(trainer(wrapped(), "b"), restored(), resume_from=checkpoint)
    assert resumed.hook.step == 4
    # Another run's checkpoint of this step has a file of another name.
    saved[0]["commhooks"] = {"file": "commhooks-00000000.pt"}
    error_of(lambda: begun(trainer(wrapped(), "a"), restored()), CheckpointError)
    # Only the model: nobody could resume from it.
    first.args.save_only_model, first.args.output_dir = True, f"{folder}/nowhere"
    comm.on_save(first.args, state, None)


# ---- Megatron-Core, by the signature of its reduce_scatter_with_fp32_accumulation


@on_ranks(2)
def test_megatrons_function_sums_inside_its_coalescing_manager(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    whole = torch.randn(5000, generator=torch.Generator().manual_seed(rank))
    total = whole.clone()
    dist.all_reduce(total)
    wanted = total.chunk(world_size)[rank]
    for name, allowed in {"none": 0.0, "bf16": 0.01, "int8": 0.02}.items():
        call = ReduceScatter(name)
        for async_op in (False, True):
            buffer = whole.clone()
            part = buffer.chunk(world_size)[rank]  # Megatron-Core's part is a view of the whole
            with _coalescing_manager(group, async_ops=async_op):
                handle = call(part, buffer, op=dist.ReduceOp.SUM, group=group, async_op=async_op)
            if async_op:
                handle.wait()
            assert float((part - wanted).norm() / wanted.norm()) <= allowed, (name, async_op)
    error_of(lambda: call(part, whole, dist.ReduceOp.MAX, None, False), ValueError)
    error_of(lambda: call(part, whole[:6], dist.ReduceOp.SUM, None, False), ValueError)


@pytest.mark.parametrize("called", [False, True])
def test_megatrons_function_warns_at_the_end_if_it_was_never_called(
    called: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call = ReduceScatter("int8")
        if called:
            with pytest.raises(Exception, match="process group"):
                call(torch.ones(2), torch.ones(4), dist.ReduceOp.SUM, None, False)
        del call
        gc.collect()
    messages = [
        str(warning.message) for warning in caught if "never called" in str(warning.message)
    ]
    assert len(messages) == (not called)
    if messages:
        assert "ReduceScatter(" in messages[0]
        assert "before DistributedDataParallel is made" in messages[0]


def test_megatron_is_given_no_scheme_that_needs_names_or_whole_buckets() -> None:
    assert "keeps state" in error_of(lambda: ReduceScatter("int4"))
    assert "averages whole" in error_of(lambda: ReduceScatter("random_k", error_feedback=False))
