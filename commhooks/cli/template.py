"""What ``commhooks new`` writes."""

from __future__ import annotations

__all__ = ["TEMPLATE"]

TEMPLATE = '''"""A gradient compression scheme: NAME.

    commhooks check NAME.py      the laws it has to obey
    commhooks schemes NAME.py    its bits beside those of all others
    commhooks tradeoff NAME.py   its error against its bits, beside those of all others

In training: import this file, then commhooks.register(ddp_model, "NAME").
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

    # Rounds the same way every time: made by name, it gets error feedback.
    traits = Traits(error=Biased())

    def __post_init__(self):
        if not 0 < self.scale <= 1:
            raise ValueError(f"CLASS(scale=...): 0 < scale <= 1, got {self.scale!r}")

    def encode(self, gradient, bucket):
        """Named tensors, whose shapes and dtypes do not depend on values."""
        wide = torch.promote_types(gradient.dtype, torch.float32)  # a sum in 16 bits may overflow
        size = self.scale * gradient.abs().sum(dtype=wide) / max(1, gradient.numel())
        return {"signs": gradient.sign().nan_to_num(0.0).to(torch.int8), "size": size.view(1)}

    def decode(self, payload, like, bucket):
        """What one rank's payload stands for; the mean over ranks is taken of these."""
        return payload["signs"] * payload["size"]
'''
