"""What every stand-in for torch.cuda has in common: a current stream, and a context in which it is another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

Stream = TypeVar("Stream")


class CurrentStream(Generic[Stream]):
    """main: the stream that is current outside of all contexts."""

    def __init__(self, main: Stream) -> None:
        self._current = main

    def current_stream(self, device: Any = None) -> Stream:
        return self._current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before
