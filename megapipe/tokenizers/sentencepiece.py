"""SentencePiece models: reading them with the special tokens that Megatron finds in them or adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from megapipe.errors import ConfigError, DataError
from megapipe.input_files import regular

MODEL_FILE = "tokenizer.model"
# Megatron looks for these names; declared in the model, they do not enlarge the vocabulary later
CONTROL_SYMBOLS = ("<CLS>", "<SEP>", "<EOD>", "<MASK>")


class _Model:
    """A SentencePiece model. `model`: the file, or a folder with a tokenizer.model in it."""

    eod: int | None
    bos: int | None
    pad: int | None

    def __init__(self, model: str | Path) -> None:
        import sentencepiece

        path = Path(model) / MODEL_FILE if Path(model).is_dir() else Path(model)
        try:
            self._content = regular(path).read_bytes()
        except OSError as error:
            other = (path.parent / "tokenizer.json").is_file()
            instead = "; its folder holds a tokenizer.json: use --tokenizer-type HuggingFaceTokenizer" if other else ""
            raise DataError(f"cannot read --tokenizer-model {path}: {error.strerror}{instead}") from None
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
