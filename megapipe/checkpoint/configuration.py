"""The configuration that a checkpoint was written with, for what is decided before anything is built. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from megapipe.checkpoint.folder import CONFIG_NAME, find_checkpoint
from megapipe.config.config import Config
from megapipe.config.load import from_yaml
from megapipe.errors import CheckpointError


def checkpoint_config(root: Path, step: int | None = None, flag: str = "--use-checkpoint-args") -> tuple[Config, Path]:
    """The saved configuration and the checkpoint's folder. Raises CheckpointError if there is no checkpoint or its file is unreadable.

    flag: that asked for it, named in the message.
    """
    found = find_checkpoint(root, step)
    if found is None:
        raise CheckpointError(f"{flag}: {root} holds no checkpoint")
    path = found.path / CONFIG_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    return from_yaml(text, str(path)), found.path
