"""One process with the fake device for all tests of this folder."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from megapipe.extras.streams import device


@pytest.fixture(scope="session")
def run() -> Iterator[Callable[..., Any]]:
    """Runs steps on the fake device, once for equal arguments: (world_size, rank, changes, base) -> `steps.Seen`."""
    why = device.missing()
    if why is not None:
        pytest.skip(f"no fake CUDA device: {why}")
    command = [sys.executable, "-m", "tests.fake_cuda.steps", str(device.build())]
    known: dict[str, Any] = {}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        asked, answers = process.stdin, process.stdout
        assert asked is not None and answers is not None

        def ask(*arguments: Any) -> Any:
            line = json.dumps(arguments)
            if line not in known:
                print(line, file=asked, flush=True)
                answer = answers.readline()
                assert answer, "the process with the fake device has died"
                known[line] = SimpleNamespace(**json.loads(answer))
            return known[line]

        yield ask
        asked.close()
