"""Shuffled indices kept on disk, so that the ranks of a machine build them once and then map them.

An entry is a folder `KIND-KEY` of `.npy` files and `description.json`. KEY is a hash of the whole description: settings, and size and
modification time of the source, so that changed data never meets an old index. An entry is written under another name and renamed, so it
is complete or not there; of two builders at once both succeed and one entry stays. A lock saves the second from building, and nothing
depends on it: where the file system has none, each builds. No disk has to be shared between machines.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megapipe.data.dataset import Array
from megapipe.data.indexed_file import bin_path, idx_path
from megapipe.errors import ConfigError, DataError

Arrays = dict[str, Array]
FORMAT = 1  # part of every key: raise it when the meaning of an entry changes
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class IndexCache:
    """A folder of entries. `asked`: whether the user named it (then failing to write there is an error; else indices stay in memory)."""

    folder: Path
    asked: bool

    @classmethod
    def at(cls, data_cache_path: str | None, prefix: str) -> IndexCache:
        """The folder given by --data-cache-path, else `cache/` beside the data."""
        if data_cache_path is not None:
            return cls(Path(data_cache_path), True)
        return cls(Path(prefix).parent / "cache", False)

    def arrays(self, kind: str, description: dict[str, Any], build: Callable[[], Arrays]) -> Arrays:
        """The arrays of an entry, mapped read-only; built and stored first where it is missing.

        Raises ConfigError if the folder was asked for and cannot be written, DataError if an entry is damaged.
        """
        text = json.dumps({"format": FORMAT, "kind": kind, **description}, sort_keys=True)
        entry = self.folder / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"
        if not entry.exists():
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                with _locked(self.folder / f".{entry.name}.lock"):
                    if not entry.exists():
                        _store(entry, text, build())
            except OSError as error:
                if self.asked:
                    raise ConfigError(
                        f"--data-cache-path {self.folder} cannot be written: {error.strerror}; name a writable folder"
                    ) from None
                log.info("%s cannot be written (%s): the %s index is kept in memory", self.folder, error.strerror, kind)
                return build()
        return _load(entry, text)


def source_stamp(prefix: str) -> dict[str, Any]:
    """What tells one state of a pair of token files from another: place, sizes, modification times."""
    stats = [os.stat(path) for path in (bin_path(prefix), idx_path(prefix))]
    return {
        "prefix": os.path.realpath(prefix),
        "bytes": [s.st_size for s in stats],
        "mtime_ns": [s.st_mtime_ns for s in stats],
    }


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of one entry, if the file system knows locks. A process that dies releases it."""
    with open(path, "w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _store(entry: Path, text: str, arrays: Arrays) -> None:
    partial = entry.parent / f".{entry.name}.{secrets.token_hex(8)}"
    try:
        partial.mkdir()  # with the user's umask; tempfile's folders are closed to the group that shares the data
        for name, values in arrays.items():
            with open(partial / f"{name}.npy", "wb") as file:
                np.save(file, values, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        with open(partial / "description.json", "w") as file:
            json.dump(
                {"description": text, "arrays": {name: list(values.shape) for name, values in arrays.items()}}, file
            )
            file.flush()
            os.fsync(file.fileno())
        os.rename(partial, entry)
    except OSError:
        if not entry.exists():  # else another process was first, and its entry is the same
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
        raise DataError(f"{entry} is a damaged index ({error}); delete this folder and it is built again") from None
    return arrays
