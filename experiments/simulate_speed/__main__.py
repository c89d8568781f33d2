"""Times predictions of one model: 50 schemes, 12 numbers of ranks, 10 fabrics.

``python -m experiments.simulate_speed`` prints the time with plans of exchanges at hand, which is
that of the cost model, and the time that making the plans takes, once per process.
"""

from __future__ import annotations

import statistics
import time

import torch

import commhooks.research.baselines  # noqa: F401  # registers schemes
from commhooks import Scheme, make, scheme_names
from commhooks.cli._tradeoff import SAME, cases_of
from commhooks.predict import DEVICES, PRESETS, model, predict_steps, trace_exchange

__all__ = ["main"]

RANKS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384)
FABRICS = ("1gbe", "10gbe", "25gbe", "100gbe", "hdr", "ndr", "wan-4g", "pcie4", "dgx-a100")
REPEATS = 9


def schemes(count: int = 50) -> dict[str, Scheme]:
    """Returns different schemes: all registered ones, with the settings of the trade-off study."""
    by_name = {
        case.label: make(case.name, **case.options)
        for case in cases_of(name for name in scheme_names() if name not in SAME)
    }
    for name in ("int8", "int4", "onebit", "fp8", "powersgd", "topk", "random_k"):
        by_name[f"{name} coalesce"] = make(name, coalesce=True)
    assert len(set(by_name.values())) >= count
    return dict(list(by_name.items())[:count])


def main() -> None:
    """Prints both times."""
    torch.set_num_threads(1)
    device = DEVICES["a100"]
    workload = model("resnet50").workload(device)
    fabrics = [PRESETS[name] for name in (*FABRICS, "dgx-h100")]
    made = list(schemes().values())

    def seconds() -> float:
        begin = time.perf_counter()
        predict_steps(made, workload, ranks=RANKS, fabrics=fabrics, device=device)
        return time.perf_counter() - begin

    first = seconds()
    plans = trace_exchange.cache_info().currsize
    later = [seconds() for _ in range(REPEATS)]
    count = len(made) * len(RANKS) * len(fabrics)
    print(
        f"{count} predictions ({len(made)} schemes, {len(RANKS)} numbers of ranks, "
        f"{len(fabrics)} fabrics): median of {REPEATS} {1e3 * statistics.median(later):.0f} ms "
        f"({1e3 * min(later):.0f} to {1e3 * max(later):.0f}), with {plans} plans at hand, which "
        f"take {first - statistics.median(later):.1f} s once"
    )


if __name__ == "__main__":
    main()
