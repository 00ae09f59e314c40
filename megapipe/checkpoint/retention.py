"""Which checkpoints are kept: the newest N complete ones. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from megapipe.checkpoint.disk import Disk
from megapipe.checkpoint.folder import doomed_name, folder_name, is_complete, steps_in


def remove_old(disk: Disk, root: Path, keep_last: int, token: str, just_saved: int) -> tuple[Path, ...]:
    """Remove the oldest complete checkpoints until keep_last are left; never the one just saved, never a damaged one.

    A doomed one is renamed first: a crash while removing leaves no half checkpoint under a good name. Raises OSError.
    """
    complete = [step for step in steps_in(root) if is_complete(root / folder_name(step))]
    removed = []
    for step in complete[: max(0, len(complete) - keep_last)]:
        if step == just_saved:
            continue
        path = root / folder_name(step)
        doomed = root / doomed_name(path.name, token)
        disk.rename(path, doomed)
        disk.remove(doomed)
        removed.append(path)
    return tuple(removed)
