"""`save_checkpoint` and `BackgroundSave`: all ranks save together, with training waiting or going on.

In background, a thread on each rank writes copies of the tensors, and then a thread on rank 0 commits; zlib.crc32,
write and fsync release the GIL. The ranks communicate in their main threads only, where all other collectives are:
the training loop reduces `is_ready` together with its other values after every step, and calls `advance` once all
ranks are ready.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapipe.checkpoint.attempt import INTACT, Attempt, BeginResult, Extras, FinishResult, SaveReport, ShardResult
from megapipe.checkpoint.disk import Disk
from megapipe.checkpoint.folder import KEEP_ALL, Retention
from megapipe.checkpoint.shard import BLOCK_BYTES
from megapipe.checkpoint.tensor_box import TensorBox
from megapipe.comm.collectives import broadcast_object, gather_objects
from megapipe.comm.groups import Group
from megapipe.errors import CheckpointError

ALIGNMENT = 64  # bytes


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
    begun = _begin(attempt, group)
    if begun.already_done is not None:
        return begun.already_done
    assert begun.temporary is not None
    written = gather_objects(attempt.write(begun.temporary, list(tensors), group.global_rank), group)
    return _report(broadcast_object(attempt.finish(begun.temporary, written) if group.rank == 0 else None, group))


class BackgroundSave:
    """One save during training. All ranks construct, advance and finish it together, in their main threads.

    The constructor returns when the tensors are copied into `staging`, which must not be used again before the save
    is over. Raises CheckpointError on all ranks if the save cannot begin.
    """

    def __init__(self, attempt: Attempt, tensors: Iterable[TensorBox], group: Group, staging: Staging) -> None:
        began = time.monotonic()
        self.step = attempt.step
        self._attempt = attempt
        self._group = group
        self._report: SaveReport | None = None
        self._result: Any = None
        self._writing = True
        begun = _begin(attempt, group)
        if begun.already_done is not None:
            self._report = begun.already_done
            return
        assert begun.temporary is not None
        self._temporary: Path = begun.temporary
        staged = staging.copy(list(tensors))
        self._waited_seconds = time.monotonic() - began
        self._start(lambda: self._write(staged), "checkpoint shard")

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
            self._start(lambda: self._commit(written), "checkpoint commit")
            return None
        report = _report(broadcast_object(self._result, self._group))
        return dataclasses.replace(report, waited_seconds=self._waited_seconds)

    def finish(self) -> SaveReport:
        """Wait until the save is over. Raises CheckpointError on all ranks if it failed."""
        report = None
        while report is None:
            report = self.advance()
        return report

    def _start(self, work: Callable[[], ShardResult | FinishResult], name: str) -> None:
        def run() -> None:
            self._result = work()

        # a daemon, so that a process may exit without waiting; the next start removes the interrupted save
        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    def _write(self, staged: Callable[[], Sequence[TensorBox]]) -> ShardResult:
        try:
            return self._attempt.write(self._temporary, staged(), self._group.global_rank)
        except BaseException as error:  # an exception in a thread would go unnoticed
            return f"rank {self._group.global_rank} cannot write its shard: {type(error).__name__}: {error}; {INTACT}"

    def _commit(self, written: Sequence[ShardResult]) -> FinishResult | None:
        if self._group.rank != 0:
            return None
        try:
            return self._attempt.finish(self._temporary, written)
        except BaseException as error:
            message = f"rank 0 cannot commit {self._temporary}: {type(error).__name__}: {error}; {INTACT}"
            return FinishResult(error=message)


class Staging:
    """A host buffer for copies of tensors, reused by every save; pinned if the tensors are on a GPU."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        return self._memory.numel()

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


def _begin(attempt: Attempt, group: Group) -> BeginResult:
    begun: BeginResult = broadcast_object(attempt.begin() if group.rank == 0 else None, group)
    if begun.error is not None:
        raise CheckpointError(begun.error)
    return begun


def _report(result: FinishResult) -> SaveReport:
    if result.report is None:
        raise CheckpointError(result.error or "saving failed")
    return result.report
