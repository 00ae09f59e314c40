"""`Starts`: how often a job has been started from one and the same place, in a small file beside its checkpoints. Imports no torch.

Rank 0 writes `starts.json` once at every start, before the ranks meet, by a rename; a run that came to its end removes it. Whoever starts
the job again, torchrun, SLURM or both, finds it there.
"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megapipe.checkpoint.disk import Disk
from megapipe.checkpoint.folder import find_checkpoint, temporary_name
from megapipe.checkpoint.rollbacks import read_rollbacks, rollbacks_before
from megapipe.errors import CheckpointError, NoProgressError

STARTS_NAME = "starts.json"
MOST_FROM_ONE_PLACE = 2


@dataclass(frozen=True)
class Starts:
    """Starts of a job in a row, oldest first, none of which has come further than the one before.

    job: its name, None where the launcher gives none. step: of the newest complete checkpoint, -1: there is none. rollbacks: made so
    far; after one the newest checkpoint is an older one, and yet the run has come further. times: Unix seconds. is_restart: the last of
    them is a restart of the job, not a new wish of a person.
    """

    job: str | None
    step: int
    rollbacks: int
    times: tuple[float, ...]
    is_restart: bool = False

    @property
    def is_hopeless(self) -> bool:
        """Another start from here has been tried often enough."""
        return len(self.times) > MOST_FROM_ONE_PLACE

    def then(self, following: Starts) -> Starts:
        """With one more start. Only restarts of the same job are counted, and only while there is no progress."""
        is_restart = following.is_restart or (following.job is not None and following.job == self.job)
        further = (following.rollbacks, following.step) > (self.rollbacks, self.step)
        earlier = () if further or not is_restart else self.times
        return Starts(following.job, following.step, following.rollbacks, (*earlier, *following.times), is_restart)


def count_start(root: Path, job: str | None, is_restart: bool, disk: Disk | None = None) -> Starts:
    """Count a start of the run that saves in `root`; a hopeless one is told and not written down. Called by rank 0 alone.

    Raises CheckpointError if the file cannot be written.
    """
    step, rollbacks = newest_place(root)
    following = Starts(job, step, rollbacks, (time.time(),), is_restart)
    before = _read(root / STARTS_NAME)
    starts = following if before is None else before.then(following)
    if starts.is_hopeless:
        return starts
    disk = disk or Disk()
    temporary = root / temporary_name(STARTS_NAME, secrets.token_hex(8))
    try:
        disk.make_parents(temporary)
        disk.write_file(temporary, json.dumps(asdict(starts)).encode())
        disk.rename(temporary, root / STARTS_NAME)
    except OSError as error:
        raise CheckpointError(f"--save {root} cannot be written to: {error.strerror} (errno {error.errno})") from None
    return starts


def forget_starts(root: Path) -> None:
    """The run has come to its end. A disk that refuses leaves the file, which counts only restarts of the same job."""
    try:
        (root / STARTS_NAME).unlink(missing_ok=True)
    except OSError:
        return


def newest_place(root: Path) -> tuple[int, int]:
    """(step of the newest complete checkpoint, rollbacks its run has made); (-1, 0) where there is none."""
    try:
        found = find_checkpoint(root)
    except CheckpointError:  # nothing but damage: loading says so
        return -1, 0
    if found is None:
        return -1, 0
    rollbacks = read_rollbacks(root)
    return found.step, rollbacks[-1].number if rollbacks else rollbacks_before(found.manifest.state)


def no_progress(starts: Starts, root: Path, last_words: str | None) -> NoProgressError:
    """The error of a hopeless start. last_words: of the run before, if they are known."""
    place = (
        f"step {starts.step}, the newest complete checkpoint of {root}"
        if starts.step >= 0
        else f"the beginning: {root} holds none"
    )
    at = " and ".join(time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment)) for moment in starts.times[:-1])
    last = f" The last one said: {last_words}" if last_words else ""
    return NoProgressError(
        f"this would be start number {len(starts.times)} from {place}; those of {at} ended before another checkpoint was complete.{last} "
        f"Remove the cause (or save more often), then start the job anew; a requeued one needs {root / STARTS_NAME} removed first"
    )


def _read(path: Path) -> Starts | None:
    """None where there is no such file, or none that makes sense: a count is then begun anew."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return Starts(
            content["job"],
            int(content["step"]),
            int(content["rollbacks"]),
            tuple(map(float, content["times"])),
            bool(content["is_restart"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
