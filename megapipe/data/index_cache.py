"""Shuffled indices kept on disk: the ranks of a machine build them once and then map them.

An entry is a folder `KIND-KEY` with `.npy` files and `description.json`. KEY is a hash of the settings and of size,
modification time and sampled blocks of the source, so that changed data meets no old index. An entry is written under
a temporary name and renamed, so it is complete or absent; if two processes build it at once, one entry stays. A lock
only avoids the duplicate work. No disk has to be shared between machines. An entry whose checksums do not match is
built again.
Checksums are computed again only for files whose size, inode or times differ from those noted at the last check: so a
rank that starts reads the description and maps the arrays, however large they are.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import secrets
import shutil
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megapipe.data.dataset import Array
from megapipe.data.indexed_file import bin_path, idx_path, replace_json, sampled_checksum
from megapipe.errors import ConfigError

Arrays = dict[str, Array]
FORMAT = 3  # part of every key: increase it when the meaning of an entry changes
SETTLED_NS = 50_000_000  # a file this young could change again without a change of its times
BLOCK_BYTES = 1 << 20
SAMPLED_BLOCKS = (4, 1 << 16)  # number and bytes, of a source: all of up to 256 KiB
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class IndexCache:
    """A folder of entries."""

    folder: Path
    is_required: bool  # the user named the folder: failing to write there is an error; else indices stay in memory

    @classmethod
    def at(cls, data_cache_path: str | None, prefix: str) -> IndexCache:
        """Return the cache in --data-cache-path if given, else in `cache/` next to the data."""
        if data_cache_path is not None:
            return cls(Path(data_cache_path), True)
        return cls(Path(prefix).parent / "cache", False)

    def arrays(self, kind: str, description: dict[str, Any], build: Callable[[], Arrays]) -> Arrays:
        """Return the arrays of an entry, mapped read-only; a missing or damaged entry is built and stored first.

        Raises ConfigError if a required folder cannot be written.
        """
        text = json.dumps({"format": FORMAT, "kind": kind, **description}, sort_keys=True)
        entry = self.folder / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"
        found = _load(entry, text)
        if isinstance(found, dict):
            return found
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / f".{entry.name}.lock", "w") as lock:
                with contextlib.suppress(OSError):  # no locks on this file system
                    fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed or the process dies
                found = _load(entry, text)  # another process may have built it
                if isinstance(found, dict):
                    return found
                if found:
                    log.warning("%s is a damaged index (%s): it is built again", entry, found)
                    _remove(entry)
                built = build()
                _store(entry, text, built)
        except OSError as error:
            if self.is_required:
                reason = f"{error.strerror}; name a writable folder"
                raise ConfigError(f"--data-cache-path {self.folder} cannot be written: {reason}") from None
            log.info("%s cannot be written (%s): the %s index is kept in memory", self.folder, error.strerror, kind)
            return build()
        found = _load(entry, text)
        return found if isinstance(found, dict) else built  # a disk that does not return what was written


def file_stamp(path: str) -> dict[str, Any]:
    """Return a description of the current state of a file: path, size, modification time, checksum of some blocks.

    Raises OSError, DataError.
    """
    found, content = os.stat(path), sampled_checksum(Path(path), *SAMPLED_BLOCKS)
    return {"path": os.path.realpath(path), "bytes": found.st_size, "mtime_ns": found.st_mtime_ns, "content": content}


def source_stamp(prefix: str) -> dict[str, Any]:
    """Return a description of the current state of a pair of token files, of whose `.bin` no block is read."""
    found = os.stat(bin_path(prefix))
    return {**file_stamp(str(idx_path(prefix))), "bin": [found.st_size, found.st_mtime_ns]}


def _store(entry: Path, text: str, arrays: Arrays) -> None:
    partial = entry.parent / f".{entry.name}.{secrets.token_hex(8)}"
    try:
        partial.mkdir()  # has the user's umask; tempfile's folders are closed to the group that shares the data
        for name, values in arrays.items():
            with open(partial / f"{name}.npy", "wb") as file:
                np.save(file, values, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        stamps = {name: _stamp(partial, name) for name in arrays}
        content = {
            "description": text,
            "arrays": {name: list(values.shape) for name, values in arrays.items()},
            "checksums": {name: _checksum(partial / f"{name}.npy") for name in arrays},
        }
        _write_description(partial, content, stamps)
        os.rename(partial, entry)
    except OSError:
        if not entry.exists():  # if it exists, another process was first, with the same entry
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _load(entry: Path, text: str) -> Arrays | str:
    """Return the arrays of an entry, "" if there is no entry, or the reason why it cannot be used."""
    if not entry.exists():
        return ""
    try:
        content = json.loads((entry / "description.json").read_text())
        if content["description"] != text:
            return "its description is another one"
        stamps = {name: _stamp(entry, name) for name in content["checksums"]}
        changed = [name for name, stamp in stamps.items() if content["stamps"].get(name) != stamp]
        for name in changed:
            if (found := _checksum(entry / f"{name}.npy")) != content["checksums"][name]:
                return f"the checksum of {name}.npy is {found} instead of {content['checksums'][name]}"
        if changed:
            with contextlib.suppress(OSError):  # a folder of others: each start computes the checksums
                _write_description(entry, content, stamps)
        arrays = {name: np.load(entry / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in content["arrays"]}
        shapes = {name: list(values.shape) for name, values in arrays.items()}
    except Exception as error:  # whatever numpy and json raise for a damaged file
        return f"{type(error).__name__}: {error}"
    return arrays if shapes == content["arrays"] else f"shapes {shapes} instead of {content['arrays']}"


def _write_description(entry: Path, content: dict[str, Any], stamps: dict[str, list[int]]) -> None:
    """Write the description. stamps: of the arrays, taken before their checksums were computed."""
    now = time.time_ns()
    content["stamps"] = {name: stamp for name, stamp in stamps.items() if now - max(stamp[2:]) > SETTLED_NS}
    partial = entry / f".description.{secrets.token_hex(8)}"
    try:
        replace_json(entry / "description.json", partial, content)
    finally:
        partial.unlink(missing_ok=True)


def _stamp(entry: Path, name: str) -> list[int]:
    """Return size, inode and times of an array's file, of which any change of the file changes one."""
    found = os.stat(entry / f"{name}.npy")
    return [found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns]


def _checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    checksum = 0
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _remove(entry: Path) -> None:
    """Remove an entry; processes that have mapped it keep it."""
    aside = entry.parent / f".{entry.name}.{secrets.token_hex(8)}"
    with contextlib.suppress(FileNotFoundError):  # another process was first
        os.rename(entry, aside)
    if aside.is_dir():
        shutil.rmtree(aside, ignore_errors=True)
    else:
        aside.unlink(missing_ok=True)
