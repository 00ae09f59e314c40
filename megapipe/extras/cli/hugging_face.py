"""`--load FOLDER --finetune` from a Hugging Face folder: its model, tokenizer and weights."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from megapipe.assembly.datasets import tokenizer_of
from megapipe.checkpoint.changes import check_tokenizer
from megapipe.config.config import Config
from megapipe.config.load import LoadedConfig, with_checkpoint_model, with_tokenizer
from megapipe.config.rules.check import Rule
from megapipe.errors import ConfigError
from megapipe.extras.convert import hugging_face
from megapipe.extras.convert.snapshot import Snapshot, trained_with
from megapipe.tokenizers.tokenizer import tokenizer_fingerprint
from megapipe.train.loading import Weights


def start_from(loaded: LoadedConfig, rules: Sequence[Rule] = ()) -> tuple[LoadedConfig, Weights]:
    """Return the run with the folder's model section, and its tokenizer unless one is given; and the weights, unread.

    rules: of the run's ranks, checked with all others. Raises ConfigError for a flag that contradicts the folder,
    CheckpointError for a folder that cannot be converted.
    """
    folder = Path(str(loaded.config.checkpoint.load))
    if not loaded.config.checkpoint.finetune:
        rule = "is a Hugging Face folder: weights without a step, an optimizer or random state"
        raise ConfigError(f"--load {folder} {rule}; add --finetune to start at step 0 from these weights")
    snapshot = hugging_face.read(folder)
    if loaded.config.data.tokenizer_type is not None and not loaded.config.data.mock_data:
        _check_tokenizer(loaded.config, snapshot, folder)
    if snapshot.tokenizer is not None:
        kind, file = snapshot.tokenizer
        found = {"tokenizer_type": kind, "tokenizer_model": str(folder / file)}
        loaded = with_tokenizer(loaded, found, str(folder))
    return with_checkpoint_model(loaded, snapshot.config, str(folder), rules, "--load"), snapshot.tensors


def _check_tokenizer(config: Config, snapshot: Snapshot, folder: Path) -> None:
    """Raise CheckpointError if a run has another tokenizer than the folder, unless --allow-changed-data."""
    tokenizer, theirs = tokenizer_of(config), trained_with(snapshot)
    if tokenizer is None or theirs is None:
        return
    own = tokenizer_fingerprint(tokenizer, config.data.tokenizer_model or config.data.vocab_file)
    beside = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in snapshot.files}
    if own["files"] and own["files"].items() <= beside.items():
        return  # another of the folder's tokenizers, such as tokenizer.model for tokenizer.json
    may_differ = config.checkpoint.allow_changed_data
    check_tokenizer({"tokenizer": theirs}, own, str(folder), is_finetuning=True, may_differ=may_differ)
