"""Models of FSDP2 on which no scheme can run, and what the refusals say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_common
from torch.distributed.tensor import Shard

import commhooks
from commhooks._torch import fsdp2_groups
from commhooks.errors import HookNotAttachedError, RegistrationError
from commhooks.fsdp import gather_parameters
from tests.fsdp.test_fsdp2 import backward, model_of, sharded
from tests.tools.harness import on_ranks


def _modules(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


@on_ranks(2)
def test_memory_of_the_process_group_is_refused(rank: int) -> None:
    """FSDP2 takes the memory of its messages from the process group."""
    model = sharded(model_of())
    for module in _modules(model):
        module.set_allocate_memory_from_process_group_for_comm(True)
    text = r"set_allocate_memory_from_process_group_for_comm.* leave that call out"
    with pytest.raises(RegistrationError, match=text):
        commhooks.register(model, "int8")
    with pytest.raises(RegistrationError, match="gathers by ProcessGroupAllocAllGather already"):
        gather_parameters(model)
    for module in _modules(model):
        module.set_allocate_memory_from_process_group_for_comm(False)
    gather_parameters(model)
    hook = commhooks.register(model, "int8")
    backward(model, 0, rank)
    assert hook.step == 1
    # Later torch itself says that there is another reduction.
    with pytest.raises(AssertionError, match="custom"):
        _modules(model)[1].set_allocate_memory_from_process_group_for_comm(True)


@pytest.mark.skipif(
    not hasattr(_fsdp_collectives, "SymmMemReduceScatter"), reason="this torch has no such memory"
)
@on_ranks(2)
def test_symmetric_memory_is_refused() -> None:
    """As ``set_symm_mem_for_comm`` leaves a model, which itself needs GPUs."""
    model = sharded(model_of())
    for module in _modules(model):
        for group in fsdp2_groups(module):
            group._all_gather_comm = object.__new__(_fsdp_collectives.SymmMemAllGather)
    with pytest.raises(RegistrationError, match=r"gathers by SymmMemAllGather .*set_symm_mem"):
        gather_parameters(model)
    for module in _modules(model):
        for group in fsdp2_groups(module):
            group._reduce_scatter_comm = object.__new__(_fsdp_collectives.SymmMemReduceScatter)
    with pytest.raises(RegistrationError, match=r"SymmMemReduceScatter .*or set_symm_mem_for_comm"):
        commhooks.register(model, "int8")


@on_ranks(2)
def test_a_replaced_reduction_is_refused_and_noticed(rank: int) -> None:
    """A reduction of the user's own: before, between nodes, and after ``register``."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(model_of(), mesh["shard"])
    for module in _modules(model):
        module.set_all_reduce_hook(print)
    with pytest.raises(RegistrationError, match=r"FSDP2 reduces by .*print.* already"):
        commhooks.register(model, "int8", replicate_group=mesh["replicate"])
    model = sharded(model_of(), mesh["shard"])
    with pytest.raises(RegistrationError, match="different shards of one replica"):
        commhooks.register(model, "int8", replicate_group=mesh["shard"])
    hook = commhooks.register(model, "none")
    _modules(model)[1].set_custom_reduce_scatter(_fsdp_collectives.DefaultReduceScatter())
    with pytest.raises(HookNotAttachedError, match="another reduction"):
        backward(model, 0, rank)
    assert hook.step == 0


@pytest.mark.skipif(
    not hasattr(_fsdp_common, "ShardPlacementResult"), reason="this torch has one mesh a module"
)
@on_ranks(2)
def test_a_module_on_several_meshes_is_refused() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("one", "two"))
    alone = _fsdp_common.FSDPMeshInfo(mesh["one"], shard_mesh_dim=0)

    def place(parameter: nn.Parameter) -> Any:
        return _fsdp_common.ShardPlacementResult(Shard(0), alone) if parameter.dim() == 1 else None

    model = model_of()
    fully_shard(model[0], mesh=mesh["two"], shard_placement_fn=place)
    fully_shard(model, mesh=mesh["two"])
    text = r"parameters of the FSDP2 module 0 are on several meshes \(shard_placement_fn\)"
    with pytest.raises(RegistrationError, match=f"register: the {text}"):
        commhooks.register(model, "int8")
    with pytest.raises(RegistrationError, match=f"gather_parameters: the {text}"):
        gather_parameters(model)


@on_ranks(2)
def test_modules_that_are_sharded_over_different_ranks_are_refused() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("one", "two"))
    model = model_of()
    fully_shard(model[0], mesh=mesh["one"])
    fully_shard(model, mesh=mesh["two"])
    with pytest.raises(RegistrationError, match=r"register: .* sharded over different ranks"):
        commhooks.register(model, "int8")
    with pytest.raises(RegistrationError, match=r"gather_parameters: .* over different ranks"):
        gather_parameters(model)
    with pytest.raises(RegistrationError, match="sharded over different ranks"):
        commhooks.register(model, "int8", replicate_group=mesh["one"])


@on_ranks(2)
def test_a_mesh_of_two_dimensions_is_refused(rank: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("nodes", "shard"))
    model = sharded(model_of(), mesh["shard"])
    with pytest.raises(RegistrationError, match=r'one dimension, such as mesh\["replicate"\], got'):
        commhooks.register(model, "int8", replicate_group=mesh)


@on_ranks(4)
def test_an_optimizer_of_parameters_that_were_replaced_is_refused(rank: int) -> None:
    """An optimizer keeps parameters that ``assign=True`` has taken out of the model."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for model, options in (
        (sharded(model_of()), {}),
        (sharded(model_of(), mesh["shard"]), {"replicate_group": mesh["replicate"]}),
    ):
        hook = commhooks.register(model, "int8", **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        backward(model, 0, rank)
        optimizer.step()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        backward(model, 1, rank)
        for _ in range(2):
            torch.optim.SGD(model.parameters(), lr=0.1).step()  # another one hides nothing
            with pytest.raises(HookNotAttachedError, match=r"SGD\.step: the model has other param"):
                optimizer.step()
        assert hook.step == 2


@on_ranks(2)
def test_parameters_of_another_dtype_are_an_error_before_the_forward_pass(rank: int) -> None:
    model = sharded(model_of())
    hook = commhooks.register(model, "int8")
    backward(model, 0, rank)
    for convert in (model.double, model[0].bfloat16):
        convert()
        with pytest.raises(HookNotAttachedError, match=r"and were of torch\.float32 when"):
            backward(model, 1, rank)
        model.float()
    backward(model, 1, rank)
    assert hook.step == 2
