"""Training of a tokenizer: a folder with a tokenizer.json, its special tokens and a chat template.

Everything that reads tokens later takes this folder: preprocessing, pretraining, finetuning on conversations,
generation, and `transformers` with an exported model, whose tokenizer.json is this one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from megapipe.errors import ConfigError
from megapipe.tokenizers.chat import FORMATS
from megapipe.tokenizers.hugging_face import TEMPLATE_FILE, TOKENIZER_CONFIG, TOKENIZER_FILE, optional_package

CHAT_FORMAT = "chatml"  # of FORMATS
END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = (END_OF_TEXT, "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
MIN_VOCAB_SIZE = 320  # 256 bytes, the special tokens, and some pieces to learn
# What a piece may span: a word with the character before it; one digit; punctuation with the blank before it and the
# line breaks after it; line breaks; blanks. So an indentation is one token.
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str], folder: str | Path, vocab_size: int) -> None:
    """Train a byte-level BPE on texts and write its folder.

    Byte-level BPE (Sennrich et al. 2016, arXiv:1508.07909; Radford et al. 2019): any text is decoded exactly as it was.
    <|endoftext|> ends a document; the chat template is ChatML, with <|im_start|> and <|im_end|> around each message.
    Raises ConfigError if the vocabulary is too small, or larger than the text supports.
    """
    library = optional_package("tokenizers", "training a tokenizer", "tokenizers")
    if vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(f"--vocab-size {vocab_size} hardly holds all bytes; use {MIN_VOCAB_SIZE} or more")
    tokenizer = library.Tokenizer(library.models.BPE())
    split = library.pre_tokenizers.Split(library.Regex(WORDS), "isolated")
    to_bytes = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = library.pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if (found := tokenizer.get_vocab_size()) < vocab_size:
        rule = f"the text supports at most {found}; give more text or a smaller vocabulary"
        raise ConfigError(f"--vocab-size {vocab_size}: {rule}")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}
    contents = {
        TEMPLATE_FILE: FORMATS[CHAT_FORMAT],
        TOKENIZER_CONFIG: json.dumps(settings, indent=2) + "\n",
        TOKENIZER_FILE: tokenizer.to_str(pretty=True),  # last: the folder is complete
    }
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        partial = target / f"{name}.partial-{os.getpid()}"
        partial.write_text(content, encoding="utf-8")
        os.replace(partial, target / name)
