"""The cores, memory and limits of this process; in a container or under a scheduler they are fewer than the
machine's."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Resources:
    """Bytes and counts; None if the system does not say or sets no limit. Keys of `megapipe doctor --json`."""

    cores: int  # that this process may run on
    affinity: str  # their numbers as text, such as '0-3,8'
    cores_of_machine: int
    cpu_limit: float | None  # cores' worth of time that the control group allows
    cpu: str
    numa_nodes: int
    memory_bytes: int | None
    available_bytes: int | None
    memory_limit_bytes: int | None
    shared_memory_bytes: int | None
    shared_memory_free_bytes: int | None
    open_files: int | None
    most_open_files: int | None


def resources() -> Resources:
    """Return the resources of this process, now."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    memory = _fields(Path("/proc/meminfo"))
    shared, shared_free = _disk(SHARED_MEMORY)
    soft, hard = _open_files()
    return Resources(
        cores=len(cores),
        affinity=ranges(cores),
        cores_of_machine=os.cpu_count() or 1,
        cpu_limit=_cpu_limit(),
        cpu=_fields(Path("/proc/cpuinfo")).get("model name", "") or platform.processor() or platform.machine(),
        numa_nodes=len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1,
        memory_bytes=_kilobytes(memory.get("MemTotal")),
        available_bytes=_kilobytes(memory.get("MemAvailable")),
        memory_limit_bytes=_memory_limit(),
        shared_memory_bytes=shared,
        shared_memory_free_bytes=shared_free,
        open_files=soft,
        most_open_files=hard,
    )


def ranges(numbers: list[int]) -> str:
    """Return ascending numbers as text: '0-3,8' for 0, 1, 2, 3, 8."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def _open_files() -> tuple[int | None, int | None]:
    """Return the soft and the hard limit."""
    try:
        import resource
    except ImportError:  # not a Unix
        return None, None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    return None if soft == unlimited else soft, None if hard == unlimited else hard


def _disk(path: Path) -> tuple[int | None, int | None]:
    """Return the size and the free bytes of a file system."""
    with suppress(OSError):
        found = os.statvfs(path)
        return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    return None, None


def _cpu_limit() -> float | None:
    with suppress(OSError, ValueError):  # without a limit the file says "max"
        quota, period = (CGROUP / "cpu.max").read_text().split()
        return float(quota) / float(period)
    return None


def _memory_limit() -> int | None:
    with suppress(OSError, ValueError):
        return int((CGROUP / "memory.max").read_text())
    return None


def _fields(path: Path) -> dict[str, str]:
    """Return the first value of every 'key : value' line of a file."""
    found: dict[str, str] = {}
    with suppress(OSError):
        for line in path.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            found.setdefault(key.strip(), value.strip())
    return found


def _kilobytes(text: str | None) -> int | None:
    return None if text is None else int(text.split()[0]) * 1024
