"""The token files of a preprocessing run that is not complete: a folder from which a second run continues.

`PREFIX.partial/` holds, until the files get their names,

    run.json            inputs and settings; a run with others does not continue from here
    progress.json       position in the input, counts, and how many bytes of the following files belong to them
    KEY.bin             tokens
    KEY.lengths         int32 tokens of each document
    skipped.jsonl       the skipped records
    KEY.idx             the index, once all input is read

`commit` writes the data to disk and then replaces progress.json, so that whatever ends the process (kill -9, a full
disk, a power failure), the bytes noted in progress.json are there; what was written after them is cut off.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from megapipe.checkpoint.disk import Disk
from megapipe.data.dataset import Array
from megapipe.data.indexed_file import Tokenizer, bin_path, idx_path, replace_json
from megapipe.errors import ConfigError, DataError
from megapipe.extras.preprocess.indexed_writer import index_bytes, publish, write_index
from megapipe.extras.preprocess.text_source import Position, Problem

Description = Mapping[str, Any]  # of inputs and settings: what to call each -> JSON


def output_prefix(prefix: str, key: str) -> str:
    """Return the prefix of the token files for a JSON key: PREFIX_KEY_document."""
    return f"{prefix}_{key}_document"


class PartialOutput:
    """The folder PREFIX.partial, locked by this process.

    description: of the inputs and settings; None if the input cannot be read again, so that nothing is kept. A folder
    left by an earlier run with an equal description is continued: `position` and `counts` are its. Raises ConfigError
    if complete files exist or the folder belongs to another run, unless `overwrite`, and DataError if it is in use.
    tokenizer: its fingerprint, written beside the files.
    """

    def __init__(
        self,
        prefix: str,
        keys: Sequence[str],
        dtype: np.dtype[Any],
        description: Description | None = None,
        *,
        overwrite: bool = False,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.prefix, self.keys, self.dtype = prefix, tuple(keys), dtype
        self.folder = Path(f"{prefix}.partial")
        self.is_resumable = description is not None
        self.position, self.counts = Position(), dict[str, Any]()
        self.is_committed = False  # a later run can continue from here
        self.is_read = False  # all input is in the folder; what is missing is the index, or names
        self._files: dict[str, IO[bytes]] = {}
        self._marked: dict[str, Any] | None = None
        # files may be there if this run or the interrupted one may replace them, or if some have their names already
        may_exist = overwrite or (_read(self.folder / "run.json") or {}).get("overwrite")
        if not may_exist and not (_read(self.folder / "progress.json") or {}).get("is_read"):
            for path in (name(output_prefix(prefix, key)) for key in keys for name in (bin_path, idx_path)):
                if path.exists():
                    raise ConfigError(f"{path} exists: choose another --output-prefix, or replace it with --overwrite")
        self._lock = self._locked_folder()
        try:
            sizes = self._earlier(description, overwrite)
            for name in (*(f"{key}.{kind}" for key in keys for kind in ("bin", "lengths")), "skipped.jsonl"):
                path, size = self.folder / name, sizes.get(name, 0)
                if self.is_read and not path.exists():  # it has its name already
                    self._files[name] = open(os.devnull, "ab")  # noqa: SIM115
                    continue
                file = self._files[name] = open(path, "ab", buffering=1 << 20)  # noqa: SIM115 (closed by close)
                if file.tell() < size:
                    damage = f"has {file.tell()} bytes, but progress.json notes {size}"
                    raise DataError(f"{path} {damage}: remove {self.folder} to begin again")
                file.truncate(size)
        except BaseException:
            self.close()
            raise

    def _locked_folder(self) -> IO[str]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = open(self.folder / "lock", "w")  # noqa: SIM115 (closed by close)
        except OSError as error:
            raise DataError(f"cannot write token files {self.prefix}: {error.strerror} ({error.filename})") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise DataError(f"{self.folder} is in use: another process is preprocessing to {self.prefix}") from None
        except OSError:
            pass  # no locks on this file system
        return lock

    def _earlier(self, description: Description | None, overwrite: bool) -> dict[str, int]:
        """Take over the progress of an earlier run, or begin. Returns the bytes of each file that are kept."""
        run, progress = _read(self.folder / "run.json"), _read(self.folder / "progress.json")
        if run is not None and run.get("description") is not None and progress is not None:
            other = difference(run["description"], description)
            if other is None:
                self.position, self.counts = Position(*progress["position"]), progress["counts"]
                self.is_read, self.is_committed = progress["is_read"], True
                sizes: dict[str, int] = progress["bytes"]
                return sizes
            if not overwrite:
                way = "repeat that command to continue it, choose another --output-prefix, or drop it with --overwrite"
                raise ConfigError(f"{self.folder} is the work of an interrupted run with another {other}; {way}")
        for path in self.folder.iterdir():
            if path.name != "lock":
                path.unlink()
        _write(self.folder / "run.json", {"description": description, "overwrite": overwrite})
        return {}

    def add(self, key: str, tokens: Array, lengths: Array) -> None:
        """Append documents: their tokens, concatenated, and the number of tokens of each, none of them 0."""
        self._files[f"{key}.bin"].write(tokens.astype(self.dtype, copy=False).tobytes())
        self._files[f"{key}.lengths"].write(lengths.astype("<i4", copy=False).tobytes())

    def skip(self, problems: Iterable[Problem]) -> None:
        """Append skipped records to the report."""
        for problem in problems:
            row = {"file": problem.path, problem.unit or "line": problem.number or None, "byte": problem.byte}
            self._files["skipped.jsonl"].write(json.dumps(row | {"reason": problem.reason}).encode() + b"\n")

    def mark(self, position: Position, counts: dict[str, Any]) -> None:
        """Note that everything added so far is the input up to `position`."""
        sizes = {name: file.tell() for name, file in self._files.items()}
        self._marked = {"position": position, "counts": counts, "bytes": sizes}

    def commit(self, *, is_read: bool = False) -> None:
        """Make what was added up to the last mark survive the end of this process."""
        for file in self._files.values():
            file.flush()
            if file.name != os.devnull:
                os.fsync(file.fileno())
        if self.is_resumable and self._marked is not None:
            _write(self.folder / "progress.json", {**self._marked, "is_read": is_read})
            self.is_committed = True

    def publish(self) -> None:
        """Write the index of each key, give all files their names, and remove the folder.

        If the process dies in between, the next run continues here. Raises DataError if the index does not fit on disk.
        """
        self._close_files()
        lengths = {key: self.folder / f"{key}.lengths" for key in self.keys}
        needed = sum(index_bytes(path.stat().st_size // 4) for path in lengths.values() if path.exists())
        require_space(self.folder, needed, "the index")
        for key, path in lengths.items():
            if (self.folder / f"{key}.bin").exists():
                values = np.memmap(path, "<i4", "r") if path.stat().st_size else np.empty(0, "<i4")
                write_index(self.folder / f"{key}.idx", self.dtype, values)
        for key in self.keys:
            partial_bin, partial_idx = (self.folder / f"{key}.{kind}" for kind in ("bin", "idx"))
            publish(partial_bin, partial_idx, output_prefix(self.prefix, key), self.tokenizer)
        report, skipped = Path(f"{self.prefix}.skipped.jsonl"), self.folder / "skipped.jsonl"
        if skipped.exists() and skipped.stat().st_size:
            os.replace(skipped, report)
        elif skipped.exists():
            report.unlink(missing_ok=True)
        self.discard()

    def discard(self) -> None:
        """Remove the folder, its progress after the files that it describes."""
        self.close()
        last = ("progress.json", "run.json", "lock")
        for path in sorted(self.folder.iterdir(), key=lambda path: last.index(path.name) if path.name in last else -1):
            path.unlink(missing_ok=True)
        self.folder.rmdir()

    def close(self) -> None:
        """Leave the folder to a later run."""
        self._close_files()
        self._lock.close()

    def _close_files(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):  # a full disk; what counts was written by commit
                file.close()


def require_space(folder: Path, needed: int, what: str) -> None:
    """Raise DataError if a disk has fewer than `needed` bytes left."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DataError(f"{folder}: {what} takes {needed:,} bytes, but the disk has {free:,} left; free some first")


def difference(before: Description, now: Description | None) -> str | None:
    """Return the first entry that differs, with both values, or None."""
    if now is None:
        return f"input ({before['input'][0] if before.get('input') else 'other files'}); standard input or a pipe now"
    for name in {**before, **now}:
        old, new = before.get(name), json.loads(json.dumps(now.get(name)))
        if old == new:
            continue
        if isinstance(old, list) and isinstance(new, list):
            place = next((i for i, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]), None)
            if place is None:
                return f"{name}: {len(old)} entries then, {len(new)} now"
            old, new = old[place], new[place]
        return f"{name}: {_shown(old)} then, {_shown(new)} now"
    return None


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(path.read_text("utf-8"))
        return content
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); remove {path.parent} to begin again") from None


def _write(path: Path, content: dict[str, Any]) -> None:
    replace_json(path, path.with_name(f"{path.name}.new"), content)
    Disk().sync_folder(path.parent)
