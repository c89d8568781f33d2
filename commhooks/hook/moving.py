"""Defines what users call when the ranks of a living hook change."""

from __future__ import annotations

import logging

import torch.distributed as dist

from commhooks.hook import group_change
from commhooks.hook.binding import need_group
from commhooks.hook.group_change import GroupChange
from commhooks.hook.reporting import Reporting

__all__ = ["Moving"]

_logger = logging.getLogger("commhooks")


class Moving(Reporting):
    """Lets a hook go on with other ranks."""

    @property
    def group_changes(self) -> tuple[GroupChange, ...]:
        """Returns the changes of ranks so far that this process took part in."""
        return self._changes

    _changes: tuple[GroupChange, ...] = ()

    def change_group(self, group: dist.ProcessGroup) -> GroupChange:
        """Goes on with other ranks, the model too; all ranks of ``group`` call it.

        Nothing is asked of the ranks before, which may be gone. A rank that goes on keeps its
        residual, scaled so that what is applied stays the same: the mean over ranks. A rank that
        joins, whose hook was registered over a group of its own, begins without a residual, and
        takes the step, the seed and what else is the same on all ranks. The residual of a rank
        that does not go on is lost, which the result says. If it can still speak, gather the state
        of all ranks before, and load it after the change. Parameters, optimizer and buffers are the
        user's to make equal.

        A step whose backward pass has raised is dropped: it leaves memory as it was.

        Args:
            group: the ranks from now on.

        Returns:
            What changed, see :class:`commhooks.hook.GroupChange`.

        Raises:
            TypeError: ``group`` is no process group.
            RegistrationError: a step is under way, or the hook was closed.
            MismatchError: the ranks differ in scheme, versions or parameters, or (MissingRankError)
                some did not come within the group's timeout.

        Example:
            >>> survivors = torch.distributed.new_group([0, 2, 3], use_local_synchronization=True)
            >>> change = hook.change_group(survivors)
        """
        if group is None:
            raise TypeError(
                "HookState.change_group(group): takes the process group of the ranks from now on, "
                "got None; torch.distributed.group.WORLD is the default group"
            )
        need_group(group)
        core = self._binding.moves_itself(group)
        if core is not None:
            core.change_group(group)  # which calls this method again
            return self._changes[-1]
        change = group_change.change_group(self, group)
        self._changes = (*self._changes, change)
        self._since = self.step  # ``summary`` describes what these ranks send
        _logger.info("%s", change)
        return change
