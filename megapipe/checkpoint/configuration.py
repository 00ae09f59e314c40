"""The configuration that a checkpoint was written with. Imports no torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megapipe.checkpoint.folder import CONFIG_NAME, CheckpointFolder, find_checkpoint
from megapipe.config.config import Config
from megapipe.config.load import from_yaml
from megapipe.errors import CheckpointError

EMBEDDING = "embedding.word_embeddings.weight"


def checkpoint_config(root: Path, step: int | None = None) -> tuple[Config, Path]:
    """Return the saved configuration and the checkpoint's folder.

    Raises CheckpointError if there is no checkpoint or its configuration cannot be read.
    """
    found = find_checkpoint(root, step)
    if found is None:
        raise CheckpointError(f"--use-checkpoint-args: {root} holds no checkpoint")
    return read_config(found.path / CONFIG_NAME), found.path


def saved_config(folder: CheckpointFolder) -> Config:
    """Return a checkpoint's configuration with vocab_size set to the rows of its embedding. Raises CheckpointError.

    These are the rows that were trained, whether the run had them from --vocab-size or from its tokenizer.
    """
    config = read_config(folder.path / CONFIG_NAME)
    tensors = folder.manifest.tensors.items()
    rows = next((saved.shape[0] for name, saved in tensors if name.endswith(f"/{EMBEDDING}")), None)
    if rows is None:
        raise CheckpointError(f"{folder.path} holds no tensor {EMBEDDING}")
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=rows, padded_vocab_size=None))


def read_config(path: Path) -> Config:
    """Read a configuration as YAML. Raises CheckpointError if the file cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    return from_yaml(text, str(path))
