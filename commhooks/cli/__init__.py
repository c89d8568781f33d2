"""Implements the command line ``commhooks``, which needs rich and typer; the library does not."""

# Modules, in the order in which to read them:
#
# _app        the commands and their options
# _arguments  what their arguments mean
# _commands   doctor and other short commands
# _catalogue  schemes
# _headroom   headroom
# _link       link
# _advise     advise
# _simulate   simulate
# _tradeoff   tradeoff
