"""The tokens that end, begin and pad texts, in the files of a Hugging Face folder.

transformers takes the end of a text from generation_config.json, without one from config.json, and where config.json
names none from the defaults of the architecture, which are other tokens. So an export always names them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from megapipe.assembly.datasets import tokenizer_of
from megapipe.config.files import DataConfig
from megapipe.errors import CheckpointError, ConfigError
from megapipe.extras.convert.snapshot import Snapshot
from megapipe.tokenizers.hugging_face import GENERATION_FILE, TOKENIZER_CONFIG, end_ids
from megapipe.tokenizers.tokenizer import Tokenizer

CONFIG = "config.json"
EOS, OTHERS = "eos_token_id", {"bos_token_id": "bos", "pad_token_id": "pad"}
# --tokenizer-type -> the class of transformers 5 that reads its files, where no tokenizer_config.json names one
CLASSES = {
    "HuggingFaceTokenizer": "PreTrainedTokenizerFast",
    "GPT2BPETokenizer": "GPT2Tokenizer",
    "SentencePieceTokenizer": "PreTrainedTokenizerFast",
    "GPTSentencePieceTokenizer": "PreTrainedTokenizerFast",
    "Llama2Tokenizer": "LlamaTokenizer",
}


def tokenizer_of_snapshot(snapshot: Snapshot) -> Tokenizer | None:
    """Return the tokenizer whose files are with the weights, else the one that the run was trained with, if any.

    Raises ConfigError, DataError if its files are gone or damaged.
    """
    data = snapshot.config.data
    if snapshot.files:
        folder = snapshot.files[0].parent
        if data.tokenizer_type is not None:
            data = DataConfig(tokenizer_type=data.tokenizer_type, tokenizer_model=str(folder))
        elif snapshot.tokenizer is not None:
            kind, file = snapshot.tokenizer
            data = DataConfig(tokenizer_type=kind, tokenizer_model=str(folder / file))
    return tokenizer_of(dataclasses.replace(snapshot.config, data=data), is_resolved=True)


def exported_files(snapshot: Snapshot) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the keys of config.json that name special tokens, and the tokenizer's and generation's files by name.

    What the files of the snapshot say stays as it is, except that the token at which the tokenizer ends documents is
    always among those that end a text. Raises ConfigError, DataError, CheckpointError.
    """
    tokenizer, stored = tokenizer_of_snapshot(snapshot), snapshot.extra_settings
    files = {path.name: path.read_bytes() for path in snapshot.files if path.name != CONFIG}
    generation = _object(files, GENERATION_FILE)
    keys = _special_keys(tokenizer, stored, snapshot)
    if not stored:  # else what the original leaves to transformers' defaults stays so
        keys = dict.fromkeys((EOS, *OTHERS)) | keys
    own = _special_keys(tokenizer, stored | generation, snapshot)
    own = {name: value for name, value in own.items() if value is not None}
    if generation | own != generation:
        files[GENERATION_FILE] = json_bytes(generation | own)
    if tokenizer is not None:  # tokenizer_config.json has the special tokens that no file names
        special: Mapping[str, str] = getattr(tokenizer, "special", {})
        config, others = _object(files, TOKENIZER_CONFIG), _object(files, "special_tokens_map.json")
        unnamed = {name: text for name, text in special.items() if config.get(name, others.get(name)) is None}
        if unnamed and tokenizer.name in CLASSES:
            known = {} if config else {"tokenizer_class": CLASSES[tokenizer.name]}
            files[TOKENIZER_CONFIG] = json_bytes(known | config | unnamed)
    return keys, files


def ends_of(snapshot: Snapshot) -> tuple[int, ...]:
    """Return the tokens at which an export of the snapshot ends a text."""
    keys, files = exported_files(snapshot)
    return end_ids(_object(files, GENERATION_FILE)) or end_ids(keys)


def _special_keys(tokenizer: Tokenizer | None, stored: Mapping[str, Any], snapshot: Snapshot) -> dict[str, Any]:
    """Return the ids of special tokens: those stored, with the tokenizer's."""
    found = {name: stored[name] for name in (EOS, *OTHERS) if name in stored}
    if tokenizer is None:
        return found
    ids = {name: getattr(tokenizer, field) for name, field in {EOS: "eod", **OTHERS}.items()}
    size = snapshot.config.model.vocab_size or 0
    outside = next((value for value in ids.values() if value is not None and value >= size), None)
    if outside is not None:
        rule = f"a special token {outside}, the model only {size} tokens: they do not belong together"
        raise ConfigError(f"the tokenizer {tokenizer.name} has {rule}; give its files with --like")
    ends = end_ids(stored)
    if ids[EOS] is None or ids[EOS] in ends:
        del ids[EOS]
    elif ends:
        ids[EOS] = [ids[EOS], *ends]
    return found | {name: value for name, value in ids.items() if value is not None}


def _object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Return the JSON object of a file, empty without the file. Raises CheckpointError."""
    try:
        content = json.loads(files[name]) if name in files else {}
    except ValueError as error:
        raise CheckpointError(f"{name} of the tokenizer cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{name} of the tokenizer does not hold a JSON object")
    return content


def json_bytes(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
