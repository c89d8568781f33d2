"""Torch's defaults, which scripts change: the type and the device of new tensors."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import commhooks
from commhooks.research._laws import gradients, ranks_of
from tests.shelf import BUILT_IN

ROOT = Path(__file__).parents[2]
PACKAGES = ["core", "hook", "hosts", "schemes", "wrappers"]
FOLDERS = ["ddp_core", "kernels", *(f"commhooks/{package}" for package in PACKAGES)]
FLOATS = {"empty", "full", "linspace", "ones", "rand", "randn", "zeros"}
INTEGERS = {"arange", "randint", "randperm", "tensor"}  # no default for what is given integers


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_scheme_does_not_depend_on_the_default_device(name: str) -> None:
    """On ``meta`` tensors have no values: one that is made there by default ends the step."""
    results = []
    for device in (None, "meta"):
        grads = [gradients(2, step) for step in range(2)]
        torch.set_default_device(device)
        try:
            ranks = ranks_of(commhooks.make(name), 2)
            results.append([ranks.step(of_step)[0] for of_step in grads])
        finally:
            torch.set_default_device(None)
    assert all(torch.equal(*means) for means in zip(*results, strict=True))


def unnamed(path: Path) -> list[str]:
    """Calls that leave the type or the device of a new tensor to torch's defaults."""
    calls = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if ast.unparse(node.func.value) != "torch" or node.func.attr not in FLOATS | INTEGERS:
            continue
        given = {keyword.arg for keyword in node.keywords}
        if "device" not in given or (node.func.attr in FLOATS and "dtype" not in given):
            calls.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    return calls


@pytest.mark.parametrize("folder", FOLDERS)
def test_new_tensors_name_their_type_and_device(folder: str) -> None:
    """A kernel would write float32 into memory of another type: no test on a CPU shows it."""
    assert not [call for path in (ROOT / folder).rglob("*.py") for call in unnamed(path)]
