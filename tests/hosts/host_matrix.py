"""Runs every scheme on every host, and writes the page that shows them.

``python -m tests.hosts.host_matrix`` writes ``docs/integrations/matrix.md``; a test compares.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import commhooks
import ddp_core
from tests.frameworks.versions import PAGE, section
from tests.hosts.every_host import MODELS, SHARD_CALLS, WHOLE_CALLS
from tests.shelf import BUILT_IN
from tests.tools.harness import run_ranks

STEPS, SUM = 2, dist.ReduceOp.SUM
SKIPPED = {"allreduce"}  # another name of "none"
OPTIONS: dict[str, dict[str, Any]] = {"powersgd": {"rank": 2}, "onebit_adam": {"freeze_step": 1}}


def scheme_names() -> list[str]:
    return [name for name in BUILT_IN if name not in SKIPPED]


def made(name: str) -> Any:
    return commhooks.make(name, **OPTIONS.get(name, {}))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))


def run_steps(net: nn.Module) -> None:
    for step in range(STEPS):
        inputs = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
        net(inputs).square().sum().backward()
        for parameter in net.parameters():
            grad: Any = parameter.grad
            if grad is not None:
                local = grad.to_local() if hasattr(grad, "to_local") else grad
                assert local.isfinite().all()
            parameter.grad = None


# ---- hosts: each runs a scheme for some steps, or raises


def trains(host: str, name: str) -> None:
    run_steps(MODELS[host](made(name), model()))


def reduces(host: str, name: str) -> None:
    call, part = (WHOLE_CALLS | SHARD_CALLS)[host](made(name), SUM), torch.empty(64 * 32)
    for _ in range(STEPS):
        call(_tensor() if host in WHOLE_CALLS else _tensor().view(-1), part)


def gathers(name: str) -> None:
    net, mesh = model(), init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(net[0], mesh=mesh)  # type: ignore[index]
    fully_shard(net, mesh=mesh)
    commhooks.fsdp.gather_parameters(net, name)
    run_steps(net)


def _zero(**options: Any) -> None:
    net = ddp_core.DistributedDataParallel(model())
    optimizer = commhooks.ZeroOptimizer(net, torch.optim.SGD, lr=1e-3, **options)
    for _ in range(STEPS):
        net(torch.ones(8, 32)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def zero(name: str) -> None:
    _zero(scheme=made(name))


def zero_gathers(name: str) -> None:
    _zero(gather=name)


def diloco(name: str) -> None:
    net = model()
    outer = commhooks.DiLoCo(net, made(name), every=1)
    for _ in range(STEPS):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(0.01)
        outer.step()
    outer.close()


def _tensor() -> Tensor:
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(dist.get_rank()))


def all_gather_function(name: str) -> None:
    for _ in range(STEPS):
        whole = torch.empty(dist.get_world_size() * 64 * 64)
        commhooks.all_gather(whole, _tensor().view(-1), made(name))


def all_gather(name: str) -> None:
    calls, ranks = commhooks.Collectives(made(name)), dist.get_world_size()
    for _ in range(STEPS):
        calls.all_gather(torch.empty(ranks * 64 * 64), _tensor().view(-1), "tensor")
    calls.close()


_CALLS = (*WHOLE_CALLS, *SHARD_CALLS)
_RUNS: dict[str, Callable[[str], None]] = {
    **{host: partial(trains, host) for host in MODELS},
    **{host: partial(reduces, host) for host in _CALLS},
    "`ZeroOptimizer`": zero,
    "`gather_parameters` (FSDP2)": gathers,
    "`ZeroOptimizer`, `gather=`": zero_gathers,
    "`DiLoCo`": diloco,
    "`all_gather`": all_gather_function,
    "`Collectives.all_gather`": all_gather,
}
# By table: what runs a scheme there.
TABLES: dict[str, dict[str, Callable[[str], None]]] = {
    "Gradients of a model": {
        host: _RUNS[host] for host in (*MODELS, "`ZeroOptimizer`", "Megatron-Core")
    },
    "Parameters, and tensors of your own": {
        host: _RUNS[host]
        for host in (
            *("`gather_parameters` (FSDP2)", "`ZeroOptimizer`, `gather=`", "`DiLoCo`"),
            *("`all_reduce`", "`reduce_scatter`", "`all_gather`"),
            *(f"`Collectives.{call}`" for call in ("all_reduce", "reduce_scatter", "all_gather")),
        )
    },
}
HOSTS = {host: run for table in TABLES.values() for host, run in table.items()}


def ranks_of(host: str) -> int:
    return 4 if host.startswith("HSDP") else 2


# Why a host refuses a scheme: what its error says, and a few words for the page.
REASONS = {
    "weights": (
        ("different weights",),
        "keeps state, draws random bits or drops entries: forward and backward would not have the "
        "same, or the right, weights",
    ),
    "bits": (("fewer than 4 bits",), "has too few bits for parameters themselves"),
    "coarse": (
        ("would grow",),
        "rounds so coarsely that what is not sent would grow; `eden` runs with 2 bits or more",
    ),
    "whole": (("averages whole",), "exchanges whole buckets, not shards of them"),
    "memory": (("keeps state",), "keeps state, which belongs to tensors with names"),
    "payload": (("no payload", "does not pack"), "has no payload of one rank's tensor alone"),
    "other": (
        ("returns no mean", "something else", "another result"),
        "returns something else than the average, or not the same to all ranks",
    ),
}


def outcomes(rank: int, world_size: int, host: str) -> dict[str, str]:
    """Returns for each scheme "" if it runs, or why the host refuses it."""
    texts = {}
    for name in scheme_names():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                HOSTS[host](name)
            texts[name] = ""
        except (
            commhooks.errors.RegistrationError,
            commhooks.errors.SchemeError,
            ValueError,
        ) as error:
            texts[name] = str(error)
        dist.barrier()
    return texts


def matrix() -> dict[str, dict[str, str]]:
    """Runs all cells; returns reasons by host and scheme, empty where a scheme runs."""
    quiet = (".*",)
    return {
        host: run_ranks(outcomes, ranks_of(host), host, timeout=240, ignore_warnings=quiet)[0]
        for host in HOSTS
    }


def reason_of(text: str) -> str:
    """Returns the key of the reason in the text of an error; "" if it is another one."""
    return next(
        (key for key, (parts, _) in REASONS.items() if any(part in text for part in parts)), ""
    )


def page_of(refusals: dict[str, dict[str, str]]) -> str:
    """Returns the page."""
    keys = list(
        dict.fromkeys(reason_of(text) for row in refusals.values() for text in row.values())
    )
    keys = [key for key in keys if key]
    lines = [
        "# Every scheme in every integration",
        "",
        *section(PAGE.read_text(encoding="utf-8")),
        "",
        "## Schemes",
        "",
        "Each cell was run on the torch of `constraints.txt` ([tested versions]"
        "(../index.md#versions-of-torch)): two ranks (four for HSDP) over Gloo, two steps.",
        "A check mark: it runs.",
        "A number: it is refused when it is registered or called, for this reason:",
        "",
        *(f"{number}. The scheme {REASONS[key][1]}." for number, key in enumerate(keys, 1)),
    ]
    for table, hosts_of_table in TABLES.items():
        lines += [
            "",
            f"### {table}",
            "",
            "| scheme | " + " | ".join(hosts_of_table) + " |",
            "|---|" + "---|" * len(hosts_of_table),
        ]
        for name in scheme_names():
            texts = [refusals[host][name] for host in hosts_of_table]
            cells = [str(keys.index(reason_of(text)) + 1) if text else "✓" for text in texts]
            lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    lines += [
        "",
        "DistributedDataParallel asks a group for sums, FSDP2 for averages, so that `noop` and",
        "`signsgd` run there.",
        "`gather_parameters` and `gather=` were given the name of the scheme, which is then made",
        "without error feedback, and rounds to nearest. Megatron-Core's adapter is called here",
        "as Megatron-Core calls it; a hook of `commhooks.hosts.torchft.register` is one on torch's",
        "DDP.",
        "`python -m tests.hosts.host_matrix` writes this page, and a test compares it with",
        "what runs.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    results = matrix()
    for host, row in results.items():
        for name, text in row.items():
            if text and not reason_of(text):
                print(f"{host}, {name}: {text}")
    PAGE.write_text(page_of(results), encoding="utf-8")
    print(f"wrote {PAGE}")
