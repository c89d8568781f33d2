"""Shows what a hook did: pictures, traces and pages. Imported when one is asked for."""

# Modules, in the order in which to read them:
#
# _run       the page of a run
# _page      pages
# _timeline  the exchanges of a step, drawn, and as a Chrome trace
# _style     colours and labels

from commhooks.report._page import Page

__all__ = ["Page"]
