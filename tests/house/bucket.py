"""Counts what runs for one bucket: a script that prints them as JSON.

``python -m tests.house.bucket CASE ...``
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from types import FrameType
from typing import Any

BEFORE = set(sys.modules)
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
FOLDERS = tuple(os.path.join(ROOT, name) + os.sep for name in ("commhooks", "ddp_core", "kernels"))


class Counter:
    """Counts calls, functions and files of ours, on every thread, and the way to the scheme."""

    def __init__(self) -> None:
        self.active = False
        self.calls = self.frames = 0
        self.functions: set[tuple[str, int]] = set()
        self.files: list[str] = []
        threading.setprofile(self)

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if event != "call" or not self.active:
            return
        file = os.path.realpath(frame.f_code.co_filename)
        if not file.startswith(FOLDERS):
            return
        self.calls += 1
        self.functions.add((file, frame.f_code.co_firstlineno))
        if file not in self.files:
            self.files.append(file)
        if not self.frames and f"{os.sep}schemes{os.sep}" in file:
            above: FrameType | None = frame
            while above is not None:
                self.frames += above.f_code.co_filename.startswith(FOLDERS)
                above = above.f_back


def count(case: str, counter: Counter, world_size: int) -> dict[str, Any]:
    """Runs a few steps of a hook, and counts in the backward pass of the last."""
    import torch
    from torch import nn

    host, _, name = case.partition(":")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    begin = time.perf_counter()
    import commhooks

    imported = time.perf_counter() - begin
    if host == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model: Any = fully_shard(net, mesh=init_device_mesh("cpu", (world_size,)))
    elif host == "ddp_core":
        import ddp_core

        model = ddp_core.DistributedDataParallel(net, bucket_cap_mb=100)
    else:
        model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=100)
    begin = time.perf_counter()
    options: Any = {"rank": 4} if name == "powersgd" else {}
    commhooks.register(model, name, **options)
    inputs = torch.randn(8, 256)
    model(inputs).sum().backward()
    first = time.perf_counter() - begin
    modules = [m for m in set(sys.modules) - BEFORE if m.split(".")[0] in ("commhooks", "ddp_core")]
    for _ in range(3):  # until a step does what the one before did
        model(inputs).sum().backward()
    loss = model(inputs).sum()
    counter.calls = counter.frames = 0
    counter.functions.clear()
    counter.files.clear()
    counter.active = True
    sys.setprofile(counter)
    loss.backward()
    sys.setprofile(None)
    time.sleep(0.3)  # lanes may end behind it
    counter.active = False
    return {
        "files": len(counter.files),
        "functions": len(counter.functions),
        "calls": counter.calls,
        "frames": counter.frames,
        "modules": len(modules),
        "import_s": round(imported, 2),
        "first_step_s": round(first, 2),
        "names": [os.path.relpath(file, ROOT) for file in counter.files],
    }


def on_fsdp2(rank: int, world_size: int) -> dict[str, Any]:
    return count("fsdp2:int8", Counter(), world_size)


def main() -> None:
    counter = Counter()
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print(json.dumps({case: count(case, counter, 1) for case in sys.argv[1:]}), flush=True)
    os._exit(0)  # no time for what ends threads


if __name__ == "__main__":
    main()
