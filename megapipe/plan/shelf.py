"""What several plans have in common and is slow to make: schedules, and the buffers of stages. A search has hundreds of such plans."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

Made = TypeVar("Made")


class Shelf:
    """Things made once for each key; a key names everything that the thing depends on."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` returned when this key was asked for first."""
        if key not in self._made:
            self._made[key] = make()
        found: Made = self._made[key]
        return found
