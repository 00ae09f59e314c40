"""Signals that end a process at once, also while its main thread waits in native code, where handlers do not run.

Python runs a handler between two bytecodes of the main thread: a rank that waits for its peers in torch answers after
the timeout, and KeyboardInterrupt leaves tracebacks inside libraries. Here a thread reads the signals from a pipe.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn, Self

from megapipe.environment import read_environment
from megapipe.errors import ConfigError

ENDING = (signal.SIGTERM, signal.SIGINT)
if hasattr(os, "register_at_fork"):  # a forked child's signals are its own
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


class SignalThread:
    """A thread that calls receive(number) for each signal that has a Python handler, while entered.

    Entered and left in the main thread. The thread that was entered before gets the signals again afterwards.
    """

    def __init__(self, receive: Callable[[int], object]) -> None:
        self._receive = receive

    def __enter__(self) -> Self:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._run, name="signals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._before)
        os.close(self._write)

    def _run(self) -> None:
        while data := os.read(self._read, 1):
            self._receive(data[0])
        os.close(self._read)


def ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing: a Python handler for signals that a SignalThread receives."""


def end(code: int, text: str) -> NoReturn:
    """Write a line to standard error, unless `text` is empty, and end this process. For any thread."""
    with suppress(OSError):
        if text:
            os.write(2, f"{text}\n".encode())
    os._exit(code)


def end_text(number: int) -> str:
    """Return the line about a signal that ends this process; "" on all ranks but 0."""
    with suppress(ConfigError):  # reported by the program
        if read_environment().global_rank != 0:
            return ""
    return f"ended by {signal.Signals(number).name}"


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """End this process at SIGTERM or SIGINT with code 143 or 130 inside the block, and let rank 0 say so.

    Ranks of `megapipe launch` die of the signal without a message: the launcher prints it. Outside of the main thread,
    or where a parent process had the signal ignored, nothing changes.
    """
    numbers = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    if threading.current_thread() is not threading.main_thread() or not numbers:
        yield
        return
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        if _is_under_launcher():
            for number in numbers:
                signal.signal(number, signal.SIG_DFL)
            yield
        else:
            with SignalThread(lambda number: end(128 + number, end_text(number)) if number in numbers else None):
                for number in numbers:
                    signal.signal(number, ignore)
                yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_under_launcher() -> bool:
    try:
        return read_environment().launcher_pid is not None
    except ConfigError:
        return False
