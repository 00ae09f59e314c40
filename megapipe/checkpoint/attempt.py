"""`Attempt`: one save. All ranks write their boxes beside, rank 0 looks at every file, writes the manifest and commits with one rename.

The order of events, each of which may be the last before a crash:
1. rank 0 makes `.step_N.tmp-TOKEN`                                    nothing is there
2. every rank writes and syncs its file                                nothing is there
3. rank 0 sees every file, writes configuration and manifest, syncs    nothing is there
4. rank 0 renames the folder to `step_N` and syncs the root            complete
5. rank 0 moves `latest`, then removes old checkpoints                 complete

Nothing here communicates, so that writing and committing can run beside the training; `save` has the ranks agree in between.
"""

from __future__ import annotations

import secrets
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megapipe.checkpoint.coverage import check_covered
from megapipe.checkpoint.disk import Disk
from megapipe.checkpoint.folder import (
    CONFIG_NAME,
    LATEST_NAME,
    TOKENIZER_NAME,
    folder_name,
    open_folder,
    temporary_name,
)
from megapipe.checkpoint.manifest import MANIFEST_NAME, Manifest, SavedFile, SavedTensor
from megapipe.checkpoint.retention import Retention, remove_old
from megapipe.checkpoint.shard_file import WrittenBox, WrittenShard, shard_name, write_shard
from megapipe.checkpoint.tensor_box import TensorBox
from megapipe.errors import CheckpointError

INTACT = "checkpoints saved earlier are intact"
NOT_SHARED = "the checkpoint directory is not shared between the nodes"

Answer = WrittenShard | str | None  # of one rank: what it wrote, what went wrong, or None if it has nothing to save


@dataclass(frozen=True)
class SaveReport:
    """path: of the checkpoint. num_bytes: of all files of all ranks. seconds: from the first to the commit. waited_seconds: of these, what
    the training stood still. removed: old checkpoints. remark: set if nothing had to be written."""

    path: Path
    num_bytes: int
    seconds: float
    removed: tuple[Path, ...] = ()
    remark: str = ""
    waited_seconds: float | None = None


@dataclass(frozen=True)
class Extras:
    """What rank 0 puts beside the tensors. state: plain JSON values. tokenizer: contents of its files by name."""

    state: dict[str, Any]
    config_text: str
    tokenizer: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Start:
    """What rank 0 tells the others before they write. Exactly one of the three is set."""

    temporary: Path | None = None
    done_already: SaveReport | None = None
    error: str | None = None


@dataclass(frozen=True)
class End:
    report: SaveReport | None = None
    error: str | None = None


class Attempt:
    """The steps of one save on this rank. keep: which checkpoints stay when this one is complete."""

    def __init__(self, disk: Disk, root: Path, step: int, extras: Extras, keep: Retention, block_bytes: int) -> None:
        self.disk = disk
        self.root = root
        self.step = step
        self.extras = extras
        self.keep = keep
        self.block_bytes = block_bytes
        self.final = root / folder_name(step)
        self.started = time.monotonic()

    def begin(self) -> Start:
        """Rank 0: is there something to do, and where."""
        try:
            if self.final.exists():
                done = self._saved_before()
                if done is not None:
                    return Start(done_already=done)
                # a damaged folder of this name is no checkpoint, but perhaps worth a look
                self.disk.rename(self.final, self.root / f"{self.final.name}.damaged-{secrets.token_hex(4)}")
            temporary = self.root / temporary_name(self.final.name, secrets.token_hex(8))
            self.disk.make_folder(temporary)
        except CheckpointError as error:
            return Start(error=str(error))
        except OSError as error:
            return Start(error=f"cannot save in {self.root}: {_reason(error)}; {INTACT}")
        return Start(temporary=temporary)

    def write(self, temporary: Path, tensors: Sequence[TensorBox], global_rank: int) -> Answer:
        """What this rank has to say after writing its boxes."""
        if not tensors:
            return None
        path = temporary / shard_name(global_rank)
        try:
            return write_shard(self.disk, path, tensors, self.block_bytes)
        except FileNotFoundError:
            return f"rank {global_rank} does not see {temporary}, which rank 0 made: {NOT_SHARED}; {INTACT}"
        except OSError as error:
            return f"rank {global_rank} cannot write {path}: {_reason(error)}; {INTACT}"

    def finish(self, temporary: Path, written: Sequence[Answer]) -> End:
        """Rank 0: commit, or clean up and say why not."""
        try:
            manifest = self._commit(temporary, written)
        except CheckpointError as error:
            return End(error=f"{error}{self._cleaned(temporary)}")
        except OSError as error:
            return End(
                error=f"rank 0 cannot write {error.filename or temporary}: {_reason(error)}; {INTACT}{self._cleaned(temporary)}"
            )
        try:
            self._move_latest()
            removed = remove_old(self.disk, self.root, self.keep, secrets.token_hex(8), self.step)
        except OSError as error:
            return End(
                error=f"{self.final} is complete, but then {error.filename or self.root} failed: {_reason(error)}"
            )
        return End(SaveReport(self.final, manifest.num_bytes, time.monotonic() - self.started, removed))

    def _saved_before(self) -> SaveReport | None:
        """A report if the folder holds this very state, None if it is damaged. Raises CheckpointError if it holds another state."""
        try:
            manifest = open_folder(self.final).manifest
        except CheckpointError:
            return None
        if manifest.state != self.extras.state:
            raise CheckpointError(
                f"{self.final} is there already, complete and of another state; saving never overwrites: "
                "give another --save or move it away"
            )
        return SaveReport(self.final, manifest.num_bytes, 0.0, (), f"{self.final} was saved before and is complete")

    def _commit(self, temporary: Path, written: Sequence[Answer]) -> Manifest:
        errors = [answer for answer in written if isinstance(answer, str)]
        if errors:
            raise CheckpointError(
                errors[0] + (f" (and {len(errors) - 1} other ranks failed)" if len(errors) > 1 else "")
            )
        shards = [answer for answer in written if isinstance(answer, WrittenShard)]
        _check_seen(temporary, shards)
        files = {shard.name: shard.file for shard in shards} | self._write_extras(temporary)
        tensors = _merge([box for shard in shards for box in shard.boxes])
        manifest = Manifest(self.step, len(written), self.block_bytes, self.extras.state, files, tensors)
        self.disk.write_file(temporary / MANIFEST_NAME, manifest.to_json().encode())
        self.disk.sync_folder(temporary)
        self.disk.rename(temporary, self.final)
        return manifest

    def _write_extras(self, temporary: Path) -> dict[str, SavedFile]:
        """Configuration and tokenizer, with checksums by name."""
        contents = {CONFIG_NAME: self.extras.config_text.encode()}
        contents |= {f"{TOKENIZER_NAME}/{name}": content for name, content in self.extras.tokenizer.items()}
        if self.extras.tokenizer:
            self.disk.make_folder(temporary / TOKENIZER_NAME)
        for name, content in contents.items():
            self.disk.write_file(temporary / name, content)
        if self.extras.tokenizer:
            self.disk.sync_folder(temporary / TOKENIZER_NAME)
        return {name: SavedFile(len(content), zlib.crc32(content)) for name, content in contents.items()}

    def _move_latest(self) -> None:
        temporary = self.root / temporary_name(LATEST_NAME, secrets.token_hex(8))
        self.disk.write_file(temporary, f"{self.final.name}\n".encode())
        self.disk.rename(temporary, self.root / LATEST_NAME)

    def _cleaned(self, temporary: Path) -> str:
        """Remove what was begun; a remark if that fails, too."""
        try:
            if temporary.exists():
                self.disk.remove(temporary)
        except OSError as error:
            return f" ({temporary} could not be removed: {_reason(error)}; the next start tries again)"
        return ""


def _check_seen(temporary: Path, shards: Sequence[WrittenShard]) -> None:
    for shard in shards:
        path = temporary / shard.name
        found = path.stat().st_size if path.exists() else None
        if found != shard.file.num_bytes:
            seen = "does not see" if found is None else f"sees {found} bytes of"
            raise CheckpointError(
                f"rank 0 {seen} {path}, of which its rank has written {shard.file.num_bytes} bytes: {NOT_SHARED}; {INTACT}"
            )


def _merge(boxes: Sequence[WrittenBox]) -> dict[str, SavedTensor]:
    """All ranks' boxes by tensor, each tensor covered exactly once. Raises CheckpointError if not."""
    found: dict[str, list[WrittenBox]] = {}
    for box in boxes:
        found.setdefault(box.name, []).append(box)
    for name, members in found.items():
        kinds = {(member.dtype, member.shape) for member in members}
        if len(kinds) > 1:
            raise CheckpointError(f"{name}: the ranks disagree about dtype and shape: {sorted(kinds)}")
        check_covered(name, members[0].shape, [member.saved.box for member in members])
    return {
        name: SavedTensor(m[0].dtype, m[0].shape, tuple(member.saved for member in m))
        for name, m in sorted(found.items())
    }


def _reason(error: OSError) -> str:
    return f"{error.strerror} (errno {error.errno})" if error.errno else str(error)
