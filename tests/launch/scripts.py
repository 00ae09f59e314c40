"""`Command`: a child process with captured output and a time limit, as a user starts one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 280.0


def environment() -> dict[str, str]:
    """Return this process's environment with the repository first on the path and one thread a rank."""
    path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    error: str


class Command:
    """A running command. Leaving the context kills it and all its child processes."""

    def __init__(self, words: Sequence[str], folder: Path) -> None:
        self._files = [(folder / name).open("w+") for name in ("out.txt", "error.txt")]
        self.process = subprocess.Popen(
            words,
            cwd=folder,
            env=environment(),
            stdout=self._files[0],
            stderr=self._files[1],
            start_new_session=True,
        )
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process_id in (*self.ranks(), self.process.pid):
            try:
                os.killpg(process_id, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()
        for file in self._files:
            file.close()

    def out(self) -> str:
        return Path(self._files[0].name).read_text()

    def error(self) -> str:
        return Path(self._files[1].name).read_text()

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks; the launcher starts them in rank order."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[1] == str(self.process.pid) and fields[0] != "Z":
                found.append(int(stat.parent.name))
        return sorted(found)

    def wait_for(self, text: str) -> None:
        """Wait until `text` is in standard output."""
        while text not in self.out():
            if self.process.poll() is not None or time.monotonic() - self._began > LIMIT_SECONDS:
                raise AssertionError(
                    f"{text!r} was not printed (exit code "
                    f"{self.process.poll()}):\n{self.out()[-2000:]}\n{self.error()[-3000:]}"
                )
            time.sleep(0.05)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the launcher only."""
        self.process.send_signal(number)

    def ended(self) -> Ended:
        """Wait for the process to end."""
        code = self.process.wait(max(1.0, LIMIT_SECONDS - (time.monotonic() - self._began)))
        return Ended(code, self.out(), self.error())


def launch(
    folder: Path,
    num_ranks: int,
    *words: str,
    script: str | Path = REPOSITORY / "pretrain_gpt.py",
    before: Sequence[str] = (),
) -> Command:
    """Start a script with `megapipe launch`. before: flags of the launcher."""
    return Command(
        [sys.executable, "-m", "megapipe", "launch", "--nproc-per-node", str(num_ranks), *before, str(script), *words],
        folder,
    )
