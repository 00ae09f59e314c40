"""`Retention`: which checkpoints are kept. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megapipe.checkpoint.disk import Disk
from megapipe.checkpoint.folder import doomed_name, folder_name, is_complete, steps_in


@dataclass(frozen=True)
class Retention:
    """The newest `last` are kept, and every one whose step `every` divides. Without `last`, all; with `every` alone, the newest one."""

    last: int | None = None
    every: int | None = None

    def doomed(self, complete: Sequence[int], just_saved: int) -> tuple[int, ...]:
        """Of the steps of all complete checkpoints those to remove, ascending; never the one just saved."""
        if self.last is None and self.every is None:
            return ()
        older = sorted(complete)[: max(0, len(complete) - (self.last or 1))]
        return tuple(step for step in older if step != just_saved and (self.every is None or step % self.every))


KEEP_ALL = Retention()


def remove_old(disk: Disk, root: Path, keep: Retention, token: str, just_saved: int) -> tuple[Path, ...]:
    """Remove the complete checkpoints that are not kept; never a damaged one.

    A doomed one is renamed first: a crash while removing leaves no half checkpoint under a good name. Raises OSError.
    """
    if keep == KEEP_ALL:
        return ()
    complete = [step for step in steps_in(root) if is_complete(root / folder_name(step))]
    removed = []
    for step in keep.doomed(complete, just_saved):
        path = root / folder_name(step)
        doomed = root / doomed_name(path.name, token)
        disk.rename(path, doomed)
        disk.remove(doomed)
        removed.append(path)
    return tuple(removed)
