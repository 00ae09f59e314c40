"""`starts.json`: how often a job was started without progress, stored next to its checkpoints. Imports no torch.

Rank 0 replaces the file once per start, before the ranks rendezvous; a run that completes removes it. Restarts of the
job find it there, whether torchrun or SLURM makes them.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megapipe.checkpoint.disk import Disk, read_regular, reason
from megapipe.checkpoint.folder import find_checkpoint, read_rollbacks, rollbacks_before
from megapipe.errors import CheckpointError, NoProgressError

STARTS_NAME = "starts.json"
MAX_STARTS = 2  # from the same checkpoint


@dataclass(frozen=True)
class Starts:
    """Consecutive starts of a job without progress from one to the next, oldest first."""

    job: str | None  # its name, if the launcher gives one
    step: int  # newest complete checkpoint, -1 without one
    rollbacks: int  # made so far; after one, the newest checkpoint is an older one although the run has made progress
    times: tuple[float, ...]  # Unix seconds
    is_restart: bool = False  # the last start was an automatic restart of the job, not one that a person asked for

    @property
    def exhausted(self) -> bool:
        """True if the job must not be started from here again."""
        return len(self.times) > MAX_STARTS

    def followed_by(self, start: Starts) -> Starts:
        """Return the record with one more start. Only restarts of the same job without progress add up."""
        is_restart = start.is_restart or (start.job is not None and start.job == self.job)
        has_progress = (start.rollbacks, start.step) > (self.rollbacks, self.step)
        earlier = () if has_progress or not is_restart else self.times
        return Starts(start.job, start.step, start.rollbacks, (*earlier, *start.times), is_restart)


def count_start(root: Path, job: str | None, is_restart: bool) -> Starts:
    """Record a start of the run that saves in `root`; a start too many is returned but not recorded. For rank 0 alone.

    Raises CheckpointError if the file cannot be written.
    """
    step, rollbacks = -1, 0
    with suppress(CheckpointError):  # all are damaged; loading will report it
        found = find_checkpoint(root)
        if found is not None:
            step, made = found.step, read_rollbacks(root)
            rollbacks = made[-1].number if made else rollbacks_before(found.manifest.state)
    start = Starts(job, step, rollbacks, (time.time(),), is_restart)
    before = _read(root / STARTS_NAME)
    starts = start if before is None else before.followed_by(start)
    if starts.exhausted:
        return starts
    disk = Disk()
    try:
        disk.make_parents(root / STARTS_NAME)
        disk.replace_file(root / STARTS_NAME, json.dumps(asdict(starts)).encode())
    except OSError as error:
        raise CheckpointError(f"--save {root} cannot be written: {reason(error)}") from None
    return starts


def clear_starts(root: Path) -> None:
    """Remove the record of a completed run. A failure does no harm: only restarts of the same job count."""
    with suppress(OSError):
        (root / STARTS_NAME).unlink(missing_ok=True)


def no_progress_error(starts: Starts, root: Path, last_words: str | None) -> NoProgressError:
    """Return the error for a start too many. last_words: the previous run's last error message, if it is known."""
    checkpoint = f"the beginning, since {root} holds no checkpoint"
    if starts.step >= 0:
        checkpoint = f"step {starts.step}, the newest complete checkpoint of {root}"
    at = " and ".join(time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment)) for moment in starts.times[:-1])
    last = f" The last one ended with: {last_words}" if last_words else ""
    return NoProgressError(
        f"this would be start number {len(starts.times)} from {checkpoint}; the previous ones ({at}) ended before "
        f"another checkpoint was complete.{last} Fix the cause (or save more often), then submit a new job; to requeue "
        f"this one, remove {root / STARTS_NAME} first"
    )


def _read(path: Path) -> Starts | None:
    """Return the record, or None if the file is missing or invalid: counting then starts again."""
    try:
        content: dict[str, Any] = json.loads(read_regular(path))
        step, rollbacks = int(content["step"]), int(content["rollbacks"])
        times = tuple(map(float, content["times"]))
        return Starts(content["job"], step, rollbacks, times, bool(content["is_restart"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
