"""`Disk`: every change that a save makes to the file system, so that tests can interrupt each of them."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

Observer = Callable[[str, Path], None]  # (operation, path); may raise
WRITE_BYTES = 1 << 22  # bytes per write call; small tensors are collected into writes of this size


def temporary_name(name: str) -> str:
    """Return a fresh name for a file or folder while it is being written."""
    return f".{name}.tmp-{secrets.token_hex(8)}"


def reason(error: OSError) -> str:
    """Return the text of an error of the file system, with its number."""
    return f"{error.strerror} (errno {error.errno})" if error.errno else error.strerror or str(error)


def read_regular(path: Path) -> bytes:
    """Return the content of a file. Raises OSError, also for a folder, a pipe or a device, without waiting for it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        require_regular(os.fstat(descriptor).st_mode)
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def require_regular(mode: int) -> None:
    """Raise OSError unless the st_mode is that of a regular file."""
    if not stat.S_ISREG(mode):
        raise OSError(0, "it is not a regular file")


class Disk:
    """File system operations that reach the device before they return. Every method may raise OSError.

    observer: called after each 'make', 'create', 'write', 'sync', 'rename', 'remove'. may_change: called before each
    folder that is made and each 'rename' and 'remove'; raises CheckpointError if another run owns the directory.
    """

    def __init__(self, observer: Observer | None = None, may_change: Callable[[], None] | None = None) -> None:
        self._observer = observer
        self.may_change = may_change or (lambda: None)

    def make_folder(self, path: Path) -> None:
        """Create a folder that does not exist yet, with its missing parents."""
        self.may_change()
        self.make_parents(path)
        path.mkdir()
        self._done("make", path)

    def make_parents(self, path: Path) -> None:
        """Create and sync the missing folders above `path`, so that they survive a power failure."""
        for parent in reversed([parent for parent in path.parents if not parent.exists()]):
            parent.mkdir(exist_ok=True)
            self._done("make", parent)
            self.sync_folder(parent.parent)

    def create(self, path: Path) -> NewFile:
        """Open a file that must not exist yet. Leaving its `with` block without an exception syncs it to the device."""
        file = NewFile(path, self._done)
        self._done("create", path)
        return file

    def write_file(self, path: Path, content: bytes) -> None:
        """Create and sync a small file."""
        with self.create(path) as file:
            file.write(content)

    def replace_file(self, path: Path, content: bytes) -> None:
        """Write a small file atomically: readers see the old content or the new one."""
        temporary = path.with_name(temporary_name(path.name))
        self.write_file(temporary, content)
        self.rename(temporary, path)

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder survive a power failure."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._done("sync", path)

    def rename(self, old: Path, new: Path) -> None:
        """Rename within one folder and sync it. Atomic: replaces a file, fails on a folder that is not empty."""
        self.may_change()
        os.rename(old, new)
        self._done("rename", new)
        self.sync_folder(new.parent)

    def remove(self, path: Path) -> None:
        """Delete a file, or a folder with its content."""
        self.may_change()
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._done("remove", path)

    def _done(self, operation: str, path: Path) -> None:
        if self._observer is not None:
            self._observer(operation, path)


class NewFile:
    """A file being written. Small pieces are buffered, large ones are written without a copy."""

    def __init__(self, path: Path, done: Observer) -> None:
        self._path = path
        self._done = done
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._buffer = bytearray()
        self._written = 0

    def write(self, content: bytes | memoryview) -> None:
        """Append anything that has the buffer protocol."""
        if len(self._buffer) + len(content) >= WRITE_BYTES:
            self.flush()
        if len(content) >= WRITE_BYTES // 4:
            self.flush()
            self._put(memoryview(content))
        else:
            self._buffer += content

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                self.flush()
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)
        if kind is None:
            self._done("sync", self._path)

    def flush(self) -> None:
        """Write what is buffered; torch.save calls it."""
        if self._buffer:
            self._put(memoryview(self._buffer))
            self._buffer = bytearray()

    def _put(self, content: memoryview) -> None:
        """Write `content` and drop its pages from the page cache, which the training data needs more."""
        for first in range(0, len(content), WRITE_BYTES):
            start = self._written
            piece = content[first : first + WRITE_BYTES]
            while len(piece):
                count = os.write(self._descriptor, piece)
                piece = piece[count:]
                self._written += count
            if self._written - start >= WRITE_BYTES // 4 and hasattr(os, "posix_fadvise"):
                # DONTNEED also makes the kernel start writing dirty pages back
                os.posix_fadvise(self._descriptor, start, self._written - start, os.POSIX_FADV_DONTNEED)
            self._done("write", self._path)
