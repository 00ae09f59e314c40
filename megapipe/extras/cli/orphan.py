"""End a rank when its launcher dies.

A launcher that was killed with `kill -9` cannot end its ranks, which have their own sessions.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

from megapipe.environment import Environment
from megapipe.extras.cli.failure import end_at_once
from megapipe.monitor.process import wait_for_end

EXIT_CODE = 1


def end_with_launcher(environment: Environment) -> None:
    """Watch torchrun's agent, or `megapipe launch`, and end this process when it ends. Does nothing without a launcher.

    Unsaved state is lost, as with `kill -9` of the ranks: a restarted job must not meet ranks of the old one.
    """
    if environment.launcher == "torchrun":
        launcher = environment.launcher_pid if _is_ancestor(environment.launcher_pid) else os.getppid()
        threading.Thread(target=_watch, args=(launcher, environment), name="launcher-watch", daemon=True).start()


def _watch(launcher: int, environment: Environment) -> None:
    wait_for_end(launcher)
    if environment.local_rank == 0:
        with suppress(OSError):  # the terminal may be gone too
            print(
                f"rank {environment.global_rank}: the launcher (process {launcher}) died without an error message "
                "(kill -9, or out of memory). The ranks of this host are terminated; saved checkpoints are intact",
                file=sys.stderr,
                flush=True,
            )
    with suppress(OSError):
        end_at_once(EXIT_CODE)
    os._exit(EXIT_CODE)


def _is_ancestor(process: int | None) -> bool:
    """Return True if this process descends from another (a process id from outside a container is unknown inside)."""
    parent = os.getppid()
    while process is not None and parent > 1 and parent != process:
        try:
            with open(f"/proc/{parent}/stat", encoding="utf-8", errors="replace") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return process is not None and parent == process
