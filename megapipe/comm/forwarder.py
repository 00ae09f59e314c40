"""Signals on their way from a launcher to its ranks. Imports no torch: a launcher listens before it does."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
PASSED_ON_AS = {signal.SIGHUP: signal.SIGTERM}  # a closed terminal: save and leave
MOST_INTERRUPTS = 2  # the ranks know what the first two mean: save and leave, leave now; the third kills
STARTING_SECONDS, REPEAT_SECONDS = (
    60.0,
    1.0,
)  # ranks may still be importing when asked to save: for so long they are asked again


class InterruptedBeforeStart(Exception):
    """A signal came before there were ranks to pass it on to."""


class Forwarder:
    """Passes signals on to the ranks while it is entered; each rank leads a session of its own, so the terminal does not reach them.

    SIGUSR1, which asks to save and leave, is never too early: what comes before the ranks are there waits for them, and ranks that may
    not have a handler yet ignore it and are asked again. Any other signal that comes before them raises InterruptedBeforeStart.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._ranks: tuple[int, ...] = ()
        self._starting = False
        self._held: list[int] = []
        self._num_interrupts = 0
        self._ready_at = 0.0  # when ranks can be expected to know what SIGUSR1 means
        self._repeated_at: float | None = None
        self._before: dict[signal.Signals, Any] = {}

    @contextmanager
    def adopting(self) -> Iterator[list[int]]:
        """Ranks are being started; their process ids go into the list. Signals wait until all of them are there."""
        process_ids: list[int] = []
        self._starting = True
        handler = signal.signal(
            signal.SIGUSR1, signal.SIG_IGN
        )  # which ranks inherit: by default it kills one that has no handler yet
        try:
            yield process_ids
        finally:
            signal.signal(signal.SIGUSR1, handler)
            self._ranks, self._starting = tuple(process_ids), False
            self._ready_at = time.monotonic() + STARTING_SECONDS
        for number in self._held:
            self._receive(number, None)
        self._held.clear()

    def repeat(self) -> None:
        """Ask again ranks that were asked to save before they could know what that means."""
        now = time.monotonic()
        if (
            self._repeated_at is not None
            and self._ranks
            and now < self._ready_at
            and now - self._repeated_at >= REPEAT_SECONDS
        ):
            self._repeated_at = now
            self._pass_on(signal.SIGUSR1)

    def disown(self) -> None:
        """The ranks are being ended, and others are started in their place; until those are there it is as before the first ones."""
        self._ranks, self._ready_at = (), 0.0

    def __enter__(self) -> Forwarder:
        self._before = {number: signal.signal(number, self._receive) for number in FORWARDED}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: object) -> None:
        if self._starting:
            self._held.append(number)
            return
        if number == signal.SIGUSR1 and time.monotonic() < (self._ready_at or math.inf):
            self._repeated_at = time.monotonic()
        elif not self._ranks:
            raise InterruptedBeforeStart
        self.received = signal.Signals(number)
        self._num_interrupts += number == signal.SIGINT
        self._pass_on(
            signal.SIGKILL if self._num_interrupts > MOST_INTERRUPTS else PASSED_ON_AS.get(self.received, self.received)
        )

    def _pass_on(self, passed_on: signal.Signals) -> None:
        for process_id in self._ranks:
            with suppress(ProcessLookupError, PermissionError):  # it has ended
                os.killpg(process_id, passed_on)
