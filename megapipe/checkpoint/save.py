"""`save_checkpoint` and `BackgroundSave`: the ranks carry an `Attempt` through, while the training waits or beside it.

Beside it, a thread of each rank writes what was copied out of the live tensors, and then one of rank 0 commits. zlib.crc32, write and
fsync release Python's lock. The ranks agree in the main thread alone, where all other collectives are: who trains asks `is_ready`, adds
that to what the ranks reduce after every step anyway, and calls `advance` when all are.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from megapipe.checkpoint.attempt import INTACT, Answer, Attempt, End, Extras, SaveReport, Start
from megapipe.checkpoint.disk import Disk
from megapipe.checkpoint.retention import KEEP_ALL, Retention
from megapipe.checkpoint.shard_file import BLOCK_BYTES
from megapipe.checkpoint.staging import Staging
from megapipe.checkpoint.tensor_box import TensorBox
from megapipe.comm.collectives import broadcast_object, gather_objects
from megapipe.comm.groups import Group
from megapipe.errors import CheckpointError


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
    """Save the boxes that this rank answers for; called by all ranks of the group, over which each element is given once.

    keep: which older complete checkpoints stay afterwards. A complete checkpoint of the same step and state is left as it is; one of
    another state is an error: saving never overwrites. block_bytes: a multiple of 8.
    Raises CheckpointError on every rank if any rank fails; the temporary folder is removed then.
    """
    attempt = Attempt(disk or Disk(), root, step, extras, keep, block_bytes)
    start = _begin(attempt, group)
    if start.done_already is not None:
        return start.done_already
    assert start.temporary is not None
    written = gather_objects(attempt.write(start.temporary, list(tensors), group.global_rank), group)
    return _reported(broadcast_object(attempt.finish(start.temporary, written) if group.rank == 0 else None, group))


class BackgroundSave:
    """One save beside the training. Made, advanced and finished by all ranks together, in their main threads.

    Returns from its making when the tensors are copied into `staging`, which must not be used again before the save is over.
    Raises CheckpointError on all ranks where it cannot begin.
    """

    def __init__(self, attempt: Attempt, tensors: Iterable[TensorBox], group: Group, staging: Staging) -> None:
        began = time.monotonic()
        self.step = attempt.step
        self._attempt = attempt
        self._group = group
        self._report: SaveReport | None = None
        self._result: Any = None
        self._writing = True
        start = _begin(attempt, group)
        if start.done_already is not None:
            self._report = start.done_already
            return
        assert start.temporary is not None
        self._temporary: Path = start.temporary
        staged = staging.copy(list(tensors))
        self._waited_seconds = time.monotonic() - began
        self._start(lambda: self._write(staged), "checkpoint shard")

    @property
    def is_ready(self) -> bool:
        """What this rank had to do before the next `advance` is done."""
        return self._report is not None or not self._thread.is_alive()

    def advance(self) -> SaveReport | None:
        """Begin the commit, or end the save; called by all ranks when all are ready. None: not over yet.

        Raises CheckpointError on all ranks if the save failed; it is over then, too.
        """
        if self._report is not None:
            return self._report
        self._thread.join()
        if self._writing:
            self._writing = False
            written = gather_objects(self._result, self._group)
            self._start(lambda: self._commit(written), "checkpoint commit")
            return None
        report = _reported(broadcast_object(self._result, self._group))
        return dataclasses.replace(report, waited_seconds=self._waited_seconds)

    def finish(self) -> SaveReport:
        """Wait for the end. Raises CheckpointError on all ranks if the save failed."""
        report = None
        while report is None:
            report = self.advance()
        return report

    def _start(self, work: Callable[[], Answer | End], name: str) -> None:
        def run() -> None:
            self._result = work()

        # a daemon: who leaves at once does not wait for it, and a torn save is cleaned up by the next start
        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    def _write(self, staged: Callable[[], Sequence[TensorBox]]) -> Answer:
        try:
            return self._attempt.write(self._temporary, staged(), self._group.global_rank)
        except BaseException as error:  # a thread's exception would be seen by nobody
            return f"rank {self._group.global_rank} cannot write its shard: {type(error).__name__}: {error}; {INTACT}"

    def _commit(self, written: Sequence[Answer]) -> End | None:
        if self._group.rank != 0:
            return None
        try:
            return self._attempt.finish(self._temporary, written)
        except BaseException as error:
            return End(error=f"rank 0 cannot commit {self._temporary}: {type(error).__name__}: {error}; {INTACT}")


def _begin(attempt: Attempt, group: Group) -> Start:
    start: Start = broadcast_object(attempt.begin() if group.rank == 0 else None, group)
    if start.error is not None:
        raise CheckpointError(start.error)
    return start


def _reported(end: End) -> SaveReport:
    if end.report is None:
        raise CheckpointError(end.error or "saving failed")
    return end.report
