"""Commands of megapipe in processes of their own, and the metrics that they write."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[3]
MEGAPIPE = (sys.executable, "-m", "megapipe")
LOGGED = "--log-interval 1 --num-workers 0"


@contextmanager
def started(words: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command from the repository's root; it and all of its processes are ended at the end of the block."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*words], cwd=REPOSITORY, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def steps_of(*commands: Sequence[str]) -> list[list[dict[str, Any]]]:
    """Run training commands at the same time and return the records of the steps of each.

    Raises RuntimeError with the last lines of a command that failed.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        running = []
        for number, words in enumerate(commands):
            log, file = Path(folder, f"{number}.log"), Path(folder, f"{number}.jsonl")
            running.append((stack.enter_context(started([*words, "--metrics-file", str(file)], log)), log, file))
        found = []
        for process, log, file in running:
            code = process.wait()
            if code:
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
                raise RuntimeError(f"exit code {code}: {tail}")
            records = map(json.loads, file.read_text().splitlines())
            found.append([record for record in records if record["kind"] == "step"])
    return found
