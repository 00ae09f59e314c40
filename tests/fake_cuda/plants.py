"""Planted mistakes in the order of streams, each a context in which megapipe makes it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

PLANTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {}
