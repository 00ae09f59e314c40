"""One part (train, valid or test) of one token file as samples of seq_length + 1 tokens."""

from __future__ import annotations

import numpy as np

from megapipe.data.dataset import Array, TokenArray
from megapipe.data.index_cache import Arrays, IndexCache, source_stamp
from megapipe.data.indexed_file import IndexedFile
from megapipe.data.sample_index import SampleIndex, build_sample_index
from megapipe.errors import DataError


class GPTDataset:
    """Sequences first .. last of a file, repeated for as many epochs as `num_samples` needs and shuffled by `seed`.

    num_samples None: one epoch, which has no sample at all if it is shorter than seq_length + 1 tokens. Its length is that of all
    epochs needed, so it may exceed `num_samples`.
    Raises DataError if the range holds no token.
    """

    def __init__(
        self,
        file: IndexedFile,
        sequences: tuple[int, int],
        *,
        num_samples: int | None,
        seq_length: int,
        seed: int,
        cache: IndexCache | None = None,
    ) -> None:
        self.file = file
        self.sequences = sequences
        self.num_asked = num_samples
        self.seq_length = seq_length
        self.seed = seed
        self.index = self._index(cache)

    def _index(self, cache: IndexCache | None) -> SampleIndex:
        first, last = self.sequences
        lengths = self.file.lengths[first:last]
        num_tokens = int(lengths.sum(dtype=np.int64))
        if num_tokens < 1:
            raise DataError(
                f"{self.file.prefix}: sequences {first}..{last} of {len(self.file)} hold no token, so no sample can be drawn from them"
            )
        # None asks for one epoch: no sample is asked for, and one epoch is the least
        num_samples = self.num_asked if self.num_asked is not None else 0

        def build() -> Arrays:
            index = build_sample_index(lengths, first, num_samples, self.seq_length, self.seed)
            return {"documents": index.documents, "ends": index.ends, "shuffle": index.shuffle}

        arrays = build() if cache is None else cache.arrays("samples", self.description(), build)
        return SampleIndex(arrays["documents"], arrays["ends"], arrays["shuffle"], self.seq_length)

    def description(self) -> dict[str, object]:
        """All that the order of samples depends on."""
        source = source_stamp(self.file.prefix)
        return {
            "source": source,
            "sequences": self.sequences,
            "num_samples": self.num_asked,
            "seq_length": self.seq_length,
            "seed": self.seed,
        }

    def __len__(self) -> int:
        return len(self.index)

    def grow(self, size: int) -> None:
        """All samples of all epochs are there already."""

    def __getitem__(self, index: int) -> TokenArray:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a data set of {len(self)} samples ({self.file.prefix})")
        return self.stream_sample(int(self.index.shuffle[index]))

    def stream_sample(self, k: int) -> TokenArray:
        """Tokens k seq .. k seq + seq of the stream, gathered over as many documents as they span."""
        place, offset = self.index.locate(k * self.seq_length)
        sample = np.empty(self.seq_length + 1, dtype=np.int64)
        filled = 0
        while filled < len(sample):
            piece = self._piece(place, offset, len(sample) - filled)
            sample[filled : filled + len(piece)] = piece
            filled += len(piece)
            place, offset = place + 1, 0
        return sample

    def _piece(self, place: int, offset: int, wanted: int) -> Array:
        sequence = int(self.index.documents[place])
        available = int(self.file.lengths[sequence]) - offset
        return self.file.read(sequence, offset, min(available, wanted))
