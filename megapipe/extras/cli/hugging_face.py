"""`--load FOLDER --finetune` from a Hugging Face folder: its model, tokenizer and weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from megapipe.config.config import Config
from megapipe.config.load import DEFAULT, LoadedConfig, with_checkpoint_model
from megapipe.config.rules.check import Rule
from megapipe.errors import ConfigError
from megapipe.extras.convert import hugging_face
from megapipe.extras.convert.snapshot import Snapshot
from megapipe.train.loading import Weights

# fields of the model section that do not change the function of the weights: the run's own values hold
OVERRIDABLE = (
    "seq_length hidden_dropout attention_dropout init_method_std make_vocab_size_divisible_by attention_softmax_in_fp32"
).split()


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
    given = with_tokenizer(loaded, snapshot, folder)
    taken = with_checkpoint_model(given, snapshot.config, str(folder), rules, "--load", OVERRIDABLE)
    return taken, snapshot.tensors


def with_tokenizer(loaded: LoadedConfig, snapshot: Snapshot, folder: Path) -> LoadedConfig:
    """Name the folder's tokenizer, if it has one and the run names none."""
    data, origins = loaded.config.data, dict(loaded.origins)
    if data.tokenizer_type is not None or snapshot.tokenizer is None:
        return loaded
    kind, file = snapshot.tokenizer
    model = data.tokenizer_model or str(folder / file)
    data = dataclasses.replace(data, tokenizer_type=kind, tokenizer_model=model)
    for key in ("data.tokenizer_type", "data.tokenizer_model"):
        origins[key] = f"checkpoint {folder}" if origins[key] == DEFAULT else origins[key]
    config: Config = dataclasses.replace(loaded.config, data=data)
    return dataclasses.replace(loaded, config=config, origins=origins)
