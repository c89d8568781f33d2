"""Holds the file that ``commhooks new`` writes."""

from __future__ import annotations

__all__ = ["TEMPLATE"]

# No annotations: a file to start from is read before it is checked. It obeys every law as written,
# so that a law that breaks later shows what a change has broken.
TEMPLATE = '''"""A gradient compression scheme: NAME.

    commhooks check NAME.py      runs the laws that every scheme obeys
    commhooks schemes NAME.py    lists its bits next to those of all others
    commhooks tradeoff NAME.py   compares its error and bits with those of all others

In training, import this file, then call commhooks.register(ddp_model, "NAME").
"""

from dataclasses import dataclass

import torch

from commhooks import Biased, Codec, Traits, register_scheme


@register_scheme("NAME")
@dataclass(frozen=True)
class CLASS(Codec):
    """Sends the sign of every entry, and the mean magnitude of the bucket.

    Args:
        scale: a setting, for ``register(..., scale=...)``.
    """

    scale: float = 1.0

    # Biased: a scheme that is made by name then gets error feedback.
    traits = Traits(error=Biased())

    def __post_init__(self):
        if not 0 < self.scale <= 1:
            raise ValueError(f"CLASS(scale=...): 0 < scale <= 1, got {self.scale!r}")

    def encode(self, gradient, bucket):
        """Returns named tensors; their shapes and dtypes may not depend on values."""
        wide = torch.promote_types(gradient.dtype, torch.float32)  # a sum in 16 bits may overflow
        size = self.scale * gradient.abs().sum(dtype=wide) / max(1, gradient.numel())
        return {"signs": gradient.sign().nan_to_num(0.0).to(torch.int8), "size": size.view(1)}

    def decode(self, payload, like, bucket):
        """Returns the gradient that one rank's payload stands for; ranks are averaged later."""
        return payload["signs"] * payload["size"]
'''
