"""`rollbacks.json`: what a run went back from, beside its checkpoints. Imports no torch.

An entry counts from the moment at which the file is renamed into place, whatever the process still does afterwards. Checkpoints made on
the way that was given up are known by it: they are later than the step gone back to, and their own state counts fewer rollbacks.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megapipe.checkpoint.disk import Disk
from megapipe.errors import CheckpointError

ROLLBACKS_NAME = "rollbacks.json"


@dataclass(frozen=True)
class Rollback:
    """number: from 1 on. from_step, to_step: given up, and gone on from. first_sample, past_sample: the window of the data set that is
    skipped from here on. account: of the run after it (train.state.Account). time: Unix seconds."""

    number: int
    from_step: int
    to_step: int
    first_sample: int
    past_sample: int
    reason: str
    time: float
    account: dict[str, Any]


def read_rollbacks(root: Path) -> tuple[Rollback, ...]:
    """In their order; none where there is no file. Raises CheckpointError if it is damaged: weights given up would be loaded."""
    path = root / ROLLBACKS_NAME
    try:
        return tuple(Rollback(**entry) for entry in json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def write_rollback(root: Path, rollback: Rollback, disk: Disk) -> None:
    """Add one. Raises OSError, CheckpointError."""
    temporary = root / f".{ROLLBACKS_NAME}.tmp-{secrets.token_hex(8)}"
    entries = [asdict(entry) for entry in (*read_rollbacks(root), rollback)]
    disk.write_file(temporary, (json.dumps(entries, indent=1) + "\n").encode())
    disk.rename(temporary, root / ROLLBACKS_NAME)


def abandoned_by(rollbacks: Sequence[Rollback], step: int, num_rollbacks: int) -> Rollback | None:
    """The rollback that gave up a run that had come to `step` after num_rollbacks; None if it goes on."""
    return next((entry for entry in rollbacks if entry.number > num_rollbacks and step > entry.to_step), None)


def account_of(state: dict[str, Any], rollbacks: Sequence[Rollback]) -> dict[str, Any] | None:
    """The account that a run goes on with from a checkpoint's state: its own, or that of the last rollback, if that came after it. None: of
    a checkpoint that knew of none."""
    before = rollbacks_before(state)
    if (
        rollbacks
        and rollbacks[-1].number > before
        and abandoned_by(rollbacks, int(state["training"]["step"]), before) is None
    ):
        return rollbacks[-1].account
    return state.get("account")


def rollbacks_before(state: dict[str, Any]) -> int:
    """How many rollbacks a checkpoint's state counts."""
    return int((state.get("account") or {}).get("rollbacks", 0))
