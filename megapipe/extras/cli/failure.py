"""Print one readable error message for a run of many ranks.

An error that all ranks raise is printed by rank 0; the others wait for a moment, during which the launcher ends them. A
rank that lost its peer waits longer, because the peer's message is the one that helps.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from megapipe.errors import CommunicationError, MegapipeError

# rank 0 may find the same error later; longer than the launcher keeps other ranks alive once one has failed
OTHER_RANK_SECONDS = 4.0
LOST_PEER_SECONDS = 6.0
INTERRUPTED = 130


def guarded(body: Callable[[], int], global_rank: int, world_size: int) -> int:
    """Run `body` and return its result, or print its error once and return the exit code.

    A bug is printed with its traceback.
    """
    try:
        return body()
    except MegapipeError as error:
        _wait_for_others(error, global_rank, world_size)
        where = f" (rank {global_rank})" if world_size > 1 else ""
        print(f"{_title(error)}{where}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        if global_rank == 0:
            print("interrupted; the last checkpoint is complete, later steps are lost", file=sys.stderr, flush=True)
        return INTERRUPTED
    except Exception as error:
        _wait_for_others(error, global_rank, world_size)
        print(
            f"rank {global_rank}: this is a bug in megapipe, please report it with the following traceback",
            file=sys.stderr,
        )
        traceback.print_exc()
        sys.stderr.flush()
        return 1


def end_at_once(code: int) -> NoReturn:
    """End this rank without destructors of communicators and threads, which can hang or abort once a peer is gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait_for_others(error: Exception, global_rank: int, world_size: int) -> None:
    if world_size == 1:
        return
    if isinstance(error, CommunicationError):
        time.sleep(LOST_PEER_SECONDS)
    elif global_rank != 0:
        time.sleep(OTHER_RANK_SECONDS)


def _title(error: MegapipeError) -> str:
    """Return the first words of an error message."""
    titles = {
        "ConfigError": "error",
        "DataError": "data error",
        "CheckpointError": "checkpoint error",
        "DamageError": "checkpoint error",
        "CommunicationError": "communication error",
        "TrainingError": "training stopped",
        "ScheduleError": "schedule error",
        "NoProgressError": "no progress",
    }
    return titles.get(type(error).__name__, "error")
