"""Signals that ask a run to save and leave. A second SIGINT leaves at once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from megapipe.errors import CommunicationError

LEAVING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequest:
    """Remembers the first leaving signal this rank received; ranks agree on the step elsewhere, by a reduction each step."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def receive(self, number: int, frame: FrameType | None) -> None:
        """The handler. A second SIGINT restores Python's own behaviour: KeyboardInterrupt, now."""
        if number == signal.SIGINT and self.signal is signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise KeyboardInterrupt
        if self.signal is None:
            self.signal = signal.Signals(number)


@contextmanager
def stop_requests(handle_termination: bool) -> Iterator[StopRequest]:
    """Handle SIGINT, and with handle_termination SIGTERM and SIGUSR1 too, while a run trains; the old handlers come back afterwards."""
    request = StopRequest()
    handled = LEAVING if handle_termination else (signal.SIGINT,)
    before = {number: signal.signal(number, request.receive) for number in handled}
    try:
        yield request
    except CommunicationError:
        if (
            request.signal is signal.SIGTERM
        ):  # the launcher ends us because a peer has failed, and that one's message is the one that helps
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
