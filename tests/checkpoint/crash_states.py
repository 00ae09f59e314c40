"""A simulation of power cuts: replay a log of system calls and produce every disk state that POSIX allows.

The content of a file is durable once the file was synced, its name once its folder was synced. Any part of the rest
can be lost, in any combination: a write may be torn, and a file may have its full length without its content. A
rename is atomic: either the old name or the new one survives.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megapipe.checkpoint.disk import Disk

Operation = tuple[Any, ...]  # (name, *arguments), in the order in which the program made the calls
Tree = dict[str, bytes | None]  # path relative to the root -> content, None for a folder


class Recorder:
    """Logger of all file operations under `root` while it is patched in."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log: list[Operation] = []
        self._open: dict[int, str] = {}

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real_open, real_write, real_sync, real_close = os.open, os.write, os.fsync, os.close
        real_rename, real_mkdir, real_remove = os.rename, os.mkdir, Disk.remove

        def opened(path: Any, flags: int, *rest: Any, **options: Any) -> int:
            descriptor = real_open(path, flags, *rest, **options)
            if self._is_here(path):
                self._open[descriptor] = self._name(path)
                if flags & os.O_CREAT:
                    self.log.append(("create", self._name(path)))
            return descriptor

        def written(descriptor: int, content: Any) -> int:
            count = real_write(descriptor, content)
            self.log.append(("write", self._open[descriptor], bytes(content[:count])))
            return count

        def synced(descriptor: int) -> None:
            real_sync(descriptor)
            self.log.append(("sync", self._open[descriptor]))

        def closed(descriptor: int) -> None:
            self._open.pop(descriptor, None)
            real_close(descriptor)

        def renamed(old: Any, new: Any) -> None:
            real_rename(old, new)
            self.log.append(("rename", self._name(old), self._name(new)))

        def made(path: Any, *rest: Any) -> None:
            real_mkdir(path, *rest)
            self.log.append(("make", self._name(path)))

        def removed(disk: Disk, path: Path) -> None:
            inside = sorted(path.rglob("*"), reverse=True) if path.is_dir() else []
            self.log += [("remove", self._name(entry)) for entry in (*inside, path)]
            real_remove(disk, path)

        for name, replacement in (("open", opened), ("write", written), ("fsync", synced), ("close", closed)):
            monkeypatch.setattr(os, name, replacement)
        monkeypatch.setattr(os, "rename", renamed)
        monkeypatch.setattr(os, "mkdir", made)
        monkeypatch.setattr(Disk, "remove", removed)

    def _is_here(self, path: Any) -> bool:
        return isinstance(path, (str, os.PathLike)) and Path(path).is_relative_to(self.root)

    def _name(self, path: Any) -> str:
        return str(Path(path).relative_to(self.root))


@dataclass
class Inode:
    """A file or folder and its history of names.

    names: (event, folder, name) in order, with folder None for a removal. known: the number of them that are
    durable.
    """

    content: list[bytes] | None  # writes in order, or None for a folder
    names: list[tuple[int, int | None, str]] = field(default_factory=list)
    known: int = 0
    synced: int = 0  # number of durable writes


class FileSystem:
    """File system that applies a log and tracks what is durable. Inode 0 is the root."""

    def __init__(self, before: Tree) -> None:
        self.inodes = [Inode(None)]
        self._at: dict[str, int] = {".": 0}
        for path in sorted(before):
            content = before[path]
            self._new(path, None if content is None else [content], event=-1)
            inode = self.inodes[self._at[path]]
            inode.known, inode.synced = 1, 1

    def apply(self, event: int, operation: Operation) -> None:
        name, path, *rest = operation
        if name in ("make", "create"):
            self._new(path, None if name == "make" else [], event)
        elif name == "write":
            content = self.inodes[self._at[path]].content
            assert content is not None
            content.append(rest[0])
        elif name == "sync":
            self._sync(self._at[path])
        elif name == "remove":
            self.inodes[self._at.pop(path)].names.append((event, None, ""))
        else:
            self._rename(event, path, rest[0])

    def states(self) -> Iterator[Tree]:
        """Yield every tree that may be on the disk after a crash at this point."""
        choices = [range(inode.known - 1, len(inode.names)) for inode in self.inodes[1:]]
        for positions in itertools.product(*choices):  # index of the last name that reached the disk, -1 for none
            if self._is_whole(positions):
                yield from self._trees(positions)

    def _new(self, path: str, content: list[bytes] | None, event: int) -> None:
        self._at[path] = len(self.inodes)
        self.inodes.append(Inode(content, [(event, self._at[os.path.dirname(path) or "."], os.path.basename(path))]))

    def _sync(self, number: int) -> None:
        inode = self.inodes[number]
        if inode.content is not None:
            inode.synced = len(inode.content)
            return
        for other in self.inodes:
            for index, (_, folder, _) in enumerate(other.names):
                left = index > 0 and other.names[index - 1][1] == number  # a removal, or a rename into another folder
                if folder == number or left:
                    other.known = max(other.known, index + 1)

    def _rename(self, event: int, old: str, new: str) -> None:
        if new in self._at:
            self.inodes[self._at[new]].names.append((event, None, ""))
        moved = {path: number for path, number in self._at.items() if path == old or path.startswith(f"{old}/")}
        for path, number in moved.items():
            del self._at[path]
            self._at[new + path[len(old) :]] = number
        folder = self._at[os.path.dirname(new) or "."]
        self.inodes[self._at[new]].names.append((event, folder, os.path.basename(new)))

    def _is_whole(self, positions: tuple[int, ...]) -> bool:
        """Return True if no event reached the disk by half: a rename removes the file that it replaces."""
        verdicts: dict[int, bool] = {}
        for inode, position in zip(self.inodes[1:], positions, strict=True):
            for index, (event, _, _) in enumerate(inode.names):
                if event >= 0 and verdicts.setdefault(event, index <= position) != (index <= position):
                    return False
        return True

    def _trees(self, positions: tuple[int, ...]) -> Iterator[Tree]:
        paths: dict[int, str | None] = {0: ""}

        def path_of(number: int) -> str | None:
            if number not in paths:
                position = positions[number - 1]
                _, folder, name = self.inodes[number].names[position] if position >= 0 else (0, None, "")
                above = None if folder is None else path_of(folder)
                paths[number] = None if above is None else f"{above}/{name}".lstrip("/")
            return paths[number]

        visible = [number for number in range(1, len(self.inodes)) if path_of(number) is not None]
        contents = [list(variants(self.inodes[number])) for number in visible]
        for chosen in itertools.product(*contents):
            yield {str(paths[number]): content for number, content in zip(visible, chosen, strict=True)}


def variants(inode: Inode) -> Iterator[bytes | None]:
    """Yield the possible contents of a file.

    Each unsynced write may be complete, torn or missing, in any combination, or the file may have its full length
    without any of them.
    """
    if inode.content is None:
        yield None
        return
    writes, certain = inode.content, inode.synced
    whole = [len(write) for write in writes]
    reached = ((length, length // 2, 0) for length in whole[certain:])
    found = {_content(writes, [*whole[:certain], *kept]): None for kept in itertools.product(*reached)}
    found[_content(writes, whole[:certain]).ljust(sum(whole), b"\0")] = None
    yield from found


def _content(writes: list[bytes], kept: list[int]) -> bytes:
    """Return the first `kept` bytes of each write at its offset. Holes read as zeros."""
    content, start = bytearray(), 0
    for write, length in itertools.zip_longest(writes, kept, fillvalue=0):
        assert isinstance(write, bytes)
        if length:
            content.extend(bytes(start - len(content)) + write[:length])
        start += len(write)
    return bytes(content)


def tree_of(root: Path) -> Tree:
    return {
        str(path.relative_to(root)): None if path.is_dir() else path.read_bytes() for path in sorted(root.rglob("*"))
    }


def put(tree: Tree, root: Path) -> None:
    """Create the tree in an empty folder."""
    root.mkdir(parents=True, exist_ok=True)
    for path in sorted(tree):
        content = tree[path]
        (root / path).mkdir() if content is None else (root / path).write_bytes(content)


def crash_states(before: Tree, log: list[Operation]) -> Iterator[tuple[int, Tree]]:
    """Yield (operations done, tree) for a crash before the first operation, after each one and at the end.

    Each tree is yielded once for each number of operations.
    """
    system = FileSystem(before)
    for done in range(len(log) + 1):
        seen: set[tuple[tuple[str, bytes | None], ...]] = set()
        for tree in system.states():
            key = tuple(sorted(tree.items()))
            if key not in seen:
                seen.add(key)
                yield done, tree
        if done < len(log):
            system.apply(done, log[done])
