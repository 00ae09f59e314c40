"""Cores, memory and limits that this process has, which in a container or under a scheduler are fewer than the machine's."""

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
    """Bytes and counts; None where the system does not tell or sets no limit.

    cores: that this process may run on, and their numbers as text. cpu_limit: cores' worth of time that the control group allows.
    """

    cores: int
    affinity: str
    cores_of_machine: int
    cpu_limit: float | None
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
    """Of this process, now."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    memory = _fields(Path("/proc/meminfo"))
    shared = _disk(SHARED_MEMORY)
    soft, hard = _open_files()
    return Resources(
        len(cores),
        ranges(cores),
        os.cpu_count() or 1,
        _cpu_limit(),
        _fields(Path("/proc/cpuinfo")).get("model name", "") or platform.processor() or platform.machine(),
        len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1,
        _kilobytes(memory.get("MemTotal")),
        _kilobytes(memory.get("MemAvailable")),
        _number(CGROUP / "memory.max"),
        None if shared is None else shared[0],
        None if shared is None else shared[1],
        soft,
        hard,
    )


def ranges(numbers: list[int]) -> str:
    """0-3,8 for 0, 1, 2, 3, 8."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def _open_files() -> tuple[int | None, int | None]:
    try:
        import resource
    except ImportError:  # not a Unix
        return None, None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return tuple(None if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard))  # type: ignore[return-value]


def _disk(path: Path) -> tuple[int, int] | None:
    """(size, free) of the file system."""
    with suppress(OSError):
        found = os.statvfs(path)
        return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    return None


def _cpu_limit() -> float | None:
    with suppress(OSError, ValueError):
        quota, period = (CGROUP / "cpu.max").read_text().split()
        return float(quota) / float(period)  # "max" is no number
    return None


def _number(path: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return None


def _fields(path: Path) -> dict[str, str]:
    """The first value of every 'key : value' line."""
    found: dict[str, str] = {}
    with suppress(OSError):
        for line in path.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            found.setdefault(key.strip(), value.strip())
    return found


def _kilobytes(text: str | None) -> int | None:
    return None if text is None else int(text.split()[0]) * 1024
