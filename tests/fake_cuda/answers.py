"""A process with the fake device, which answers lines of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megapipe.extras.streams import device


@contextmanager
def answers_of(module: str) -> Iterator[Callable[[Any], Any]]:
    """Run a module of this folder as a process, and give what it answers to a question."""
    command = [sys.executable, "-m", f"tests.fake_cuda.{module}", str(device.build())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        asked, answers = process.stdin, process.stdout
        assert asked is not None and answers is not None

        def ask(question: Any) -> Any:
            print(json.dumps(question), file=asked, flush=True)
            line = answers.readline()
            assert line, "the process with the fake device has died"
            return json.loads(line)

        yield ask
        asked.close()
