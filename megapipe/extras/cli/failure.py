"""One readable message for a run of many ranks.

A mistake that all ranks see is told by rank 0; the others keep silent for a moment, in which the launcher ends them. A rank that lost a
peer keeps silent longer: the peer's own message is the one that helps.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from megapipe.errors import CommunicationError, MegapipeError

OTHER_RANK_SECONDS = (
    4.0  # rank 0 may come to the same mistake later; longer than the launcher lets others live once a rank has failed
)
LOST_PEER_SECONDS = 6.0
INTERRUPTED = 130


def guarded(body: Callable[[], int], global_rank: int, world_size: int) -> int:
    """Run `body`; its result, or the exit code of what it raised, after telling it once. A bug keeps its traceback."""
    try:
        return body()
    except MegapipeError as error:
        _wait_for_others(error, global_rank, world_size)
        where = f" (rank {global_rank})" if world_size > 1 else ""
        print(f"{_title(error)}{where}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        if global_rank == 0:
            print(
                "interrupted; the last checkpoint is complete, what came after it is lost", file=sys.stderr, flush=True
            )
        return INTERRUPTED
    except Exception as error:
        _wait_for_others(error, global_rank, world_size)
        print(f"rank {global_rank}: this is a bug in megapipe, please report it with what follows", file=sys.stderr)
        traceback.print_exc()
        sys.stderr.flush()
        return 1


def end_at_once(code: int) -> NoReturn:
    """End this rank without the destructors of communicators and threads, which can hang or abort once a peer is gone."""
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
    """ConfigError -> "configuration error" for people."""
    titles = {
        "ConfigError": "this cannot run",
        "DataError": "data error",
        "CheckpointError": "checkpoint error",
        "DamageError": "checkpoint error",
        "CommunicationError": "communication error",
        "TrainingError": "training stopped",
        "ScheduleError": "schedule error",
        "NoProgressError": "no progress",
    }
    return titles.get(type(error).__name__, "error")
