"""Registers the schemes that papers compare with.

Built-in schemes have less error with as many bits or fewer; docs/schemes/baselines.md has the
figures and the exceptions.

Example:
    >>> import commhooks.research.baselines
    >>> hook = commhooks.register(ddp_model, "qsgd")
"""

from commhooks.research.baselines.integers import GlobalQSGD, IntSGD
from commhooks.research.baselines.levels import QSGD, TernGrad
from commhooks.research.baselines.sparse import AlignedTopK, RandomBlock

__all__ = ["QSGD", "AlignedTopK", "GlobalQSGD", "IntSGD", "RandomBlock", "TernGrad"]
