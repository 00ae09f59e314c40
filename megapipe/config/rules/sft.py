"""Supervised finetuning: what --sft implies, and its rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from megapipe.config.config import Config
from megapipe.config.files import HUGGING_FACE_TOKENIZER

# the loss is that of all trained tokens of the global batch, and conversations of a sequence do not see each other
IMPLIED = {
    "training.calculate_per_token_loss": "averages the loss over the trained tokens of the global batch",
    "data.reset_position_ids": "begins every conversation at position 0",
    "data.reset_attention_mask": "lets a token see only its own conversation",
    "data.eod_mask_loss": "gives no loss to the token after the end of a conversation",
}


def with_implied(config: Config) -> Config:
    """Return the configuration with what --sft implies."""
    if not config.data.sft:
        return config
    changes: dict[str, dict[str, bool]] = {}
    for key in IMPLIED:
        section, name = key.split(".")
        changes.setdefault(section, {})[name] = True
    sections = {name: dataclasses.replace(getattr(config, name), **values) for name, values in changes.items()}
    return dataclasses.replace(config, **sections)


def conversations(config: Config) -> Iterator[str]:
    """Check the source of conversations and the tokenizer."""
    data = config.data
    if not data.sft:
        return
    if data.mock_data:
        yield "--mock-data generates tokens, but --sft trains on conversations; give --train-data-path FILE.jsonl"
    if data.tokenizer_type != HUGGING_FACE_TOKENIZER:
        given = f"--tokenizer-type {data.tokenizer_type}" if data.tokenizer_type else "no --tokenizer-type"
        way = f"give --tokenizer-type {HUGGING_FACE_TOKENIZER} --tokenizer-model FOLDER"
        yield f"--sft needs a tokenizer.json, for its special tokens and its chat template, but {given} is given; {way}"


RULES = (conversations,)
