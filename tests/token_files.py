"""Token files written document by document, for tests; users write them with `megapipe preprocess` and `merge`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from megapipe.data.indexed_file import Tokenizer
from megapipe.extras.preprocess.indexed_writer import publish, write_index


class IndexedWriter:
    """A context in which documents are added; leaving it writes PREFIX.bin and PREFIX.idx."""

    def __init__(
        self, prefix: str | Path, dtype: DTypeLike, *, multimodal: bool = False, tokenizer: Tokenizer | None = None
    ) -> None:
        self.prefix, self.dtype, self.tokenizer = str(prefix), np.dtype(dtype).newbyteorder("<"), tokenizer
        self._tokens: list[bytes] = []
        self._lengths: list[int] = []
        self._documents = [0]
        self._modes: list[int] = []

    def add_document(
        self, tokens: ArrayLike, lengths: Sequence[int] | None = None, modes: Sequence[int] | None = None
    ) -> None:
        """Append one document. tokens: of all its sequences. lengths, modes: of each (default: one sequence)."""
        values = np.asarray(tokens)
        self._tokens.append(values.astype(self.dtype).tobytes())
        self._lengths += [len(values)] if lengths is None else lengths
        self._documents.append(len(self._lengths))
        self._modes += modes or []

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if kind is not None:
            return
        Path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
        partial_bin, partial_idx = Path(f"{self.prefix}.new-bin"), Path(f"{self.prefix}.new-idx")
        partial_bin.write_bytes(b"".join(self._tokens))
        lengths, documents = np.array(self._lengths, np.int64), np.array(self._documents, np.int64)
        write_index(partial_idx, self.dtype, lengths, documents, np.array(self._modes, np.int8).tobytes())
        publish(partial_bin, partial_idx, self.prefix, self.tokenizer)
