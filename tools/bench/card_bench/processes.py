"""Commands of megapipe in processes of their own, and the metrics that they write."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_day.running import PASSED, run

from megapipe.environment import prefixed

REPOSITORY = Path(__file__).resolve().parents[3]
MEGAPIPE = (sys.executable, "-m", "megapipe")
SECONDS = 600.0  # at most
LOGGED = "--log-interval 1 --num-workers 0"


def steps_of(words: Sequence[str]) -> list[dict[str, Any]]:
    """Run a training command from the repository's root and return the records of its steps.

    Raises RuntimeError with the last lines of a command that fails or takes too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        log, file = Path(folder, "log"), Path(folder, "metrics.jsonl")
        result = run([*words, "--metrics-file", str(file)], log, SECONDS, prefixed(""), REPOSITORY).result
        if result != PASSED:
            raise RuntimeError(f"{result}: " + "\n".join(log.read_text(errors="replace").splitlines()[-12:]))
        records = map(json.loads, file.read_text().splitlines())
        return [record for record in records if record["kind"] == "step"]
