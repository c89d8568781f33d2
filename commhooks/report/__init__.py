"""Shows what a hook did: pictures, traces and pages. Imported when one is asked for."""

from commhooks.report.page import Page

__all__ = ["Page"]
