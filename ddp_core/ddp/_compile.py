"""Splits the graphs of torch.compile, so that buckets become ready during backward.

A compiled graph's gradients all arrive at its end. The compiler therefore splits the graph of a
DistributedDataParallel module where it guesses the buckets to end, as far as the graph permits.
Here it uses this module's bucket sizes, and its splits become the reducer's buckets.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ddp_core._torch import active_module, compiles, split_for, splitter_module
from ddp_core.reducer._plan import BucketPlan

__all__ = ["splitting_at_buckets"]


@contextmanager
def splitting_at_buckets(module: Any, plan: BucketPlan) -> Iterator[None]:
    """Splits graphs that are compiled within the context, and plans buckets by the splits.

    Args:
        module: has the attribute ``bucket_bytes_cap``, which the compiler reads.
    """
    if not compiles():  # nothing is compiled, and importing it takes a second
        yield
        return
    compiler, splitter = _compiler()
    # The compiler looks for the module in this class attribute, and splits by this class.
    before, original = active_module(), compiler.DDPOptimizer
    split_for(module)
    compiler.DDPOptimizer = functools.partial(splitter, plan)
    try:
        yield
    finally:
        split_for(before)
        compiler.DDPOptimizer = original


@functools.cache
def _compiler() -> tuple[Any, Any]:
    """Returns the compiler's module, and the class that replaces its optimizer of graphs."""
    compiler = splitter_module()
    original: Any = compiler.DDPOptimizer

    class Splitter(original):  # type: ignore[misc]
        """Splits as the compiler does, with the first bucket's size, and reports the buckets."""

        def __init__(
            self, plan: BucketPlan, bucket_bytes_cap: int, backend_compile_fn: Any
        ) -> None:
            limits = plan.caps.limits
            super().__init__(
                bucket_bytes_cap, backend_compile_fn, first_bucket_cap=min(limits[0], limits[-1])
            )
            self._plan = plan

        def compile_fn(self, gm: Any, example_inputs: Any, **options: Any) -> Any:
            compiled = super().compile_fn(gm, example_inputs, **options)
            placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
            inputs = {
                str(node.target): id(value)
                for node, value in zip(placeholders, example_inputs, strict=False)
            }
            inputs.update({name: id(value) for name, value in gm.named_parameters()})
            # Parameters are inputs of the graph, by name; the plan knows the tensors themselves.
            chosen = [
                [inputs[name] for name in bucket.params if name in inputs]
                for bucket in reversed(self.buckets)
            ]
            self._plan.add_splits(chosen)
            return compiled

    return compiler, Splitter
