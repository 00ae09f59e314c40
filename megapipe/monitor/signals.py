"""Signals that end a process at once, also while its main thread waits in native code, where handlers do not run.

Python runs a handler between two bytecodes of the main thread: a rank that waits for its peers in torch answers after
the timeout, and KeyboardInterrupt leaves tracebacks inside libraries. Here a thread reads the signals from a pipe.

And standard output and error that a full disk or a closed pipe cannot turn into an error of the program.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn, Self

from megapipe.environment import read_environment
from megapipe.errors import ConfigError

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
REPEATED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # by schedulers and shells, which ask once more
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


class ThisProcess:
    """A fact that belongs to the process, as signal handlers do. is_command: it ends after the command that it runs."""

    is_command = False


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """End this process at SIGTERM, SIGINT or SIGHUP with 128 + the number inside the block, and let rank 0 say so.

    Ranks of `megapipe launch` die of the signal without a message: the launcher prints it. Outside of the main thread,
    or where a parent process had the signal ignored, nothing changes.
    """
    numbers = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    if threading.current_thread() is not threading.main_thread() or not numbers:
        yield
        return
    before = {number: signal.getsignal(number) for number in numbers}
    is_under_launcher = False
    with suppress(ConfigError):  # reported by the program
        is_under_launcher = read_environment().launcher_pid is not None
    try:
        if is_under_launcher:
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


STDERR = 2


class LastingFile(io.FileIO):
    """A file descriptor whose writes never fail: what cannot be written is dropped, and the first time is reported.

    Later output appears again once it can be written, as after space was freed.
    """

    def __init__(self, descriptor: int, title: str, tells_closed: bool = True) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._title, self._tells_closed, self._is_told = title, tells_closed, False

    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
        except OSError as error:
            is_silent = isinstance(error, BrokenPipeError) and not self._tells_closed
            if not (self._is_told or is_silent) and self.fileno() != STDERR:
                self._is_told = True
                text = f"{self._title} cannot be written to ({error.strerror}); this is lost, the program continues\n"
                with suppress(OSError):
                    os.write(STDERR, text.encode())
            written = None
        return len(data) if written is None else written


def outlive_output(tells_closed: bool = True) -> None:
    """Replace sys.stdout and sys.stderr by streams of `LastingFile`, if they are this process's own.

    tells_closed: report that a pipe was closed; not wanted of a program that only prints, as in `| head`.
    """
    for name, title in (("stdout", "standard output"), ("stderr", "standard error")):
        stream = getattr(sys, name)
        if stream is None:  # closed by the parent process
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (open until the process ends)
        elif stream is getattr(sys, f"__{name}__") and type(stream) is io.TextIOWrapper:
            with suppress(OSError):
                stream.flush()
            file = io.BufferedWriter(LastingFile(stream.fileno(), title, tells_closed))
            setattr(sys, name, io.TextIOWrapper(file, stream.encoding, "backslashreplace", line_buffering=True))
