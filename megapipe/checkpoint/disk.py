"""`Disk`: every change a save makes to the file system goes through here, so that tests can stop it, or make it fail, after each."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

Observer = Callable[[str, Path], None]  # (what was done, to what); may raise
WRITE_BYTES = 1 << 22  # of one call; small tensors are collected up to it


class Disk:
    """observer: called after each 'make', 'create', 'write', 'sync', 'rename', 'remove'. Every method may raise OSError."""

    def __init__(self, observer: Observer | None = None) -> None:
        self._observer = observer

    def make_folder(self, path: Path) -> None:
        """A new folder; parents that are missing are made and synced, too."""
        self.make_parents(path)
        path.mkdir()
        self._done("make", path)

    def make_parents(self, path: Path) -> None:
        """The folders above path, so that they survive a power cut; those that are there are left alone."""
        for parent in reversed([parent for parent in path.parents if not parent.exists()]):
            parent.mkdir(exist_ok=True)
            self._done("make", parent)
            self.sync_folder(parent.parent)

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
    """A file under way. `write` takes anything with the buffer protocol; small pieces are collected, large ones go out without a copy."""

    def __init__(self, path: Path, done: Observer) -> None:
        self._path = path
        self._done = done
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._collected = bytearray()
        self._written = 0

    def write(self, content: bytes | memoryview) -> None:
        if len(self._collected) + len(content) >= WRITE_BYTES:
            self._flush()
        if len(content) >= WRITE_BYTES // 4:
            self._flush()
            self._put(memoryview(content))
        else:
            self._collected += content

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                self._flush()
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)
        if kind is None:
            self._done("sync", self._path)

    def _flush(self) -> None:
        if self._collected:
            self._put(memoryview(self._collected))
            self._collected = bytearray()

    def _put(self, content: memoryview) -> None:
        """Write all of it and let the device begin with it: a page that is written leaves room for those that the training reads."""
        for first in range(0, len(content), WRITE_BYTES):
            start = self._written
            piece = content[first : first + WRITE_BYTES]
            while len(piece):
                count = os.write(self._descriptor, piece)
                piece = piece[count:]
                self._written += count
            if self._written - start >= WRITE_BYTES // 4 and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._descriptor, start, self._written - start, os.POSIX_FADV_DONTNEED)
            self._done("write", self._path)
