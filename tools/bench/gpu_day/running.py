"""One command with a limit of time, ended with all of its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MARK = "FIRST_DAY_PART"  # in the environment of a part's processes: ranks lead sessions of their own
GRACE_SECONDS = 3.0  # between an interrupt, after which pytest and Python say where they were, and the end
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)  # a command, or a rank that it started
PASSED, FAILED, TIMEOUT, OUT_OF_MEMORY, SKIPPED = "passed", "failed", "timeout", "killed", "skipped"


@dataclass(frozen=True)
class Ended:
    result: str
    seconds: float


def run(words: Sequence[str], log: Path, limit: float, environment: Mapping[str, str], folder: Path) -> Ended:
    """Run a command in `folder`; its output goes to `log`. No process of it is left, also after an interrupt."""
    began, mark = time.monotonic(), f"{os.getpid()}-{time.monotonic_ns()}"
    with log.open("w") as file:
        try:
            process = subprocess.Popen(
                words,
                cwd=folder,
                env={**environment, MARK: f"{environment.get(MARK, '')} {mark}".lstrip()},  # also that of an outer part
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            file.write(f"{error}\n")
            return Ended(FAILED, 0.0)
        with suppress(OSError):  # where memory ends, the kernel ends the part and not this process
            Path(f"/proc/{process.pid}/oom_score_adj").write_text("1000")
        try:
            result = _result(process.wait(limit))
        except subprocess.TimeoutExpired:
            result = TIMEOUT
            _interrupt(process)
        finally:
            _kill(process, mark)
    return Ended(result, time.monotonic() - began)


def _result(code: int) -> str:
    return PASSED if code == 0 else OUT_OF_MEMORY if code in KILLED else FAILED


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGINT)
        process.wait(GRACE_SECONDS)


def _kill(process: subprocess.Popen[bytes], mark: str) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for process_id in marked(mark):
        with suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGKILL)
    process.wait()


def marked(mark: str) -> Iterator[int]:
    """Yield the processes that were started with this mark, on Linux."""
    name, wanted = f"{MARK}=".encode(), mark.encode()
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            marks = [each for each in file.read_bytes().split(b"\0") if each.startswith(name)]
            if any(wanted in each for each in marks):
                yield int(file.parent.name)
