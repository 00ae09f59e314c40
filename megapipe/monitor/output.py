"""Standard output and error that a full disk or a closed pipe cannot turn into an error of the program."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import Any

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
