"""``commhooks.ddp_comm_hooks`` has torch's modules, names and arguments."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from types import ModuleType
from typing import Any

import pytest
import torch.distributed.algorithms.ddp_comm_hooks as torchs

import commhooks
from commhooks import classic, ddp_comm_hooks

PRIVATE = {"optimizer_overlap_hooks": ["_OptimizerHookState", "_hook_then_optimizer"]}
# Only torch's own class uses it, with its own reducer.
NOT_HERE = {"mixed_precision_hooks"}
MODULES = sorted({module.name for module in pkgutil.iter_modules(torchs.__path__)} - NOT_HERE)


def torch_module(name: str) -> ModuleType:
    return importlib.import_module(f"{torchs.__name__}.{name}" if name else torchs.__name__)


def our_module(name: str) -> ModuleType:
    return importlib.import_module(f"commhooks.ddp_comm_hooks.{name}".rstrip("."))


def public(module: ModuleType) -> list[str]:
    """Names that a module declares or, if it declares none, defines."""
    if getattr(module, "__all__", None):
        return list(module.__all__)
    members = inspect.getmembers(
        module, lambda member: inspect.isclass(member) or inspect.isroutine(member)
    )
    return [
        name for name, member in members if member.__module__ == module.__name__ and name[0] != "_"
    ]


def parameters(function: Any) -> list[Any]:
    declared = inspect.signature(function).parameters.values()
    return [(member.name, member.kind, member.default) for member in declared]


@pytest.mark.parametrize("module", ["", *MODULES])
def test_every_name_of_torchs_module_is_here_with_its_arguments(module: str) -> None:
    original, replacement = torch_module(module), our_module(module)
    names = [*public(original), *PRIVATE.get(module, [])]
    assert names
    for name in names:
        their, our = getattr(original, name), getattr(replacement, name)
        assert inspect.isclass(their) == inspect.isclass(our), name
        assert parameters(our) == parameters(their), name
        for method, member in inspect.getmembers(their, inspect.isfunction):
            if method[0] != "_" and inspect.isclass(their):
                assert parameters(getattr(our, method)) == parameters(member), f"{name}.{method}"


def test_names_of_the_package_are_those_of_the_modules() -> None:
    modules = [our_module(name) for name in MODULES]
    for name in classic.__all__:
        assert any(getattr(module, name, None) is getattr(classic, name) for module in modules)


def test_what_is_left_out_has_no_public_name() -> None:
    assert [name for module in NOT_HERE for name in public(torch_module(module))] == []


@pytest.mark.parametrize("name", ["PowerSGDState", "PostLocalSGDState"])
def test_a_state_has_the_attributes_of_torchs_and_no_others(name: str) -> None:
    module = "powerSGD_hook" if name == "PowerSGDState" else "post_localSGD_hook"
    required = {"process_group": None, "subgroup": None, "start_localSGD_iter": 3}
    state_class = getattr(our_module(module), name)
    taken = inspect.signature(state_class).parameters
    state = state_class(**{key: value for key, value in required.items() if key in taken})
    for attribute in getattr(torch_module(module), name).__slots__:
        getattr(state, attribute)
    for setting in taken:
        setattr(state, setting, getattr(state, setting))
    assert state.iter == 0
    with pytest.raises(AttributeError):
        state.start_powerSGD_itr = 5


def test_the_types_of_hooks_are_torchs() -> None:
    torch_members = torchs.DDPCommHookType.__members__
    members = ddp_comm_hooks.DDPCommHookType.__members__
    assert list(members) == list(torch_members)
    for name, member in torch_members.items():
        for key, value in member.value.keywords.items():
            default = members[name].value.keywords[key]
            assert default == (getattr(commhooks, value.__name__) if key == "comm_hook" else value)


def test_a_type_of_torchs_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"commhooks\.ddp_comm_hooks\.DDPCommHookType, got torch"):
        ddp_comm_hooks.register_ddp_comm_hook(torchs.DDPCommHookType.NOOP, None)  # type: ignore[arg-type]


def test_the_package_still_has_the_functions_themselves() -> None:
    from commhooks import post_localSGD_hook, powerSGD_hook
    from commhooks.ddp_comm_hooks import powerSGD_hook as module

    assert callable(powerSGD_hook)
    assert callable(post_localSGD_hook)
    assert module.powerSGD_hook is powerSGD_hook


@pytest.mark.parametrize("name", ["error_dict", "q_memory_dict", "p_memory_dict"])
def test_memory_under_torchs_names_is_to_be_read(name: str) -> None:
    state = commhooks.PowerSGDState(None)
    assert dict(getattr(state, name)) == {}
    with pytest.raises(TypeError):
        getattr(state, name)["0.weight"] = None
    with pytest.raises(AttributeError):
        setattr(state, name, {})
