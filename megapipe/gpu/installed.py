"""The libraries that a user installs apart, and the error that names the way where one is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from megapipe.errors import ConfigError


@dataclass(frozen=True)
class Library:
    """name: as people call it. install: the command."""

    name: str
    install: str


TRANSFORMER_ENGINE = Library(
    "NVIDIA's Transformer Engine",
    "pip install --no-build-isolation 'transformer_engine[pytorch]' (builds against CUDA and cuDNN)",
)
APEX = Library(
    "NVIDIA's apex",
    "git clone https://github.com/NVIDIA/apex, and in it: APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation . "
    "(the apex of PyPI is another package)",
)
FLASH = Library("flash-attn", "pip install --no-build-isolation flash-attn (builds against CUDA)")


@contextmanager
def wanted(library: Library, flag: str, instead: str) -> Iterator[None]:
    """Around an import: raises ConfigError with the install line if it fails.

    flag: what asked for the library. instead: the value of it that needs none.
    """
    try:
        yield
    except Exception as error:  # the empty transformer-engine of PyPI raises a RuntimeError; a library built for another torch, anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(
            f"{flag} needs {library.name}, which cannot be imported here ({reason}): {library.install}; or use {instead}"
        ) from error
