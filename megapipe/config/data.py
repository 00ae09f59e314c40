"""The data section: token files, their split, the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.config.option import Need, option
from megapipe.errors import ConfigError

TOKENIZER_TYPES = (
    "ByteTokenizer",
    "NullTokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "HuggingFaceTokenizer",
    "GPT2BPETokenizer",
)

TOKENIZER = Need("data.tokenizer_type", "--tokenizer-type, the kind of tokenizer in that file")


@dataclass(frozen=True)
class DataConfig:
    """Data and tokenizer.

    Data paths are blends: PREFIX, or WEIGHT PREFIX WEIGHT PREFIX ..., or PREFIX PREFIX ... (one epoch of each).
    """

    data_path: tuple[str, ...] | None = option(
        None, "PREFIX of PREFIX.bin and PREFIX.idx, or a blend: WEIGHT PREFIX WEIGHT PREFIX ..."
    )
    split: str | None = option(None, "shares of --data-path for training, validation and test", derived="969,30,1")
    train_data_path: tuple[str, ...] | None = option(None, "blend for training instead of a share of --data-path")
    valid_data_path: tuple[str, ...] | None = option(None, "blend for validation instead of a share of --data-path")
    test_data_path: tuple[str, ...] | None = option(None, "blend for test instead of a share of --data-path")
    data_cache_path: str | None = option(None, "directory of index caches", derived="a directory beside the data")
    mock_data: bool = option(False, "train on generated tokens instead of files")
    num_workers: int = option(2, "threads that prefetch batches on each rank; 0: none", unit="threads", at_least=0)
    reset_position_ids: bool = option(False, "restart positions after each end-of-document token")
    reset_attention_mask: bool = option(False, "let a token attend only to its own document")
    eod_mask_loss: bool = option(False, "no loss where the input is an end-of-document token")
    tokenizer_type: str | None = option(None, "kind of tokenizer", choices=TOKENIZER_TYPES)
    tokenizer_model: str | None = option(None, "file or directory of the tokenizer", needs=TOKENIZER)
    vocab_file: str | None = option(None, "vocabulary of GPT2BPETokenizer (vocab.json)", needs=TOKENIZER)
    merge_file: str | None = option(None, "merges of GPT2BPETokenizer (merges.txt)", needs=TOKENIZER)


def split_shares(text: str) -> tuple[float, float, float]:
    """Return the shares of training, validation and test in a split such as '969,30,1' or '8/1/1', with sum 1.

    Missing numbers are 0, as in Megatron. Raises ConfigError if there are more than three, or all are 0.
    """
    words = text.replace("/", ",").split(",")
    try:
        shares = [float(word) for word in words]
    except ValueError:
        raise ConfigError(f"--split {text}: expected numbers separated by commas, such as 969,30,1") from None
    if len(shares) > 3 or any(not 0 <= share < float("inf") for share in shares) or sum(shares) <= 0:
        raise ConfigError(
            f"--split {text}: expected up to three numbers of at least 0 (training, validation, test), not all 0, "
            "such as 969,30,1"
        )
    shares += [0.0] * (3 - len(shares))
    total = sum(shares)
    return shares[0] / total, shares[1] / total, shares[2] / total
