"""Saving: all ranks save together, with training waiting (`save_checkpoint`) or going on (`BackgroundSave`).

What a crash leaves after each step of an `Attempt`:
1. rank 0 creates `.step_N.tmp-TOKEN`                                   no checkpoint
2. every rank writes and syncs its shard there                          no checkpoint
3. rank 0 checks all shards, writes and syncs config and manifest       no checkpoint
4. rank 0 renames the folder to `step_N` and syncs the root             a complete checkpoint
5. rank 0 updates `latest`, then removes old checkpoints                a complete checkpoint

In background, a thread on each rank writes copies of the tensors, and then a thread on rank 0 commits; zlib.crc32,
write and fsync release the GIL. The ranks communicate in their main threads only, where all other collectives are:
the training loop reduces `is_ready` together with its other values after every step, and calls `advance` once all
ranks are ready.
"""

from __future__ import annotations

import dataclasses
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapipe.checkpoint.disk import Disk, reason, temporary_name
from megapipe.checkpoint.folder import (
    CONFIG_NAME,
    KEEP_ALL,
    LATEST_NAME,
    TOKENIZER_NAME,
    Retention,
    folder_name,
    open_folder,
    remove_old,
)
from megapipe.checkpoint.manifest import MANIFEST_NAME, Manifest, SavedFile, SavedTensor, check_covered
from megapipe.checkpoint.shard import BLOCK_BYTES, TensorBox, WrittenShard, shard_name, write_shard
from megapipe.comm.collectives import broadcast_object, gather_objects
from megapipe.comm.groups import Group
from megapipe.errors import CheckpointError, NewerVersionError

ALIGNMENT = 64  # bytes
INTACT = "checkpoints saved earlier are intact"
NOT_SHARED = "the checkpoint directory is not shared between the nodes"

ShardResult = WrittenShard | CheckpointError | None  # of one rank: None if it has nothing to save


@dataclass(frozen=True)
class SaveReport:
    """The outcome of a successful save."""

    path: Path
    num_bytes: int  # of all files of all ranks
    seconds: float
    removed: tuple[Path, ...] = ()  # old checkpoints
    remark: str = ""  # set if nothing had to be written
    waited_seconds: float | None = None  # time that training was blocked, if the save ran in background


@dataclass(frozen=True)
class Extras:
    """Content other than tensors. state: plain JSON values. tokenizer: contents of its files by name."""

    state: dict[str, Any]
    config_text: str
    tokenizer: Mapping[str, bytes] = field(default_factory=dict)


@dataclass
class Attempt:
    """The steps of one save on this rank. keep: which older checkpoints to keep once this one is complete.

    No method communicates, so that each can run in a thread. An error is returned, to be sent to all ranks.
    """

    disk: Disk
    root: Path
    step: int
    extras: Extras
    keep: Retention
    block_bytes: int

    def __post_init__(self) -> None:
        self.final = self.root / folder_name(self.step)
        self.started = time.monotonic()

    def begin(self) -> Path | SaveReport | CheckpointError:
        """Create and return the temporary folder, or report that this checkpoint already exists. For rank 0."""
        try:
            if self.final.exists():
                try:
                    manifest = open_folder(self.final).manifest
                except NewerVersionError as error:
                    return error
                except CheckpointError:  # not a valid checkpoint, but someone may want to look at it
                    self.disk.rename(self.final, self.root / f"{self.final.name}.damaged-{secrets.token_hex(4)}")
                else:
                    states = (manifest.state, self.extras.state)
                    others = dict.fromkeys(("data", "tokenizer", "batches", "versions"))
                    saved, own = (state | others for state in states)
                    if saved == own:  # a run that is started once more after its end may read its data elsewhere
                        remark = f"{self.final} was already saved and is complete"
                        return SaveReport(self.final, manifest.num_bytes, 0.0, (), remark)
                    rule = "saving never overwrites; choose another --save or move it away"
                    return CheckpointError(f"{self.final} already exists with another state; {rule}")
            temporary = self.root / temporary_name(self.final.name)
            self.disk.make_folder(temporary)
        except OSError as error:
            return CheckpointError(f"cannot save in {self.root}: {reason(error)}; {INTACT}")
        except CheckpointError as error:
            return error
        return temporary

    def write(self, temporary: Path, tensors: Sequence[TensorBox], global_rank: int) -> ShardResult:
        """Write this rank's shard."""
        if not tensors:
            return None
        path = temporary / shard_name(global_rank)
        try:
            return write_shard(self.disk, path, tensors, self.block_bytes)
        except FileNotFoundError:
            seen = f"rank {global_rank} does not see {temporary}, which rank 0 created"
            return CheckpointError(f"{seen}: {NOT_SHARED}; {INTACT}")
        except OSError as error:
            return CheckpointError(f"rank {global_rank} cannot write {path}: {reason(error)}; {INTACT}")

    def finish(self, temporary: Path, written: Sequence[ShardResult]) -> SaveReport | CheckpointError:
        """Commit the checkpoint and remove old ones, or clean up and return the error. For rank 0."""
        try:
            manifest = self._commit(temporary, written)
        except CheckpointError as error:
            return type(error)(f"{error}{self._clean_up(temporary)}")
        except OSError as error:
            message = f"rank 0 cannot write {error.filename or temporary}: {reason(error)}; {INTACT}"
            return CheckpointError(message + self._clean_up(temporary))
        try:
            self.disk.replace_file(self.root / LATEST_NAME, f"{self.final.name}\n".encode())
            removed = remove_old(self.disk, self.root, self.keep, self.step)
        except OSError as error:
            failed = f"then {error.filename or self.root} failed: {reason(error)}"
            return CheckpointError(f"{self.final} is complete, but {failed}")
        except CheckpointError as error:
            return type(error)(f"{self.final} is complete, but then: {error}")
        return SaveReport(self.final, manifest.num_bytes, time.monotonic() - self.started, removed)

    def _commit(self, temporary: Path, written: Sequence[ShardResult]) -> Manifest:
        errors = [result for result in written if isinstance(result, CheckpointError)]
        if errors:
            others = f" (and {len(errors) - 1} other ranks failed)" if len(errors) > 1 else ""
            raise CheckpointError(f"{errors[0]}{others}")
        shards = [result for result in written if isinstance(result, WrittenShard)]
        for shard in shards:
            path, expected = temporary / shard.name, shard.file.num_bytes
            found = path.stat().st_size if path.exists() else None
            if found != expected:
                seen = "does not see" if found is None else f"sees {found} bytes of"
                problem = f"rank 0 {seen} {path}, to which its rank wrote {expected} bytes"
                raise CheckpointError(f"{problem}: {NOT_SHARED}; {INTACT}")
        files = {shard.name: shard.file for shard in shards}
        contents = {CONFIG_NAME: self.extras.config_text.encode()}
        contents |= {f"{TOKENIZER_NAME}/{name}": content for name, content in self.extras.tokenizer.items()}
        if self.extras.tokenizer:
            self.disk.make_folder(temporary / TOKENIZER_NAME)
        for name, content in contents.items():
            self.disk.write_file(temporary / name, content)
            files[name] = SavedFile(len(content), zlib.crc32(content))
        if self.extras.tokenizer:
            self.disk.sync_folder(temporary / TOKENIZER_NAME)
        tensors = _merge([tensor for shard in shards for tensor in shard.tensors])
        manifest = Manifest(self.step, len(written), self.block_bytes, self.extras.state, files, tensors)
        self.disk.write_file(temporary / MANIFEST_NAME, manifest.to_json().encode())
        self.disk.sync_folder(temporary)
        self.disk.rename(temporary, self.final)
        return manifest

    def _clean_up(self, temporary: Path) -> str:
        """Remove the temporary folder. Returns a remark if that fails."""
        try:
            if temporary.exists():
                self.disk.remove(temporary)
        except OSError as error:
            return f" ({temporary} could not be removed: {reason(error)}; the next start will try again)"
        except CheckpointError:
            pass  # another run owns the directory, and removes it
        return ""


def _merge(parts: Sequence[tuple[str, SavedTensor]]) -> dict[str, SavedTensor]:
    """Join the boxes of all ranks by tensor name. Raises CheckpointError unless each tensor is covered exactly once."""
    by_name: dict[str, list[SavedTensor]] = {}
    for name, part in parts:
        by_name.setdefault(name, []).append(part)
    tensors = {}
    for name, members in sorted(by_name.items()):
        kinds = {(member.dtype, member.shape) for member in members}
        if len(kinds) > 1:
            raise CheckpointError(f"{name}: the ranks disagree on dtype and shape: {sorted(kinds)}")
        dtype, shape = kinds.pop()
        boxes = tuple(saved for member in members for saved in member.boxes)
        check_covered(name, shape, [saved.box for saved in boxes])
        tensors[name] = SavedTensor(dtype, shape, boxes)
    return tensors


def save_checkpoint(
    root: Path,
    step: int,
    tensors: Iterable[TensorBox],
    extras: Extras,
    group: Group,
    keep: Retention = KEEP_ALL,
    disk: Disk | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> SaveReport:
    """Save the boxes that this rank owns; called by all ranks of the group, which together own each element once.

    keep: which older complete checkpoints to keep. block_bytes: a multiple of 8. A complete checkpoint of the same
    step and state is left alone; one of another state is an error, since saving never overwrites. Raises
    CheckpointError on every rank if any rank fails; the temporary folder is then removed.
    """
    attempt = Attempt(disk or Disk(), root, step, extras, keep, block_bytes)
    begun = from_rank_0(attempt.begin() if group.rank == 0 else None, group)
    if isinstance(begun, SaveReport):
        return begun
    written = gather_objects(attempt.write(begun, list(tensors), group.global_rank), group)
    report: SaveReport = from_rank_0(attempt.finish(begun, written) if group.rank == 0 else None, group)
    return report


def from_rank_0(result: Any, group: Group) -> Any:
    """Return rank 0's result on all ranks, or raise it on all of them if it is a CheckpointError."""
    result = broadcast_object(result, group)
    if isinstance(result, CheckpointError):
        raise result
    return result


class BackgroundSave:
    """One save during training. All ranks construct, advance and finish it together, in their main threads.

    The constructor returns when the tensors are copied into `staging`, which must not be used again before the save
    is over. Raises CheckpointError on all ranks if the save cannot begin.
    """

    def __init__(self, attempt: Attempt, tensors: Iterable[TensorBox], group: Group, staging: Staging) -> None:
        began = time.monotonic()
        self.step = attempt.step
        self._attempt, self._group = attempt, group
        self._report: SaveReport | None = None
        self._result: Any = None
        self._writing = True
        begun = from_rank_0(attempt.begin() if group.rank == 0 else None, group)
        if isinstance(begun, SaveReport):
            self._report = begun
            return
        self._temporary: Path = begun
        staged = staging.copy(list(tensors))
        self._waited_seconds = time.monotonic() - began
        rank = group.global_rank
        failed = f"rank {rank} cannot write its shard"
        self._start(lambda: attempt.write(self._temporary, staged(), rank), "checkpoint shard", failed)

    @property
    def is_ready(self) -> bool:
        """True if this rank's thread is done, so that the next `advance` will not wait for it."""
        return self._report is not None or not self._thread.is_alive()

    def advance(self) -> SaveReport | None:
        """Start the commit, or end the save and return its report; called by all ranks once all are ready.

        Raises CheckpointError on all ranks if the save failed; it is over in this case as well.
        """
        if self._report is not None:
            return self._report
        self._thread.join()
        if self._writing:
            self._writing = False
            written = gather_objects(self._result, self._group)

            def commit() -> SaveReport | CheckpointError | None:
                return self._attempt.finish(self._temporary, written) if self._group.rank == 0 else None

            self._start(commit, "checkpoint commit", f"rank 0 cannot commit {self._temporary}")
            return None
        report: SaveReport = from_rank_0(self._result, self._group)
        return dataclasses.replace(report, waited_seconds=self._waited_seconds)

    def finish(self) -> SaveReport:
        """Wait until the save is over. Raises CheckpointError on all ranks if it failed."""
        report = None
        while report is None:
            report = self.advance()
        return report

    def _start(self, work: Callable[[], Any], name: str, failed: str) -> None:
        def run() -> None:
            try:
                self._result = work()
            except BaseException as error:  # an exception in a thread would go unnoticed
                self._result = CheckpointError(f"{failed}: {type(error).__name__}: {error}; {INTACT}")

        # a daemon, so that a process may exit without waiting; the next start removes the interrupted save
        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()


class Staging:
    """A host buffer for copies of tensors, reused by every save; pinned if the tensors are on a GPU."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, tensors: Sequence[TensorBox]) -> None:
        """Allocate the memory for copies of these tensors, ahead of the first save."""
        total = sum(_aligned_bytes(tensor) for tensor in tensors)
        if self._memory.numel() < total:
            on_gpu = any(tensor.values.device.type == "cuda" for tensor in tensors)
            self._memory = torch.empty(0, dtype=torch.uint8)  # free the old buffer before allocating the new one
            # zeros: touches the pages now, so that the first save does not wait for page faults
            self._memory = torch.zeros(total, dtype=torch.uint8, pin_memory=on_gpu)

    def copy(self, tensors: Sequence[TensorBox]) -> Callable[[], Sequence[TensorBox]]:
        """Copy these boxes and return a function that gives the copies. The tensors may be changed at once.

        Copies from a GPU are queued on the current stream, ahead of later changes to the tensors; the function waits
        for them.
        """
        self.reserve(tensors)
        staged, start = [], 0
        for tensor in tensors:
            values: Tensor = self._memory[start : start + tensor.num_bytes].view(tensor.values.dtype)
            values.copy_(tensor.values.reshape(-1), non_blocking=True)
            staged.append(dataclasses.replace(tensor, values=values))
            start += _aligned_bytes(tensor)
        device = tensors[0].values.device if tensors else torch.device("cpu")
        if device.type != "cuda":
            return lambda: staged
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))

        def wait() -> Sequence[TensorBox]:
            event.synchronize()
            return staged

        return wait


def _aligned_bytes(tensor: TensorBox) -> int:
    return -(-tensor.num_bytes // ALIGNMENT) * ALIGNMENT
