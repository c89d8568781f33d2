"""The schemes, one file each; importing this package registers them."""

from commhooks.schemes import dense  # noqa: F401  (first: the wrappers use it)
