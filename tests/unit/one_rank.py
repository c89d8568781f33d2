"""Small models of one rank, and their steps."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_core

KINDS = [DistributedDataParallel, ddp_core.DistributedDataParallel]


def layers(count=3):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(count)))


def run_steps(model, steps=1, value=1.0):
    for _ in range(steps):
        model.zero_grad()
        model(torch.full((2, 8), value, requires_grad=True)).sum().backward()
