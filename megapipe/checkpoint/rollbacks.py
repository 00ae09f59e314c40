"""`rollbacks.json`: the rollbacks of a run, stored next to its checkpoints. Imports no torch.

An entry takes effect when the file is renamed into place, whatever happens to the process afterwards. It also
identifies the checkpoints that the rollback abandoned: their step is later than the one rolled back to, and their own
state counts fewer rollbacks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megapipe.checkpoint.disk import Disk
from megapipe.errors import CheckpointError

ROLLBACKS_NAME = "rollbacks.json"


@dataclass(frozen=True)
class Rollback:
    """One rollback.

    number: counted from 1. from_step: last step of the abandoned part of the run. to_step: step that the run resumed
    from. first_sample, past_sample: range of the data set that is skipped from then on. time: Unix seconds. account:
    of the run after the rollback (train.state.Account).
    """

    number: int
    from_step: int
    to_step: int
    first_sample: int
    past_sample: int
    reason: str
    time: float
    account: dict[str, Any]


def read_rollbacks(root: Path) -> tuple[Rollback, ...]:
    """Return all rollbacks, oldest first, or none if there is no file.

    Raises CheckpointError for a damaged file: ignoring it would load abandoned weights.
    """
    path = root / ROLLBACKS_NAME
    try:
        return tuple(Rollback(**entry) for entry in json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def write_rollback(root: Path, rollback: Rollback, disk: Disk) -> None:
    """Append a rollback. Raises OSError, CheckpointError."""
    entries = [asdict(entry) for entry in (*read_rollbacks(root), rollback)]
    disk.replace_file(root / ROLLBACKS_NAME, (json.dumps(entries, indent=1) + "\n").encode())


def abandoned_by(rollbacks: Sequence[Rollback], step: int, num_rollbacks: int) -> Rollback | None:
    """Return the rollback that abandoned step `step` of a run that had made `num_rollbacks`, or None."""
    return next((entry for entry in rollbacks if entry.number > num_rollbacks and step > entry.to_step), None)


def rollbacks_before(state: dict[str, Any]) -> int:
    """Return the number of rollbacks that a checkpoint's state counts."""
    return int((state.get("account") or {}).get("rollbacks", 0))


def account_of(state: dict[str, Any], rollbacks: Sequence[Rollback]) -> dict[str, Any] | None:
    """Return the account with which a run resumes from a checkpoint's state.

    This is the account of the last rollback if it came after the checkpoint, else the checkpoint's own; None if an
    older version wrote the checkpoint without one.
    """
    before = rollbacks_before(state)
    is_newer = bool(rollbacks) and rollbacks[-1].number > before
    if is_newer and abandoned_by(rollbacks, int(state["training"]["step"]), before) is None:
        return rollbacks[-1].account
    return state.get("account")
