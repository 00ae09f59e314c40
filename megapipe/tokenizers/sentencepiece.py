"""SentencePiece models: reading them with the special tokens that Megatron finds in them or adds, and training one."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from megapipe.errors import ConfigError, DataError

MODEL_FILE = "tokenizer.model"
# Megatron looks for these names; declared in the model, they do not enlarge the vocabulary later
CONTROL_SYMBOLS = ("<CLS>", "<SEP>", "<EOD>", "<MASK>")
MAX_LINE_BYTES = 4096
MIN_VOCAB_SIZE = 400  # 256 bytes, 10 special tokens, and some pieces to learn


class _Model:
    """A SentencePiece model. `model`: the file, or a folder with a tokenizer.model in it."""

    eod: int | None
    bos: int | None
    pad: int | None

    def __init__(self, model: str | Path) -> None:
        import sentencepiece

        path = Path(model) / MODEL_FILE if Path(model).is_dir() else Path(model)
        try:
            self._content = path.read_bytes()
        except OSError as error:
            raise DataError(f"cannot read --tokenizer-model {path}: {error.strerror}") from None
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            loaded = bool(self._content) and self._processor.LoadFromSerializedProto(self._content)
        except RuntimeError:
            loaded = False
        if not loaded:
            raise DataError(f"{path} ({len(self._content)} bytes) is not a SentencePiece model, or a damaged one")
        self._num_pieces = int(self._processor.GetPieceSize())
        self.special: dict[str, str] = {}  # 'eos_token' -> its text

    def _name_special(self, texts: Mapping[int, str]) -> None:
        named = {"eos_token": self.eod, "bos_token": self.bos, "pad_token": self.pad}
        self.special = {name: texts[number] for name, number in named.items() if number is not None}

    def encode(self, text: str) -> list[int]:
        return [int(i) for i in self._processor.EncodeAsIds(text)]

    def encode_batch(self, texts: list[str], num_threads: int) -> list[list[int]]:
        """Encode texts in the library's own threads."""
        found: list[list[int]] = self._processor.Encode(texts, out_type=int, num_threads=num_threads)
        return found

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._processor.DecodeIds([int(i) for i in ids if i < self._num_pieces]))

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MODEL_FILE).write_bytes(self._content)


class SentencePieceTokenizer(_Model):
    """The pieces of the model, then those of <CLS> <SEP> <EOD> <MASK> <PAD> <BOS> <EOS> that it lacks, in this order.

    <EOD> ends a document. <PAD>, <BOS> and <EOS> are the pieces that the model declares for them, if it does.
    """

    name = "SentencePieceTokenizer"

    def __init__(self, model: str | Path) -> None:
        super().__init__(model)
        pieces = {self._processor.IdToPiece(i): i for i in range(self._num_pieces)}
        processor = self._processor
        declared = {"<PAD>": processor.pad_id(), "<BOS>": processor.bos_id(), "<EOS>": processor.eos_id()}  # -1: none
        ids: dict[str, int] = {}
        for special in (*CONTROL_SYMBOLS, *declared):
            is_declared = declared.get(special, -1) >= 0
            ids[special] = declared[special] if is_declared else pieces.setdefault(special, len(pieces))
        self.vocab_size = len(pieces)
        self.eod, self.bos, self.pad = ids["<EOD>"], ids["<BOS>"], ids["<PAD>"]
        self._name_special({number: name for name, number in pieces.items()})


class GPTSentencePieceTokenizer(_Model):
    """The pieces of the model and nothing else; EOS ends a document."""

    name = "GPTSentencePieceTokenizer"

    def __init__(self, model: str | Path) -> None:
        super().__init__(model)
        self.vocab_size = self._num_pieces
        self.eod = int(self._processor.eos_id())
        if self.eod < 0:
            raise ConfigError(f"--tokenizer-type {self.name}: {model} has no EOS piece; use SentencePieceTokenizer")
        bos, pad = int(self._processor.bos_id()), int(self._processor.pad_id())
        self.bos = bos if bos >= 0 else None
        self.pad = pad if pad >= 0 else None
        self._name_special(
            {number: self._processor.IdToPiece(number) for number in (self.eod, bos, pad) if number >= 0}
        )


class Llama2Tokenizer(GPTSentencePieceTokenizer):
    """GPTSentencePieceTokenizer with BOS in front of every text."""

    name = "Llama2Tokenizer"

    def __init__(self, model: str | Path) -> None:
        super().__init__(model)
        if self.bos is None:
            raise ConfigError(f"--tokenizer-type {self.name}: {model} has no BOS piece; use GPTSentencePieceTokenizer")

    def encode(self, text: str) -> list[int]:
        ids = super().encode(text)
        return ids if self.bos is None else [self.bos, *ids]

    def encode_batch(self, texts: list[str], num_threads: int) -> list[list[int]]:
        found = super().encode_batch(texts, num_threads)
        return found if self.bos is None else [[self.bos, *ids] for ids in found]


def train_sentencepiece(
    texts: Iterable[str],
    model_file: str | Path,
    *,
    vocab_size: int = 8192,
    max_bytes: int = 4_000_000,
    num_threads: int | None = None,
) -> None:
    """Train a model that is lossless for code on the first `max_bytes` of the texts and write `model_file`.

    A unigram model without normalization (the default one merges spaces and characters), with pieces of spaces only,
    so that an indentation is one token, and with bytes for everything outside the vocabulary. Only U+2581, which
    SentencePiece uses for a space, is not preserved. Raises ConfigError if the vocabulary is too small or too large.
    """
    import sentencepiece

    if vocab_size < MIN_VOCAB_SIZE:
        rule = f"bytes and special tokens alone need most of that; use {MIN_VOCAB_SIZE} or more"
        raise ConfigError(f"--vocab-size {vocab_size}: {rule}")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=_lines(texts, max_bytes),
            model_writer=model,
            model_type="unigram",
            vocab_size=vocab_size,
            character_coverage=0.9995,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            split_by_whitespace=True,
            allow_whitespace_only_pieces=True,
            byte_fallback=True,
            split_digits=True,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=3,
            pad_piece="<PAD>",
            control_symbols=list(CONTROL_SYMBOLS),
            user_defined_symbols=["\n", "\t"],
            max_sentence_length=MAX_LINE_BYTES,
            num_threads=num_threads if num_threads is not None else min(16, os.cpu_count() or 1),
            minloglevel=2,
        )
    except RuntimeError as error:
        most = re.search(r"value <= (\d+)", str(error))
        if most is None:
            raise ConfigError(f"--vocab-size {vocab_size}: {error}") from None
        if int(most[1]) < MIN_VOCAB_SIZE:
            rule = f"it supports at most {most[1]} pieces, and a vocabulary has at least {MIN_VOCAB_SIZE}"
            raise ConfigError(f"the text is too small to train a tokenizer on: {rule}; give more text") from None
        rule = f"the text supports at most {most[1]}; give more text or a smaller vocabulary"
        raise ConfigError(f"--vocab-size {vocab_size}: {rule}") from None
    target = Path(model_file)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
    partial.write_bytes(model.getvalue())
    os.replace(partial, target)


def _lines(texts: Iterable[str], max_bytes: int) -> Iterator[str]:
    """Yield lines of the texts, which the trainer calls sentences, up to `max_bytes`."""
    total = 0
    for text in texts:
        for line in text.splitlines():
            size = len(line.encode("utf-8", errors="ignore"))
            if 0 < size <= MAX_LINE_BYTES:
                yield line
                total += size
            if total >= max_bytes:
                return
