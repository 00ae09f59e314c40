"""One process with the fake device for all tests of this folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fake_cuda.answers import answers_of


@pytest.fixture(scope="session")
def run(fake_device: None) -> Iterator[Callable[..., Any]]:
    """Runs steps on the fake device, once for equal arguments: (world_size, rank, changes, base) -> `steps.Seen`."""
    known: dict[str, Any] = {}
    with answers_of("steps") as answer:

        def ask(*arguments: Any) -> Any:
            line = json.dumps(arguments)
            if line not in known:
                known[line] = SimpleNamespace(**answer(arguments))
            return known[line]

        yield ask
