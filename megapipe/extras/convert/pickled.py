"""Pickled files of others, read without running anything of theirs.

torch's weights-only reader calls nothing but what it is allowed to. Classes that it does not know become inert stand-ins, which keep their
arguments and do nothing; an argparse.Namespace is read as such. So there is no flag to read a file unsafely: none is needed.
"""

from __future__ import annotations

import argparse
import pickle
from pathlib import Path
from typing import Any

import torch

from megapipe.errors import CheckpointError


class StandIn:
    """In place of an object of a foreign class. arguments: what it was made from."""

    arguments: tuple[Any, ...] = ()

    def __new__(cls, *arguments: Any, **named: Any) -> StandIn:
        made = object.__new__(cls)
        made.arguments = arguments
        return made

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __hash__(self) -> int:
        return id(self)


def first_line(error: Exception) -> str:
    """What an exception of torch says, without its pages of advice."""
    cause = error.__context__ if isinstance(error, pickle.UnpicklingError) and error.__context__ else error
    return next(iter(str(cause).splitlines()), type(cause).__name__)


def load_pickled(path: Path) -> dict[Any, Any]:
    """The dictionary that torch.save wrote; tensors stay on disk until they are looked at. Raises CheckpointError naming the file."""
    try:
        foreign = [
            name for name in torch.serialization.get_unsafe_globals_in_checkpoint(path) if name != "argparse.Namespace"
        ]
        allowed: list[Any] = [
            argparse.Namespace,
            *((type(name.rpartition(".")[2], (StandIn,), {}), name) for name in foreign),
        ]
        with torch.serialization.safe_globals(allowed):
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: there is no such file") from None
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not the dictionary of a checkpoint")
    return content
