"""A small disk that can be filled, for tests that run as root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DISK_BYTES = 32 << 20
FILLER = "filler"


def can_mount() -> bool:
    """Return True if this user may mount a tmpfs here."""
    if os.geteuid() != 0 or shutil.which("mount") is None or shutil.which("unshare") is None:
        return False
    # in a separate mount namespace, which leaves nothing behind
    tried = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False
    )
    return tried.returncode == 0


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Make `folder` a disk of DISK_BYTES inside the block."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Write until the disk is full."""
    with (folder / FILLER).open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(1 << 12)):
            pass


def free(folder: Path) -> None:
    (folder / FILLER).unlink(missing_ok=True)
