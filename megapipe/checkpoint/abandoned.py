"""Checkpoints of a way that was given up are kept, in a folder of their own. Imports no torch."""

from __future__ import annotations

import secrets
from pathlib import Path

from megapipe.checkpoint.disk import Disk
from megapipe.checkpoint.folder import LATEST_NAME, folder_name, open_folder, read_latest, steps_in, temporary_name
from megapipe.checkpoint.rollbacks import abandoned_by, read_rollbacks, rollbacks_before
from megapipe.errors import CheckpointError


def move_abandoned(root: Path, disk: Disk | None = None) -> tuple[str, ...]:
    """Move what rollbacks have given up from `root` to `root/abandoned-N`, N the rollback's number, and say so. May be called again after
    a crash at any point of it. `root/abandoned-N` is a root itself: --load takes it, and nothing removes checkpoints there.

    Raises CheckpointError.
    """
    rollbacks, disk, moved = read_rollbacks(root), disk or Disk(), []
    if not rollbacks:
        return ()
    kept = []
    try:
        for step in steps_in(root):
            path = root / folder_name(step)
            try:
                before = rollbacks_before(open_folder(path).manifest.state)
            except CheckpointError:
                continue  # damaged: nothing loads it
            rollback = abandoned_by(rollbacks, step, before)
            if rollback is None:
                kept.append(path.name)
                continue
            place = root / f"abandoned-{rollback.number}" / path.name
            disk.make_parents(place)
            path.rename(place)
            disk.sync_folder(place.parent)
            disk.sync_folder(root)
            moved.append(place)
        if kept and read_latest(root) not in (None, kept[-1]):
            temporary = root / temporary_name(LATEST_NAME, secrets.token_hex(8))
            disk.write_file(temporary, f"{kept[-1]}\n".encode())
            disk.rename(temporary, root / LATEST_NAME)
    except OSError as error:
        raise CheckpointError(f"what was given up in {root} cannot be moved: {error}") from None
    return tuple(f"kept apart: {place}, saved on a way that was given up" for place in moved)
