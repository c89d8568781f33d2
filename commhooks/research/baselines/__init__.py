"""Schemes that papers compare with; importing this package registers them by name.

On equal gradients each has more error than a built-in scheme of as many bits or fewer
(docs/schemes/baselines.md has the figures).

Example:
    >>> import commhooks.research.baselines
    >>> hook = commhooks.register(ddp_model, "qsgd")
"""

from commhooks.research.baselines.integers import GlobalQSGD, IntSGD
from commhooks.research.baselines.levels import QSGD, TernGrad
from commhooks.research.baselines.sparse import AlignedTopK, RandomBlock

__all__ = ["QSGD", "AlignedTopK", "GlobalQSGD", "IntSGD", "RandomBlock", "TernGrad"]
