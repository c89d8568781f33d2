"""The pages whose lines all ranks run, on two real ranks with one file between them."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import re
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
import ddp_core
from tests.tools.harness import on_ranks, run_ranks

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def _runs(rank: int, world_size: int, page: str, directory: str) -> bool:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))
    ddp_model = DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.01)
    torch.manual_seed(rank)

    def loss_of_batch() -> Any:
        return ddp_model(torch.randn(8, 64)).square().mean()

    def train(model: Any, steps: int = 3) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of_batch().backward()
            optimizer.step()

    tempfile.tempdir = directory
    names = {
        "commhooks": commhooks,
        "torch": torch,
        "dist": torch.distributed,
        "ddp_model": ddp_model,
        "optimizer": optimizer,
        "loss_of_batch": loss_of_batch,
        "train": train,
        "path": f"{directory}/checkpoint.pt",
    }
    code = "\n".join(BLOCK.findall((ROOT / page).read_text()))
    exec(compile(code, page, "exec"), names)
    return True


@pytest.mark.parametrize(
    "page",
    ["README.md", "docs/quickstart.md", "docs/guides/checkpoint.md", "docs/guides/elastic.md"],
)
def test_a_page_runs_on_two_ranks(page, tmp_path):
    assert run_ranks(_runs, 2, page, str(tmp_path), ignore_warnings=(".*",)) == [True, True]


@pytest.mark.parametrize("scheme", [None, "none", "int8"])
@pytest.mark.parametrize("host", ["torch", "core"])
@on_ranks(2)
def test_means_over_tokens_are_those_of_all_tokens_at_once(rank, host, scheme):
    """With the lines of the page; the reference is the gradient of all tokens at once."""
    lengths = [[5, 0, 8], [3, 40, 0]]  # by rank; the pass that averages is empty on one of them
    blocks = BLOCK.findall((ROOT / "docs/guides/hold.md").read_text())
    (code,) = [block for block in blocks if "all_reduce(total)" in block]
    draw = torch.Generator().manual_seed(rank)
    batches = [torch.randn(length, 64, generator=draw) for length in lengths[rank]]
    batches.insert(0, torch.zeros(5, 64))  # counts, and its gradient is 0
    net = nn.Sequential(nn.Linear(64, 32, bias=False), nn.ReLU(), nn.Linear(32, 4, bias=False))
    dense = copy.deepcopy(net)
    wrap = DistributedDataParallel if host == "torch" else ddp_core.DistributedDataParallel
    ddp_model = wrap(net)
    if scheme is not None:
        commhooks.register(ddp_model, scheme)
    names = {"torch": torch, "dist": torch.distributed, "contextlib": contextlib}
    names |= {"ddp_model": ddp_model, "micro_batches": batches}
    exec(compile(code, "hold.md", "exec"), names)
    everyone: list[Any] = [None, None]
    torch.distributed.all_gather_object(everyone, torch.cat(batches))
    dense.load_state_dict(net.state_dict())
    dense(torch.cat(everyone)).square().mean(1).mean().backward()
    allowed = 0.05 if scheme == "int8" else 1e-5
    for ours, exact in zip(net.parameters(), dense.parameters(), strict=True):
        assert float((ours.grad - exact.grad).norm() / exact.grad.norm()) < allowed


def _script(rank: int, world_size: int, page: str) -> str:
    """Runs the first script of a page as torchrun would; returns what it printed."""
    port: list[Any] = [None]
    if rank == 0:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = [free.getsockname()[1]]
    torch.distributed.broadcast_object_list(port)
    torch.distributed.destroy_process_group()
    ranks = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank}
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": port[0]}
    os.environ |= {name: str(value) for name, value in (ranks | place).items()}
    code = re.search(r"^```py\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    assert code is not None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code[1], page, "exec"), {"__name__": "__main__"})
    return printed.getvalue()


def test_the_script_of_fsdp_runs_as_it_is():
    printed, _ = run_ranks(_script, 2, "docs/integrations/fsdp.md", ignore_warnings=(".*",))
    assert "int8" in printed
