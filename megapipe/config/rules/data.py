"""Rules of data, tokenizer and checkpoints; and those that only a training job must obey."""

from __future__ import annotations

from collections.abc import Iterator

from megapipe.config.config import Config
from megapipe.config.data import DataConfig, split_shares
from megapipe.config.rules.proposals import chosen
from megapipe.errors import ConfigError

TOKENIZER_FILES = {
    "SentencePieceTokenizer": ("tokenizer_model",),
    "GPTSentencePieceTokenizer": ("tokenizer_model",),
    "Llama2Tokenizer": ("tokenizer_model",),
    "HuggingFaceTokenizer": ("tokenizer_model",),
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
}


def split_paths(data: DataConfig) -> list[str]:
    """Return the flags of the data paths of single splits that are given."""
    return chosen(
        ("--train-data-path", data.train_data_path is not None),
        ("--valid-data-path", data.valid_data_path is not None),
        ("--test-data-path", data.test_data_path is not None),
    )


def sources(config: Config) -> Iterator[str]:
    """Yield if there is more than one source of data, or the split does not fit it."""
    data = config.data
    given = chosen(("--mock-data", data.mock_data), ("--data-path", data.data_path is not None)) + split_paths(data)[:1]
    if len(given) > 1:
        yield f"{' and '.join(given)} are different sources of data; give one of them"
    if data.split is not None and split_paths(data):
        yield f"--split divides --data-path, but {split_paths(data)[0]} names each part itself; leave --split out"
    elif data.split is not None:
        try:
            split_shares(data.split)
        except ConfigError as error:
            yield str(error)


def blends(config: Config) -> Iterator[str]:
    """Check the blends: PREFIX ... or WEIGHT PREFIX ... (the first error only)."""
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        blend, flag = getattr(config.data, name), "--" + name.replace("_", "-")
        if blend is None:
            continue
        weights = [is_number(word) for word in blend]
        pairs = weights == [True, False] * (len(blend) // 2)
        if not blend:
            yield f"{flag} is empty; give a PREFIX, or WEIGHT PREFIX WEIGHT PREFIX ..."
        elif any(weights) and not pairs:
            yield (
                f"{flag} {' '.join(blend)}: weights and prefixes must alternate, WEIGHT PREFIX WEIGHT PREFIX ..., or "
                "there must be no weights"
            )
        elif not all(0 < float(word) < float("inf") for word in blend[::2] if any(weights)):
            yield f"{flag} {' '.join(blend)}: weights must be above 0"
        else:
            continue
        return


def is_number(word: str) -> bool:
    """Return True if a word is a number, as a weight is."""
    try:
        float(word)
    except ValueError:
        return False
    return True


def tokenizer(config: Config) -> Iterator[str]:
    """Yield what a tokenizer lacks."""
    data = config.data
    if data.tokenizer_type is None:
        return
    missing = [name for name in TOKENIZER_FILES.get(data.tokenizer_type, ()) if getattr(data, name) is None]
    if data.tokenizer_type == "GPT2BPETokenizer" and data.tokenizer_model is not None:
        missing = []  # a folder with both files, as in a checkpoint
    if data.tokenizer_type == "NullTokenizer" and config.model.vocab_size is None:
        missing = ["vocab_size"]
    if missing:
        yield f"--tokenizer-type {data.tokenizer_type} needs --{missing[0].replace('_', '-')}"


def checkpoints(config: Config) -> Iterator[str]:
    """Check the retained checkpoints, and with finetuning."""
    every, interval = config.checkpoint.save_retain_interval, config.checkpoint.save_interval
    if every is not None and interval is None:
        yield f"--save-retain-interval {every} needs a --save-interval that divides it"
    elif every is not None and interval is not None and every % interval:
        yield (
            f"--save-retain-interval {every} is not a multiple of --save-interval {interval}; "
            f"use {max(1, round(every / interval)) * interval}"
        )
    if config.checkpoint.finetune and config.optimizer.use_checkpoint_opt_param_scheduler:
        yield (
            "--finetune starts at step 0 with the schedules of this configuration; leave "
            "--use-checkpoint-opt_param-scheduler out"
        )


def job(config: Config) -> Iterator[str]:
    """Yield what a training job lacks: a length, a learning rate, data or a vocabulary."""
    training, data = config.training, config.data
    if not training.skip_train:
        if training.train_iters is None and training.train_samples is None:
            yield (
                "the length of the run is missing; give --train-iters or --train-samples (or --skip-train to evaluate)"
            )
        if config.optimizer.lr is None:
            yield "--lr, the highest learning rate, is missing"
    if not data.mock_data and data.data_path is None:
        paths = split_paths(data)
        if not paths:
            yield "training data is missing; give --data-path PREFIX, --train-data-path PREFIX or --mock-data"
        elif data.train_data_path is None and not training.skip_train:
            yield f"{paths[0]} is given, but no training data; add --train-data-path"
    if data.tokenizer_type is None and config.model.vocab_size is None:
        yield "the vocabulary is unknown; give --tokenizer-type with its files, or --vocab-size"


RULES = (sources, blends, tokenizer, checkpoints)
