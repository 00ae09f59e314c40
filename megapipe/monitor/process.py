"""The kernel's view of a process of this host, from /proc."""

from __future__ import annotations

import ctypes
import os
import resource
import socket
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megapipe.environment import value_for_libraries

STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a disk or device, not interruptible",
    "T": "stopped (SIGSTOP)",
    "t": "stopped by a debugger",
}
ENDED = "ZX"
STOPPED = "Tt"
M_MMAP_THRESHOLD = -3  # glibc's number of the parameter
# sharded buffers are larger; most activations of a CPU run are smaller, and so cause no page faults
RETURNED_BYTES = 4 << 20


@dataclass(frozen=True)
class ProcessState:
    """The state of a process."""

    state: str  # the kernel's letter, "" if it has ended
    kernel_function: str = ""  # in which it sleeps, "" if hidden

    @property
    def has_ended(self) -> bool:
        return self.state == ""

    @property
    def is_stopped(self) -> bool:
        return self.state != "" and self.state in STOPPED

    def __str__(self) -> str:
        if self.has_ended:
            return "the process has ended"
        where = f", in the kernel's {self.kernel_function}" if self.kernel_function else ""
        return f"the process is {STATES.get(self.state, 'in state ' + self.state)}{where}"


def host() -> str:
    """Return the name of this host."""
    return socket.gethostname()


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def return_large_blocks() -> bool:
    """Have malloc return blocks of RETURNED_BYTES or more to the system as soon as they are freed; return True if so.

    glibc raises its threshold up to 32 MiB when blocks are freed, and then keeps freed blocks in a heap that rarely
    shrinks. Nothing changes with another libc, or where the environment sets the threshold.
    """
    tunables = value_for_libraries("GLIBC_TUNABLES") or ""
    is_set = value_for_libraries("MALLOC_MMAP_THRESHOLD_") is not None or "mmap_threshold" in tunables
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return not is_set and mallopt is not None and bool(mallopt(M_MMAP_THRESHOLD, RETURNED_BYTES))


def boot_id() -> str:
    """Return the id of the running kernel's boot, equal in all of its containers; "" if the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def process_space() -> str:
    """Return the namespace of process ids: the host's or a container's; "" if the system does not say."""
    space = ""
    with suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    return f"{boot_id()} {space}".strip()


def start_ticks(pid: int) -> int | None:
    """Return the start of a process in clock ticks since boot, unique together with its id; None if it is gone."""
    fields = _stat(pid)
    return None if fields is None else int(fields[19])


def process_state(pid: int, started: int | None) -> ProcessState:
    """Return the state of the process that started at tick `started`; a later one with the same id does not count."""
    fields = _stat(pid)
    if fields is None or fields[0] in ENDED or (started is not None and int(fields[19]) != started):
        return ProcessState("")
    function = ""
    with suppress(OSError):
        function = Path(f"/proc/{pid}/wchan").read_text().strip()
    return ProcessState(fields[0], "" if function == "0" else function)


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state on; None without such a process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def allow_open_files(needed: int) -> str:
    """Raise this process's limit of open files and sockets to `needed` if it is lower.

    Returns "", or if the hard limit is lower, what the administrator has to raise; then the hard limit holds.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most == needed:
        return ""
    return (
        f"a process may have {hard} open files and sockets here (ulimit -Hn), and this run may need {needed}: raise "
        "the hard limit (LimitNOFILE of slurmd, of containerd or in limits.conf)"
    )
