"""`Attempt`: the steps of one save on one rank, in an order that survives a crash at any point.

What a crash leaves after each step:
1. rank 0 creates `.step_N.tmp-TOKEN`                                   no checkpoint
2. every rank writes and syncs its shard there                          no checkpoint
3. rank 0 checks all shards, writes and syncs config and manifest       no checkpoint
4. rank 0 renames the folder to `step_N` and syncs the root             a complete checkpoint
5. rank 0 updates `latest`, then removes old checkpoints                a complete checkpoint

Nothing here communicates, so writing and committing can run in a thread; in `save` the ranks agree between the steps.
"""

from __future__ import annotations

import secrets
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megapipe.checkpoint.disk import Disk, temporary_name
from megapipe.checkpoint.folder import (
    CONFIG_NAME,
    LATEST_NAME,
    TOKENIZER_NAME,
    Retention,
    folder_name,
    open_folder,
    remove_old,
)
from megapipe.checkpoint.manifest import MANIFEST_NAME, Manifest, SavedFile, SavedTensor, check_covered
from megapipe.checkpoint.shard import WrittenBox, WrittenShard, shard_name, write_shard
from megapipe.checkpoint.tensor_box import TensorBox
from megapipe.errors import CheckpointError

INTACT = "checkpoints saved earlier are intact"
NOT_SHARED = "the checkpoint directory is not shared between the nodes"

ShardResult = WrittenShard | str | None  # of one rank: its shard, an error message, or None if it has nothing to save


@dataclass(frozen=True)
class SaveReport:
    """The outcome of a successful save.

    path: of the checkpoint. num_bytes: of all files of all ranks. seconds: duration of the save. removed: old
    checkpoints. remark: set if nothing had to be written. waited_seconds: time that training was blocked, if the save
    ran in background.
    """

    path: Path
    num_bytes: int
    seconds: float
    removed: tuple[Path, ...] = ()
    remark: str = ""
    waited_seconds: float | None = None


@dataclass(frozen=True)
class Extras:
    """Content other than tensors. state: plain JSON values. tokenizer: contents of its files by name."""

    state: dict[str, Any]
    config_text: str
    tokenizer: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class BeginResult:
    """Rank 0's message to all ranks before they write. Exactly one field is set."""

    temporary: Path | None = None
    already_done: SaveReport | None = None
    error: str | None = None


@dataclass(frozen=True)
class FinishResult:
    """Rank 0's message to all ranks after the commit. Exactly one field is set."""

    report: SaveReport | None = None
    error: str | None = None


class Attempt:
    """One save on this rank. keep: which older checkpoints to keep once this one is complete."""

    def __init__(self, disk: Disk, root: Path, step: int, extras: Extras, keep: Retention, block_bytes: int) -> None:
        self.disk = disk
        self.root = root
        self.step = step
        self.extras = extras
        self.keep = keep
        self.block_bytes = block_bytes
        self.final = root / folder_name(step)
        self.started = time.monotonic()

    def begin(self) -> BeginResult:
        """Create the temporary folder, unless this checkpoint already exists. For rank 0."""
        try:
            if self.final.exists():
                done = self._existing_report()
                if done is not None:
                    return BeginResult(already_done=done)
                # not a valid checkpoint, but someone may want to look at it
                self.disk.rename(self.final, self.root / f"{self.final.name}.damaged-{secrets.token_hex(4)}")
            temporary = self.root / temporary_name(self.final.name)
            self.disk.make_folder(temporary)
        except CheckpointError as error:
            return BeginResult(error=str(error))
        except OSError as error:
            return BeginResult(error=f"cannot save in {self.root}: {_reason(error)}; {INTACT}")
        return BeginResult(temporary=temporary)

    def write(self, temporary: Path, tensors: Sequence[TensorBox], global_rank: int) -> ShardResult:
        """Write this rank's shard."""
        if not tensors:
            return None
        path = temporary / shard_name(global_rank)
        try:
            return write_shard(self.disk, path, tensors, self.block_bytes)
        except FileNotFoundError:
            return f"rank {global_rank} does not see {temporary}, which rank 0 created: {NOT_SHARED}; {INTACT}"
        except OSError as error:
            return f"rank {global_rank} cannot write {path}: {_reason(error)}; {INTACT}"

    def finish(self, temporary: Path, written: Sequence[ShardResult]) -> FinishResult:
        """Commit the checkpoint and remove old ones, or clean up and return the error. For rank 0."""
        try:
            manifest = self._commit(temporary, written)
        except CheckpointError as error:
            return FinishResult(error=f"{error}{self._clean_up(temporary)}")
        except OSError as error:
            message = f"rank 0 cannot write {error.filename or temporary}: {_reason(error)}; {INTACT}"
            return FinishResult(error=message + self._clean_up(temporary))
        try:
            self.disk.replace_file(self.root / LATEST_NAME, f"{self.final.name}\n".encode())
            removed = remove_old(self.disk, self.root, self.keep, self.step)
        except OSError as error:
            return FinishResult(
                error=f"{self.final} is complete, but then {error.filename or self.root} failed: {_reason(error)}"
            )
        return FinishResult(SaveReport(self.final, manifest.num_bytes, time.monotonic() - self.started, removed))

    def _existing_report(self) -> SaveReport | None:
        """Return a report if the folder already holds this state, or None if it is damaged.

        Raises CheckpointError if it holds another state.
        """
        try:
            manifest = open_folder(self.final).manifest
        except CheckpointError:
            return None
        if manifest.state != self.extras.state:
            raise CheckpointError(
                f"{self.final} already exists with another state; saving never overwrites; "
                "choose another --save or move it away"
            )
        return SaveReport(self.final, manifest.num_bytes, 0.0, (), f"{self.final} was already saved and is complete")

    def _commit(self, temporary: Path, written: Sequence[ShardResult]) -> Manifest:
        errors = [result for result in written if isinstance(result, str)]
        if errors:
            others = f" (and {len(errors) - 1} other ranks failed)" if len(errors) > 1 else ""
            raise CheckpointError(errors[0] + others)
        shards = [result for result in written if isinstance(result, WrittenShard)]
        for shard in shards:
            path = temporary / shard.name
            found = path.stat().st_size if path.exists() else None
            if found != shard.file.num_bytes:
                seen = "does not see" if found is None else f"sees {found} bytes of"
                raise CheckpointError(
                    f"rank 0 {seen} {path}, to which its rank wrote {shard.file.num_bytes} bytes: "
                    f"{NOT_SHARED}; {INTACT}"
                )
        files = {shard.name: shard.file for shard in shards} | self._write_extras(temporary)
        tensors = _merge([box for shard in shards for box in shard.boxes])
        manifest = Manifest(self.step, len(written), self.block_bytes, self.extras.state, files, tensors)
        self.disk.write_file(temporary / MANIFEST_NAME, manifest.to_json().encode())
        self.disk.sync_folder(temporary)
        self.disk.rename(temporary, self.final)
        return manifest

    def _write_extras(self, temporary: Path) -> dict[str, SavedFile]:
        """Write configuration and tokenizer. Returns their entries in the manifest."""
        contents = {CONFIG_NAME: self.extras.config_text.encode()}
        contents |= {f"{TOKENIZER_NAME}/{name}": content for name, content in self.extras.tokenizer.items()}
        if self.extras.tokenizer:
            self.disk.make_folder(temporary / TOKENIZER_NAME)
        for name, content in contents.items():
            self.disk.write_file(temporary / name, content)
        if self.extras.tokenizer:
            self.disk.sync_folder(temporary / TOKENIZER_NAME)
        return {name: SavedFile(len(content), zlib.crc32(content)) for name, content in contents.items()}

    def _clean_up(self, temporary: Path) -> str:
        """Remove the temporary folder. Returns a remark if that fails."""
        try:
            if temporary.exists():
                self.disk.remove(temporary)
        except OSError as error:
            return f" ({temporary} could not be removed: {_reason(error)}; the next start will try again)"
        return ""


def _merge(boxes: Sequence[WrittenBox]) -> dict[str, SavedTensor]:
    """Group the boxes of all ranks by tensor. Raises CheckpointError unless each tensor is covered exactly once."""
    by_name: dict[str, list[WrittenBox]] = {}
    for box in boxes:
        by_name.setdefault(box.name, []).append(box)
    tensors = {}
    for name, members in sorted(by_name.items()):
        kinds = {(member.dtype, member.shape) for member in members}
        if len(kinds) > 1:
            raise CheckpointError(f"{name}: the ranks disagree on dtype and shape: {sorted(kinds)}")
        check_covered(name, members[0].shape, [member.saved.box for member in members])
        tensors[name] = SavedTensor(members[0].dtype, members[0].shape, tuple(member.saved for member in members))
    return tensors


def _reason(error: OSError) -> str:
    return f"{error.strerror} (errno {error.errno})" if error.errno else str(error)
