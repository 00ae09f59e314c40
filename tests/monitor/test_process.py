"""Settings that a process asks of its C library: blocks that are freed leave it."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from tests.harness import REPOSITORY

PROGRAM = """
from megapipe.monitor.process import return_large_blocks

def resident():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS:")) >> 10

is_set = return_large_blocks()
bytes(31 << 20)  # freed: glibc's own threshold rises
first = resident()
blocks = [bytearray(8 << 20) for _ in range(16)]
pin = bytearray(1 << 10)
del blocks[:-1]  # the last one stays
print(is_set, resident() - first)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt")
@pytest.mark.parametrize(
    ("settings", "is_set"),
    [({}, True), ({"MALLOC_MMAP_THRESHOLD_": "33554432"}, False)],
    ids=["glibc's defaults", "set by the user"],
)
def test_large_blocks_leave_the_process_when_they_are_freed(settings: dict[str, str], is_set: bool) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **settings}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=200, check=True
    )
    said, resident = done.stdout.split()
    assert said == str(is_set) and (int(resident) < 16) == is_set, "MiB of 8 that are in use"
