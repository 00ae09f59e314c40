"""Marks of the ranks of this host that are starting. When one of them has ended, the others end too.

/dev/shm/megapipe-USER-start-ADDRESS/rank_00000 holds the process of a rank, private to this user. A rank leaves its
mark before it imports torch, and removes it when all ranks are connected or when it exits without having met them.
Marks of killed ranks are removed when a rank of another job starts.

Without effect for a single rank, under torchrun's agent, which notices by itself that a rank has ended, and on systems
without /proc.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path

from megapipe.environment import Environment
from megapipe.monitor.process import host, process_space, process_state, start_ticks
from megapipe.monitor.roster import live_folder, live_path, replace_file
from megapipe.monitor.signals import end

LOOK_SECONDS = 1.0
# a rank that has ended may be started again meanwhile, or this one may find out more, such as rank 0's answer
PATIENCE_SECONDS = 8.0
SKEW_SECONDS = 10.0  # a mark that is older than this rank's by more is of an earlier start


def leave_mark(environment: Environment) -> None:
    """Leave the mark of this process, once, and watch those of the others. A full disk costs the mark."""
    ticks = start_ticks(os.getpid())
    if not environment.is_distributed or environment.has_agent_store or ticks is None:
        return
    token, path, own = _token(environment), _path(environment), f"{os.getpid()} {ticks} {process_space()}"
    with suppress(OSError, ValueError):  # removed meanwhile, or just being written
        for other in path.parent.parent.glob(live_path("start-*").name):
            marks = list(other.iterdir()) if other != path.parent and _is_own(other) else []
            if marks and all(map(_ended_process, marks)):  # a rank of an empty folder is about to leave its mark
                shutil.rmtree(other, ignore_errors=True)
    with suppress(OSError):
        live_folder(token)
        if not path.exists() or path.read_text() != own:
            replace_file(path, own.encode())
            atexit.register(remove_mark, environment)
            threading.Thread(target=_watch, args=(environment,), name="start-watch", daemon=True).start()


def remove_mark(environment: Environment) -> None:
    """Remove the mark of this rank."""
    with suppress(OSError):
        _path(environment).unlink()
        _path(environment).parent.rmdir()  # if it was the last


def ended_rank(environment: Environment) -> str:
    """Return which other rank of this host has ended since this one started, "" if none."""
    own = _path(environment)
    with suppress(OSError, ValueError):  # this rank has no mark, or another has just removed its own
        since = own.stat().st_mtime - SKEW_SECONDS
        for path in own.parent.glob("rank_*") if _is_own(own.parent) else ():
            if path.stat().st_mtime >= since and (process := _ended_process(path)):
                rank, why = int(path.name[5:]), "it was killed (kill -9, or out of memory) or has printed its own error"
                return f"rank {rank} (process {process} on {host()}) ended before all ranks were connected: {why}"
    return ""


def _watch(environment: Environment) -> None:
    """End this process if another rank has ended, until this one removes its mark."""
    first, since = "", 0.0
    while _path(environment).exists():
        text = ended_rank(environment)
        if not (first and text):
            first, since = text, time.monotonic()
        elif time.monotonic() - since >= PATIENCE_SECONDS:
            end(1, f"communication error (rank {environment.global_rank}): {first}")
        time.sleep(LOOK_SECONDS)


def _token(environment: Environment) -> str:
    address = f"{environment.master_addr} {environment.master_port} {environment.world_size}"
    return f"start-{hashlib.sha256(address.encode()).hexdigest()[:16]}"


def _path(environment: Environment) -> Path:
    return live_path(_token(environment)) / f"rank_{environment.global_rank:05d}"


def _is_own(folder: Path) -> bool:
    """Return True if this user made a folder: names in a shared one can be those of others."""
    return folder.lstat().st_uid == os.getuid()


def _ended_process(mark: Path) -> str:
    """Return the process id in a mark if that process has ended, else ""."""
    pid, ticks, space = mark.read_text(encoding="utf-8").split(" ", 2)
    has_ended = space == process_space() and process_state(int(pid), int(ticks)).has_ended
    return pid if has_ended else ""
