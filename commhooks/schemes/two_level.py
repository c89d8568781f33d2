"""Schemes with one precision inside a node and another between nodes."""

from __future__ import annotations

from commhooks._averaged_feedback import AveragedFeedback
from commhooks._hierarchical import Hierarchical
from commhooks._registry import register_scheme
from commhooks._scheme import Scheme
from commhooks.schemes.quantized import Blockwise

__all__ = ["sdp4bit"]


@register_scheme("sdp4bit")
def sdp4bit(
    *,
    local_size: int | None = None,
    inside_block: int = 512,
    between_block: int = 128,
    stochastic: bool = False,
    memory: bool = True,
) -> Scheme:
    """8-bit integers inside a node, 4-bit ones of rotated blocks between nodes.

    Args:
        local_size: ranks of a node; by default what torchrun says, see :class:`Hierarchical`.
        inside_block, between_block: entries per scale; the latter also of the rotation.
        stochastic: unbiased instead of near.
        memory: keeps an average of what was lost, in 8 bits (:class:`AveragedFeedback`).

    References: Jia et al., SDP4Bit, 2024; Xie et al., LoCo, 2024 (the memory).
    """
    scheme = Hierarchical(
        inside=Blockwise("int8", inside_block, stochastic),
        between=Blockwise("int4", between_block, stochastic, rotate=True),
        local_size=local_size,
    )
    return AveragedFeedback(scheme) if memory else scheme
