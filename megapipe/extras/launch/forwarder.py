"""Forwarding of signals from a launcher to its ranks. Imports no torch: a launcher listens before it imports torch."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from megapipe.monitor.signals import SignalThread, end

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
TERMINATIONS = (signal.SIGTERM, signal.SIGHUP)  # forwarded as SIGTERM, once: save and exit
MAX_INTERRUPTS = 2  # ranks handle two interrupts (save and exit, exit now); the third kills them
# ranks may still be importing and have no handler yet: a request to save is repeated for this long
STARTUP_SECONDS = 60.0
REPEAT_SECONDS = 1.0


class Forwarder:
    """Forwards signals to the ranks while entered: each leads its own session, which terminal signals do not reach.

    SIGUSR1, which asks to save and exit, is never lost: one that arrives before the ranks exist is held for them, and
    it is repeated to ranks that possibly have no handler yet. Any other signal that arrives before the ranks exist,
    also while this launcher waits for those of other nodes, ends the process with code 128 + its number and a line.
    SIGTERM and SIGHUP are forwarded once. SIGHUP is left alone if it was ignored, as by nohup.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._ranks: tuple[int, ...] = ()
        self._starting = False
        self._held: list[int] = []
        self._num_interrupts = 0
        self._ready_at = 0.0  # when ranks can be expected to handle SIGUSR1
        self._repeated_at: float | None = None
        self._old_handlers: dict[signal.Signals, Any] = {}
        self._thread = SignalThread(self._end_before_start)

    @contextmanager
    def starting_ranks(self) -> Iterator[list[int]]:
        """Hold signals while ranks are started. The caller appends their process ids to the list that this yields."""
        process_ids: list[int] = []
        self._starting = True
        # inherited by the ranks: by default SIGUSR1 kills a process that has no handler yet
        handler = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        try:
            yield process_ids
        finally:
            signal.signal(signal.SIGUSR1, handler)
            self._ranks, self._starting = tuple(process_ids), False
            self._ready_at = time.monotonic() + STARTUP_SECONDS
        for number in self._held:
            self._receive(number, None)
        self._held.clear()

    def repeat_request(self) -> None:
        """Send SIGUSR1 again to ranks that possibly had no handler when it was first forwarded."""
        now = time.monotonic()
        was_sent = self._repeated_at is not None and now - self._repeated_at >= REPEAT_SECONDS
        if was_sent and self._ranks and now < self._ready_at:
            self._repeated_at = now
            self._forward(signal.SIGUSR1)

    def forget_ranks(self) -> None:
        """Treat signals as before the start until the ranks, which are being terminated, are replaced."""
        self._ranks, self._ready_at = (), 0.0

    def __enter__(self) -> Forwarder:
        numbers = [n for n in FORWARDED if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
        self._old_handlers = {number: signal.signal(number, self._receive) for number in numbers}
        self._thread.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.__exit__()
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: object) -> None:
        if self._starting:
            self._held.append(number)
            return
        if number == signal.SIGUSR1 and time.monotonic() < (self._ready_at or math.inf):
            self._repeated_at = time.monotonic()
        elif not self._ranks:
            return  # the process is being ended
        if self.received in TERMINATIONS and number in TERMINATIONS:
            return  # the ranks save and exit already
        self.received = signal.Signals(number)
        self._num_interrupts += number == signal.SIGINT
        if self._num_interrupts > MAX_INTERRUPTS:
            self._forward(signal.SIGKILL)
        else:
            self._forward(signal.SIGTERM if number in TERMINATIONS else self.received)

    def _end_before_start(self, number: int) -> None:
        if number != signal.SIGUSR1 and number in FORWARDED and not (self._ranks or self._starting):
            end(128 + number, f"ended by {signal.Signals(number).name} before any rank was started")

    def _forward(self, number: signal.Signals) -> None:
        for process_id in self._ranks:
            with suppress(ProcessLookupError, PermissionError):  # the rank has already exited
                os.killpg(process_id, number)
