"""Shared by the tests of the API: this process as one of several ranks of the harness."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from megapipe.environment import Environment, read_environment


def as_rank(rank: int, world_size: int, *modules: Any) -> None:
    """Make these modules see the environment that a launcher would give to a rank of the harness."""

    def environment() -> Environment:
        return dataclasses.replace(
            read_environment({}), global_rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size
        )

    for module in modules:
        module.read_environment = environment


def error_of(call: Callable[[], Any]) -> str:
    """Return type and message of the exception that a call raises, or ''."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
