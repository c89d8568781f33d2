"""Scripts that run where no optional package is."""

from __future__ import annotations

# Registers, trains, saves, loads, switches and sums up.
TRAINS = """
import tempfile
import torch
import torch.distributed as dist
import commhooks
import ddp_core

folder = tempfile.mkdtemp()
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)

def stepped(model, **options):
    hook = commhooks.register(model, "powersgd", rank=2, **options)
    for _ in range(3):
        model(torch.randn(4, 64)).square().mean().backward()
    return hook

module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
hook = stepped(torch.nn.parallel.DistributedDataParallel(module))
torch.save(hook.state_dict(), f"{folder}/state.pt")
hook.load_state_dict(torch.load(f"{folder}/state.pt"))
hook.switch("int8")
ddp = ddp_core.DistributedDataParallel(module)
hook = stepped(ddp, layout="scheme")
assert "nothing is sent between ranks" in hook.summary()
"""
# After it: calls whatever needs an optional package, and prints what each says.
REFUSES = """
from commhooks.research.budget import allocate
from commhooks.research.trace import Trace, replay
from commhooks.wrappers._traced import Traced

said = []
for call in (
    hook.report,
    hook.ledger.report,
    ddp.timeline.frame,
    ddp.timeline.plot,
    lambda: Traced(commhooks.make("none"), folder),
    lambda: Trace(folder),
    lambda: replay(None, "int8"),
    lambda: allocate([(None, [])], [commhooks.make("none")], bits=1.0),
):
    try:
        call()
    except commhooks.errors.MissingPackageError as error:
        said.append(str(error))
print(*said, sep="\\n")
"""
