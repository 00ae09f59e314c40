"""Shuffled indices kept on disk: the ranks of a machine build them once and then map them.

An entry is a folder `KIND-KEY` with `.npy` files and `description.json`. KEY is a hash of the settings and of size and
modification time of the source, so that changed data never meets an old index. An entry is written under a temporary
name and renamed, so it is complete or absent; if two processes build it at once, one entry stays. A lock only avoids
the duplicate work. No disk has to be shared between machines.
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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megapipe.data.dataset import Array
from megapipe.data.indexed_file import bin_path, idx_path
from megapipe.errors import ConfigError, DataError

Arrays = dict[str, Array]
FORMAT = 1  # part of every key: increase it when the meaning of an entry changes
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
        """Return the arrays of an entry, mapped read-only; a missing entry is built and stored first.

        Raises ConfigError if a required folder cannot be written, DataError if an entry is damaged.
        """
        text = json.dumps({"format": FORMAT, "kind": kind, **description}, sort_keys=True)
        entry = self.folder / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"
        if not entry.exists():
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                with open(self.folder / f".{entry.name}.lock", "w") as lock:
                    with contextlib.suppress(OSError):  # no locks on this file system
                        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed or the process dies
                    if not entry.exists():
                        _store(entry, text, build())
            except OSError as error:
                if self.is_required:
                    reason = f"{error.strerror}; name a writable folder"
                    raise ConfigError(f"--data-cache-path {self.folder} cannot be written: {reason}") from None
                log.info("%s cannot be written (%s): the %s index is kept in memory", self.folder, error.strerror, kind)
                return build()
        return _load(entry, text)


def source_stamp(prefix: str) -> dict[str, Any]:
    """Return a description of the current state of a pair of token files: path, sizes, modification times."""
    stats = [os.stat(path) for path in (bin_path(prefix), idx_path(prefix))]
    return {
        "prefix": os.path.realpath(prefix),
        "bytes": [s.st_size for s in stats],
        "mtime_ns": [s.st_mtime_ns for s in stats],
    }


def _store(entry: Path, text: str, arrays: Arrays) -> None:
    partial = entry.parent / f".{entry.name}.{secrets.token_hex(8)}"
    try:
        partial.mkdir()  # has the user's umask; tempfile's folders are closed to the group that shares the data
        for name, values in arrays.items():
            with open(partial / f"{name}.npy", "wb") as file:
                np.save(file, values, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        with open(partial / "description.json", "w") as file:
            shapes = {name: list(values.shape) for name, values in arrays.items()}
            json.dump({"description": text, "arrays": shapes}, file)
            file.flush()
            os.fsync(file.fileno())
        os.rename(partial, entry)
    except OSError:
        if not entry.exists():  # if it exists, another process was first, with the same entry
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _load(entry: Path, text: str) -> Arrays:
    try:
        content = json.loads((entry / "description.json").read_text())
        arrays = {name: np.load(entry / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in content["arrays"]}
        shapes = {name: list(values.shape) for name, values in arrays.items()}
        if content["description"] != text or shapes != content["arrays"]:
            raise ValueError(f"shapes {shapes} instead of {content['arrays']}, or another description")
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{entry} is a damaged index ({error}); delete this folder to have it rebuilt") from None
    return arrays
