"""Training loops of many shapes, by name: ``shapes.py SHAPE STEPS``, under torchrun."""

import importlib
import itertools
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def net(width=32):
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


def data(width=32):
    return torch.randn(8, width)


def step(ddp, optimizer, loss=None):
    optimizer.zero_grad()
    (ddp(data()).square().mean() if loss is None else loss).backward()
    optimizer.step()


def sgd(ddp):
    return torch.optim.SGD(ddp.parameters(), lr=0.01)


def train(ddp, steps, loss=None):
    """Steps on random data, of a loss that is computed by the function ``loss``."""
    optimizer = sgd(ddp)
    for _ in range(steps):
        step(ddp, optimizer, None if loss is None else loss())


def trainer(steps):
    """Epochs over a sampled data set, with an evaluation and a line after each."""
    ddp, inputs = DDP(net(512)), TensorDataset(torch.randn(512, 512))
    optimizer = sgd(ddp)
    loader = DataLoader(inputs, batch_size=32, sampler=DistributedSampler(inputs))
    for epoch in range(steps // len(loader)):
        loader.sampler.set_epoch(epoch)
        for (batch,) in loader:
            step(ddp, optimizer, ddp(batch).square().mean())
        ddp.eval()
        with torch.no_grad():
            loss = ddp(inputs[:32][0]).square().mean()
        ddp.train()
        print(f"epoch {epoch} | loss {loss:.4f}")


def amp(steps):
    ddp = DDP(net())
    optimizer, scaler = sgd(ddp), torch.amp.GradScaler("cpu")
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = ddp(data()).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def no_sync(steps):
    ddp = DDP(net())
    optimizer = sgd(ddp)
    for _ in range(steps):
        optimizer.zero_grad()
        with ddp.no_sync():
            ddp(data()).square().mean().backward()
        ddp(data()).square().mean().backward()
        optimizer.step()


def workers(steps):
    ddp = DDP(net())
    optimizer = sgd(ddp)
    loader = DataLoader(TensorDataset(torch.randn(16 * steps, 32)), batch_size=16, num_workers=1)
    for (batch,) in loader:
        step(ddp, optimizer, ddp(batch).square().mean())


def several_models(steps):
    generator, critic = DDP(net()), DDP(net())
    optimizers = sgd(generator), sgd(critic)
    for _ in range(steps):
        step(critic, optimizers[1], critic(generator(data()).detach()).square().mean())
        step(generator, optimizers[0])


def several_groups(steps):
    """Models of other groups of ranks: each rank has one of its own that nobody else has."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    alone_model, shared = DDP(net(), process_group=alone), DDP(net())
    optimizers = sgd(alone_model), sgd(shared)
    for _ in range(steps):
        step(alone_model, optimizers[0])
        step(shared, optimizers[1])


def closure(steps):
    ddp = DDP(net())
    optimizer = torch.optim.LBFGS(ddp.parameters(), lr=0.1, max_iter=3, tolerance_change=0)

    def evaluate():
        optimizer.zero_grad()
        loss = ddp(torch.ones(8, 32)).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(evaluate)


def evaluates(steps):
    """Evaluates on rank 0 alone, through the module, and on all with gradients switched off."""
    ddp = DDP(net())
    optimizer = sgd(ddp)
    for number in range(steps):
        step(ddp, optimizer)
        if number % 5 == 0:
            ddp.eval()
            with torch.no_grad():
                ddp(data())
                if dist.get_rank() == 0:
                    ddp(data())
                    ddp.module(data())
            ddp.train()


def own_hook(steps):
    ddp = DDP(net())
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train(ddp, steps)


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(net() for _ in range(3))
        self.calls = itertools.count()

    def forward(self, inputs):
        return self.parts[next(self.calls) % 2](inputs)


def two_backwards(steps):
    """Two synchronised passes a step: accumulation by who has not heard of no_sync."""
    ddp = DDP(net())
    optimizer = sgd(ddp)
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(2):
            ddp(data()).square().mean().backward()
        optimizer.step()


def joins(steps):
    """Rank 1 has fewer batches."""
    ddp = DDP(net())
    optimizer = sgd(ddp)
    with ddp.join():
        for _ in range(steps - 5 * dist.get_rank()):
            step(ddp, optimizer)


def overlapped(steps):
    """The optimizer runs in backward, through hooks of the parameters."""
    ddp = DDP(net())
    for p in ddp.parameters():
        optimizer = torch.optim.SGD([p], lr=0.01)
        p.register_post_accumulate_grad_hook(lambda _, stepped=optimizer: stepped.step())
    for _ in range(steps):
        ddp(data()).square().mean().backward()


class Subclass(DDP):
    def __init__(self, module):
        super().__init__(module)
        self.calls = 0

    def forward(self, *inputs):
        self.calls += 1
        return super().forward(*inputs)


def late_hook(steps):
    """Registers a hook after some steps."""
    ddp = DDP(net())
    optimizer = sgd(ddp)
    for number in range(steps):
        step(ddp, optimizer)
        if number == 3:
            ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)


def rebuilt(steps):
    """Wraps the model again after some epochs, as who unfreezes layers does."""
    module = net()
    for _ in range(steps // 20):
        train(DDP(module), 20)


def only_evaluates(steps):
    ddp = DDP(net()).eval()
    for _ in range(steps):
        ddp(data())


class Saves(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = net()

    def forward(self, inputs):
        return checkpoint(self.inner, inputs, use_reentrant=False)


class Named(Saves):
    def forward(self, *, inputs):
        return {"loss": self.inner(inputs).square().mean()}


# Shapes that differ in the model that is trained.
MODELS = {
    "plain": lambda: DDP(net()),
    "unused": lambda: DDP(Unused(), find_unused_parameters=True, bucket_cap_mb=0.005),
    "static_graph": lambda: DDP(net(), static_graph=True, gradient_as_bucket_view=True),
    "compiled": lambda: torch.compile(DDP(net()), backend="eager"),
    "subclass": lambda: Subclass(net()),
    "ours": lambda: importlib.import_module("ddp_core").DistributedDataParallel(net()),
    "replicated": lambda: replicate(net()),
    "checkpointed": lambda: DDP(Saves()),
    # Fine-tunes with dropout and batch normalisation as in evaluation.
    "trains_in_eval_mode": lambda: DDP(net()).eval(),
}
# And in the loss: two forward passes before the backward pass of both, as contrastive losses have
# it; sparse gradients, which no hook gets, beside a dense layer; the module inside is called.
LOSSES = {
    "two_forwards": (net, lambda ddp: (ddp(data()) - ddp(data())).square().mean()),
    "sparse": (
        lambda: nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Linear(8, 8)),
        lambda ddp: ddp(torch.randint(50, (8,))).square().mean(),
    ),
    "doubles": (lambda: net().double(), lambda ddp: ddp(data().double()).square().mean()),
    "kwargs_only": (Named, lambda ddp: ddp(inputs=data())["loss"]),
    "around_the_wrapper": (net, lambda ddp: ddp.module(data()).square().mean()),
}


def run(shape, steps):
    if shape in MODELS:
        train(MODELS[shape](), steps)
    elif shape in LOSSES:
        build, loss = LOSSES[shape]
        ddp = DDP(build())
        train(ddp, steps, lambda: loss(ddp))
    else:
        globals()[shape](steps)


def fails(steps):
    run("plain", 13)
    raise ArithmeticError("the loss is no number")


def exits(steps):
    run("plain", 12)
    sys.exit(5)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(sys.argv[1], int(sys.argv[2]))
    print("the script has ended")
    dist.destroy_process_group()
