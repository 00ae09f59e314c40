"""`Disk`: every change a save makes to the file system goes through here, so that tests can stop it, or make it fail, after each."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

Observer = Callable[[str, Path], None]  # (what was done, to what); may raise
BUFFER_BYTES = 1 << 20  # small tensors are collected into writes of this size


class Disk:
    """observer: called after each 'make', 'create', 'write', 'sync', 'rename', 'remove'. Every method may raise OSError."""

    def __init__(self, observer: Observer | None = None) -> None:
        self._observer = observer

    def make_folder(self, path: Path) -> None:
        """A new folder; its parents are made, too."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir()
        self._done("make", path)

    def create(self, path: Path) -> NewFile:
        """A file that must not exist yet, for writing; leaving its `with` block without an exception syncs it to the device."""
        file = NewFile(path, self._done)
        self._done("create", path)
        return file

    def write_file(self, path: Path, content: bytes) -> None:
        """A whole small file, synced."""
        with self.create(path) as file:
            file.write(content)

    def sync_folder(self, path: Path) -> None:
        """Make names in the folder survive a power cut."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._done("sync", path)

    def rename(self, old: Path, new: Path) -> None:
        """Atomic; replaces a file, refuses a folder that has something in it. Both stand in one folder, which is synced."""
        os.rename(old, new)
        self._done("rename", new)
        self.sync_folder(new.parent)

    def remove(self, path: Path) -> None:
        """A file, or a folder with all that is in it."""
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._done("remove", path)

    def _done(self, what: str, path: Path) -> None:
        if self._observer is not None:
            self._observer(what, path)


class NewFile:
    """A file under way. `write` takes anything with the buffer protocol."""

    def __init__(self, path: Path, done: Observer) -> None:
        self._path = path
        self._done = done
        self._file: BinaryIO = open(path, "xb", buffering=BUFFER_BYTES)  # noqa: SIM115 - closed in __exit__

    def write(self, content: bytes | memoryview) -> None:
        self._file.write(content)
        self._done("write", self._path)

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            self._abandon()
            return
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except BaseException:
            self._abandon()
            raise
        self._file.close()
        self._done("sync", self._path)

    def _abandon(self) -> None:
        """Close without a second complaint: closing tries again to write what a full disk did not take."""
        with contextlib.suppress(OSError):
            self._file.close()
