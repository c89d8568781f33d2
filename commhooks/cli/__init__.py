"""Implements the command line ``commhooks``, which needs rich and typer; the library does not."""

# Modules, in the order in which to read them:
#
# _app        the commands and their options
# _arguments  what their arguments mean
# _table      tables that fit any terminal
# _progress   how far a command is
# _commands   new, check, tradeoff
# _doctor     doctor
# _pair       the two processes of doctor
# _catalogue  schemes
# _headroom   headroom
# _link       link
# _advise     advise
# _simulate   simulate
# _tradeoff   tradeoff
