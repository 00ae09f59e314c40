"""`new_folder`: a folder of another system's format, complete or not there."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megapipe.checkpoint.disk import Disk
from megapipe.errors import CheckpointError


@contextmanager
def new_folder(folder: Path) -> Iterator[tuple[Disk, Path]]:
    """A disk and a temporary folder beside `folder` for the block to write into: named when the block ends, removed if it fails.

    Raises CheckpointError if folder is there already or cannot be written.
    """
    if folder.exists():
        raise CheckpointError(f"{folder} is there already; converting never overwrites: name another target")
    disk, temporary = Disk(), folder.with_name(f".{folder.name}.tmp-{secrets.token_hex(4)}")
    try:
        disk.make_folder(temporary)
        try:
            yield disk, temporary
            disk.sync_folder(temporary)
            disk.rename(temporary, folder)
        except BaseException:
            with suppress(OSError):  # what failed first is the one to tell
                disk.remove(temporary)
            raise
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error.strerror} (errno {error.errno})") from None
