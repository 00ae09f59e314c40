"""The current stream and the stream context that all fakes of torch.cuda in these tests share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

Stream = TypeVar("Stream")


class CurrentStream(Generic[Stream]):
    """A current stream and a context that changes it.

    main: the current stream outside of all contexts.
    """

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
