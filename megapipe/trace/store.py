"""`user_store`: traces and declarations that this user's earlier processes have made, in the user's cache folder.

A key is derived: of what is traced, of the sources of megapipe and of torch's version. Nothing is kept by hand, and
removing the folder costs time only.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megapipe.environment import cache_folder
from megapipe.errors import ConfigError
from megapipe.registry import EXTENSIONS

TOO_LARGE = "overflow", "Overflow", "must be tuple of ints", "too large"  # what torch and numpy say of such sizes
UNUSED_DAYS = 30  # after which the traces of other sources are removed
PACKAGE = Path(__file__).resolve().parents[1]


class TraceStore:
    """Results of traces, one file each. folder: None for none."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def data(self, traced: object, run: Callable[[], Any]) -> Any:
        """Return what `run` has returned for the same `traced` before, else what it returns now, which JSON can hold.

        traced: its `repr` tells it from everything else. What a disk refuses to read or write is traced again. Raises
        ConfigError for sizes that no tensor has.
        """
        if self._folder is None or EXTENSIONS.loaded:  # whose functions may change
            return _found(run)
        path = self._folder / f"{hashlib.sha256(repr(traced).encode()).hexdigest()[:32]}.json"
        with suppress(OSError, ValueError):
            return json.loads(path.read_bytes())
        found = _found(run)
        with suppress(OSError):
            written = path.with_suffix(f".{os.getpid()}")
            written.write_text(json.dumps(found), encoding="utf-8")
            written.replace(path)
        return found


def _found(run: Callable[[], Any]) -> Any:
    """Return run(). Raises ConfigError where a tensor would be larger than torch can count."""
    try:
        return run()
    except (RuntimeError, TypeError, ValueError) as error:
        if not any(word in str(error) for word in TOO_LARGE):
            raise
        said = str(error).partition("\n")[0]
        raise ConfigError(
            f"one tensor of a microbatch or of the model would be larger than torch can count ({said}): check "
            "--hidden-size, --ffn-hidden-size, --num-attention-heads, --seq-length and --micro-batch-size"
        ) from error


@cache
def user_store() -> TraceStore:
    """Return the store of this user, for these sources; an empty one in the ranks of a job."""
    root = cache_folder()
    if root is None:
        return TraceStore(None)
    folder = root / "traces" / _digest_of_sources()
    try:
        if not folder.exists():
            folder.mkdir(parents=True)
            _remove_unused(folder.parent)
        os.utime(folder)
    except OSError:
        return TraceStore(None)
    return TraceStore(folder)


def _digest_of_sources() -> str:
    """Return a digest of what a trace depends on besides its arguments."""
    digest = hashlib.sha256(version("torch").encode())
    for path in sorted(PACKAGE.rglob("*.py")):
        if "extras" not in path.parts:
            digest.update(str(path.relative_to(PACKAGE)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _remove_unused(folder: Path) -> None:
    """Remove the traces of sources that were not used for a while."""
    for each in folder.iterdir():
        if each.stat().st_mtime < time.time() - UNUSED_DAYS * 86400:
            shutil.rmtree(each, ignore_errors=True)
