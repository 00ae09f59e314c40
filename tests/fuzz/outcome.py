"""Check that a command or a reader accepts hostile input or refuses it with a message, within a time."""

from __future__ import annotations

import contextlib
import io
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from megapipe.errors import MegapipeError

LIMIT_SECONDS = 20  # of a case; most take milliseconds
MORE_BYTES = 4 << 30  # of address space that a case may take


@dataclass(frozen=True)
class Said:
    """A command that has ended."""

    code: int
    out: str
    error: str


def drawn(seed: str) -> random.Random:
    """Return a generator, and print the seed for a failure's report."""
    print(f"seed {seed!r}")
    return random.Random(seed)


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Raise TimeoutError after LIMIT_SECONDS, MemoryError beyond MORE_BYTES."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"not ended after {LIMIT_SECONDS} s")

    before, (soft, hard) = signal.signal(signal.SIGALRM, late), resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MORE_BYTES, hard))
    began = time.monotonic()
    left, _ = signal.setitimer(signal.ITIMER_REAL, LIMIT_SECONDS)  # pytest-timeout uses the same timer
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(0.01, left - (time.monotonic() - began)))


def said(main: Callable[[Sequence[str]], int], words: Sequence[str]) -> Said:
    """Run the main function of a command."""
    out, error = io.StringIO(), io.StringIO()
    with limits(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    return Said(code, out.getvalue(), error.getvalue())


def fault(ended: Said) -> str:
    """Return what is wrong with the end of a command, "" if nothing is."""
    text = ended.out + ended.error
    if "Traceback" in text or "bug in megapipe" in text:
        return f"a traceback: {(ended.error.strip().splitlines() or [''])[-1][:300]}"
    if ended.code not in (0, 1, 2):
        return f"exit code {ended.code}"
    if ended.code and not ended.error.strip():
        return f"exit code {ended.code} without a message"
    return ""


def read_or_refused(read: Callable[[], Any]) -> Any:
    """Return what is read, or None if it is refused. Any exception but MegapipeError is a failure of the test."""
    with limits():
        try:
            return read()
        except MegapipeError as error:
            text = str(error)
    assert len(text.splitlines()) == 1, f"not one line: {text!r}"
    return None
