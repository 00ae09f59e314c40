"""SentencePiece models, with the special tokens that Megatron finds in them or adds to them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megapipe.errors import ConfigError, DataError

MODEL_FILE = "tokenizer.model"


def _load(model: str | Path) -> tuple[Any, bytes]:
    """A processor and the bytes of its model. `model`: the file, or a folder with a tokenizer.model in it."""
    import sentencepiece

    path = Path(model) / MODEL_FILE if Path(model).is_dir() else Path(model)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"cannot read the SentencePiece model {path}: {error.strerror}; see --tokenizer-model"
        ) from None
    processor = sentencepiece.SentencePieceProcessor()
    try:
        loaded = bool(content) and processor.LoadFromSerializedProto(content)
    except RuntimeError:
        loaded = False
    if not loaded:
        raise DataError(f"{path} ({len(content)} bytes) is not a SentencePiece model, or a damaged one")
    return processor, content


class _Model:
    """What both readings of a SentencePiece model share."""

    def __init__(self, model: str | Path) -> None:
        self._processor, self._content = _load(model)
        self._num_pieces = int(self._processor.GetPieceSize())

    def encode(self, text: str) -> list[int]:
        return [int(i) for i in self._processor.EncodeAsIds(text)]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._processor.DecodeIds([int(i) for i in ids if i < self._num_pieces]))

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MODEL_FILE).write_bytes(self._content)


class SentencePieceTokenizer(_Model):
    """Pieces of the model, then those of <CLS> <SEP> <EOD> <MASK> <PAD> <BOS> <EOS> that it has not, in this order.

    The id of <EOD> ends a document. Padding, beginning and end of text keep the pieces that the model declares for them.
    """

    name = "SentencePieceTokenizer"

    def __init__(self, model: str | Path) -> None:
        super().__init__(model)
        pieces = {self._processor.IdToPiece(i): i for i in range(self._num_pieces)}
        declared = {
            "<PAD>": self._processor.pad_id(),
            "<BOS>": self._processor.bos_id(),
            "<EOS>": self._processor.eos_id(),
        }
        ids: dict[str, int] = {}
        for special in ("<CLS>", "<SEP>", "<EOD>", "<MASK>", "<PAD>", "<BOS>", "<EOS>"):
            if declared.get(special, -1) >= 0:
                ids[special] = declared[special]
            else:
                ids[special] = pieces.setdefault(special, len(pieces))
        self.vocab_size = len(pieces)
        self.eod, self.bos, self.pad = ids["<EOD>"], ids["<BOS>"], ids["<PAD>"]


class GPTSentencePieceTokenizer(_Model):
    """The pieces of the model and nothing else; EOS ends a document."""

    name = "GPTSentencePieceTokenizer"

    def __init__(self, model: str | Path) -> None:
        super().__init__(model)
        self.vocab_size = self._num_pieces
        self.eod = int(self._processor.eos_id())
        if self.eod < 0:
            raise ConfigError(
                f"--tokenizer-type {self.name}: {model} declares no EOS piece; use SentencePieceTokenizer"
            )
        self.bos = int(self._processor.bos_id()) if self._processor.bos_id() >= 0 else None
        self.pad = int(self._processor.pad_id()) if self._processor.pad_id() >= 0 else None


class Llama2Tokenizer(GPTSentencePieceTokenizer):
    """As GPTSentencePieceTokenizer, with BOS before every text."""

    name = "Llama2Tokenizer"

    def __init__(self, model: str | Path) -> None:
        super().__init__(model)
        if self.bos is None:
            raise ConfigError(
                f"--tokenizer-type {self.name}: {model} declares no BOS piece; use GPTSentencePieceTokenizer"
            )

    def encode(self, text: str) -> list[int]:
        ids = super().encode(text)
        return ids if self.bos is None else [self.bos, *ids]
