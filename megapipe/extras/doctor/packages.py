"""Versions of installed packages, read from their metadata: nothing is imported, so a package that cannot be imported is still found."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

NEEDED = ("torch", "numpy", "safetensors", "pyyaml", "sentencepiece")
OPTIONAL = (
    *("tokenizers", "transformers", "wandb", "tensorboard"),
    *("triton", "flash-attn", "transformer-engine", "apex"),
)


def versions() -> dict[str, str | None]:
    """Version by package; None for one that is not installed. First of all Python's own and the system's."""
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }
    return found | {name: _version(name) for name in (*NEEDED, *OPTIONAL)}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
