"""States of hooks as release 0.1.0.dev (format 2, commit f52c31f) saved them, and what came next.

``python -m tests.checkpoint.old_states`` at that commit wrote ``data/states_of_format_2.pt``: per
scheme the gathered state of two ranks after three steps, and the averages of the fourth.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
import commhooks.research.baselines

FILE = Path(__file__).parent / "data" / "states_of_format_2.pt"
STEPS = 3
SCHEMES: dict[str, dict[str, Any]] = {
    "powersgd": {"rank": 2, "min_compression_rate": 0.5},
    "acpsgd": {"rank": 2, "min_compression_rate": 0.5},
    "batched_powersgd": {"rank": 1},
    "topk": {"ratio": 0.1},
    "onebit": {"wire_dtype": "fp16"},
    "terngrad": {"error_feedback": True},
    "intsgd": {},
    "sdp4bit": {"local_size": 1},
    "dgc": {"ratio": 0.1},
    "demo": {"k": 8},
    "gossip": {},
    "onebit_adam": {"freeze_step": 2},
    "int8": {"start_step": 2, "coalesce": True},
}


class Given(nn.Module):
    """A model whose gradients are its inputs: no machine's arithmetic is in them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(48, 40))
        self.bias = nn.Parameter(torch.zeros(48))

    def forward(self, weight: Tensor, bias: Tensor) -> Tensor:
        """The loss whose gradients these are."""
        return (self.weight * weight).sum() + (self.bias * bias).sum()


def given_gradients(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Numbers with few digits, which no back end rounds on the way."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    weight = torch.randint(-512, 512, (48, 40), generator=generator) / 1024
    return weight, torch.randint(-512, 512, (48,), generator=generator) / 1024


def step(model: DistributedDataParallel, number: int, rank: int) -> Tensor:
    """The averages of one step, flat."""
    model.zero_grad()
    model(*given_gradients(number, rank)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).clone()


def write(rank: int, world_size: int, name: str) -> tuple[Any, Tensor]:
    """Returns the state after three steps, and the averages of the fourth."""
    model = DistributedDataParallel(Given())
    hook = commhooks.register(model, name, **SCHEMES[name])
    for number in range(STEPS):
        step(model, number, rank)
    state = hook.state_dict(gather=True)
    return state, step(model, STEPS, rank)


def go_on(rank: int, world_size: int, name: str) -> Tensor:
    """The averages of the fourth step from the saved state."""
    saved = torch.load(FILE)[name]["state"]
    model = DistributedDataParallel(Given())
    hook = commhooks.register(model, name, **SCHEMES[name])
    hook.load_state_dict(saved)
    return step(model, STEPS, rank)


if __name__ == "__main__":
    from tests.tools.harness import run_ranks

    everything = {}
    for scheme in SCHEMES:
        (state, first), (_, second) = run_ranks(write, 2, scheme)
        everything[scheme] = {"state": state, "averages": [first, second]}
        print(scheme, len(str(state)))
    FILE.parent.mkdir(exist_ok=True)
    torch.save(everything, FILE)
