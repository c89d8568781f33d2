"""Draws pictures, traces and pages of a hook's run; imported on first use."""

# Modules, in the order in which to read them:
#
# _run       the page of a run
# _page      pages
# _timeline  the exchanges of a step, drawn, and as a Chrome trace
# _style     colours and labels

from commhooks.report._page import Page

__all__ = ["Page"]
