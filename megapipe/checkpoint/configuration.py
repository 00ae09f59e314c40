"""The configuration that a checkpoint was written with, for what is decided before anything is built. Imports no torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megapipe.checkpoint.folder import CONFIG_NAME, CheckpointFolder, find_checkpoint
from megapipe.config.config import Config
from megapipe.config.load import from_yaml
from megapipe.errors import CheckpointError

EMBEDDING = "embedding.word_embeddings.weight"


def checkpoint_config(root: Path, step: int | None = None) -> tuple[Config, Path]:
    """The saved configuration and the checkpoint's folder. Raises CheckpointError if there is no checkpoint or its file is unreadable."""
    found = find_checkpoint(root, step)
    if found is None:
        raise CheckpointError(f"--use-checkpoint-args: {root} holds no checkpoint")
    return _written(found.path), found.path


def saved_config(folder: CheckpointFolder) -> Config:
    """The configuration beside a checkpoint, model.vocab_size being the rows of its embedding: those that were trained, whether the run
    had them from --vocab-size or from its tokenizer. Raises CheckpointError."""
    config = _written(folder.path)
    rows = next(
        (saved.shape[0] for name, saved in folder.manifest.tensors.items() if name.endswith(f"/{EMBEDDING}")), None
    )
    if rows is None:
        raise CheckpointError(f"{folder.path} holds no tensor {EMBEDDING}")
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=rows, padded_vocab_size=None))


def _written(folder: Path) -> Config:
    path = folder / CONFIG_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    return from_yaml(text, str(path))
