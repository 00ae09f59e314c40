"""A pause of Python's cycle collector while a schedule is built, proven or simulated, or a CUDA graph is recorded."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Keep the cycle collector off; also a decorator.

    A schedule is a million new tuples without a cycle: searching them for cycles would take as long as making them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
