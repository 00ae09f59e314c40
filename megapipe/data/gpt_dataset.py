"""Samples of one token file: epochs, shuffled documents, shuffled samples. Same order as Megatron's GPTDataset.

With T tokens in the split and N samples requested, the documents are repeated for the fewest epochs E with
E T >= N seq + 1 and concatenated in a shuffled order. Stream sample k holds the seq + 1 tokens from k seq on (one is
shared with the next), and sample j of the dataset is stream sample shuffle[j], one of floor((E T - 1) / seq). If less
than 80 % of the last epoch is needed it is shuffled separately, so that samples of whole epochs come first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megapipe.data.dataset import Array, TokenArray
from megapipe.data.index_cache import Arrays, IndexCache, source_stamp
from megapipe.data.indexed_file import IndexedFile
from megapipe.errors import DataError

LAST_EPOCH_THRESHOLD = 0.80
BLOCK = 1 << 18  # documents whose samples are found at a time, so that the work fits into the processor's caches


@dataclass(frozen=True)
class EpochPlan:
    """The number of epochs, and how the samples are distributed over whole epochs and the last one."""

    num_epochs: int
    num_samples: int  # in the whole stream
    num_samples_before_last: int  # in the epochs before a separately shuffled last one; otherwise all
    separate_last: bool


def plan_epochs(num_tokens: int, num_samples: int, seq_length: int) -> EpochPlan:
    """Plan the epochs for `num_samples` samples of an epoch of num_tokens. Raises DataError without tokens."""
    if num_tokens < 1:
        raise DataError(f"{num_samples} samples of {seq_length} tokens are requested of data that holds no token")
    num_epochs = max(1, -(-(num_samples * seq_length + 1) // num_tokens))
    total = (num_epochs * num_tokens - 1) // seq_length
    before_last = ((num_epochs - 1) * num_tokens - 1) // seq_length
    per_epoch = (num_tokens - 1) // seq_length
    separate_last = num_epochs > 1 and num_samples - before_last < int(LAST_EPOCH_THRESHOLD * per_epoch)
    return EpochPlan(num_epochs, total, before_last if separate_last else total, separate_last)


@dataclass(frozen=True)
class SampleIndex:
    """The order of documents and samples. The names of the fields are those of the arrays in the index cache."""

    documents: Array  # [E x sequences]: sequence numbers in stream order
    places: Array  # [num_samples + 1]: index into `documents` of the first token of each stream sample, and of the end
    offsets: Array  # [num_samples + 1]: tokens of that document before it, in the narrowest dtype that holds them
    shuffle: Array  # [num_samples]: stream sample of each sample

    def __len__(self) -> int:
        return len(self.shuffle)

    def locate(self, stream_sample: int) -> tuple[int, int]:
        """Return (index into `documents`, offset in that document) of the first token of a stream sample."""
        return int(self.places[stream_sample]), int(self.offsets[stream_sample])

    def position(self, place: int, seq_length: int, lengths: Array) -> int:
        """Return the position in the stream of the first token of `documents[place]`. lengths: of all sequences."""
        nearest = int(np.searchsorted(self.places, place, side="right")) - 1  # the last sample that starts before it
        start, offset = self.locate(nearest)
        return nearest * seq_length - offset + int(lengths[self.documents[start:place]].sum(dtype=np.int64))


def build_sample_index(
    lengths: Array, first_sequence: int, num_samples: int, seq_length: int, seed: int
) -> SampleIndex:
    """Shuffle documents, then samples, with one numpy RandomState(seed).

    lengths: tokens of each sequence of the split, which starts at `first_sequence` of the file.
    """
    plan = plan_epochs(int(lengths.sum(dtype=np.int64)), num_samples, seq_length)
    random = np.random.RandomState(seed)
    stop = first_sequence + len(lengths)
    dtype = np.int32 if max(stop, plan.num_epochs * len(lengths)) <= np.iinfo(np.int32).max else np.int64
    documents = np.empty(plan.num_epochs * len(lengths), dtype)
    documents.reshape(plan.num_epochs, -1)[:] = np.arange(first_sequence, stop, dtype=dtype)
    num_together = len(documents) - (len(lengths) if plan.separate_last else 0)
    random.shuffle(documents[:num_together])
    if plan.separate_last:
        random.shuffle(documents[num_together:])
    # tokens 0, seq, 2 seq, ... of the stream, found in blocks of documents
    places = np.empty(plan.num_samples + 1, dtype)
    offsets = np.empty(plan.num_samples + 1, np.min_scalar_type(int(lengths.max())))
    filled, end = 0, 0  # samples found, and tokens of the stream, in the blocks before
    for begin in range(0, len(documents), BLOCK):
        held = lengths[documents[begin : begin + BLOCK] - first_sequence]
        ends = end + np.cumsum(held, dtype=np.int64)
        end = int(ends[-1])
        past = min(plan.num_samples, (end - 1) // seq_length) + 1
        positions = np.arange(filled, past, dtype=np.int64) * seq_length
        found = np.searchsorted(ends, positions, side="right")
        places[filled:past] = begin + found
        offsets[filled:past] = positions - (ends[found] - held[found])
        filled = max(filled, past)
    fits_uint32 = plan.num_samples < np.iinfo(np.uint32).max - 1
    samples = np.arange(plan.num_samples, dtype=np.uint32 if fits_uint32 else np.int64)
    random.shuffle(samples[: plan.num_samples_before_last])
    if plan.num_samples_before_last < plan.num_samples:
        random.shuffle(samples[plan.num_samples_before_last :])
    return SampleIndex(documents, places, offsets, samples)


class GPTDataset:
    """Sequences [first, last) of a file, repeated for as many epochs as `num_samples` needs and shuffled by `seed`.

    num_samples None: one epoch, even if it is too short for a sample. The length is that of all epochs needed, so it
    may exceed `num_samples`. Raises DataError if the range holds no token.
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
        self.num_requested = num_samples
        self.seq_length = seq_length
        first, last = sequences
        if file.dtype.kind == "f":
            raise DataError(f"{file.prefix}.idx: tokens are whole numbers, but its dtype code is that of {file.dtype}")
        if not file.has_tokens(first, last):
            raise DataError(f"{file.prefix}: sequences {first}..{last} of {len(file)} hold no token to sample")

        def build() -> Arrays:
            file.check()  # here, so that ranks that find the index in the cache do not read all of the .idx
            # requesting 0 samples gives one epoch, the minimum
            built = build_sample_index(file.lengths[first:last], first, num_samples or 0, seq_length, seed)
            file.release()
            return vars(built)

        description = {  # everything that the order of samples depends on
            "source": source_stamp(file.prefix),
            "sequences": sequences,
            "num_samples": num_samples,
            "seq_length": seq_length,
            "seed": seed,
        }
        self.index = SampleIndex(**(build() if cache is None else cache.arrays("samples", description, build)))

    def __len__(self) -> int:
        return len(self.index)

    def grow(self, size: int) -> None:
        """Do nothing: all samples of all epochs exist already."""

    def __getitem__(self, index: int) -> TokenArray:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a dataset of {len(self)} samples ({self.file.prefix})")
        # tokens k seq .. k seq + seq of the stream, gathered from all documents that they span
        place, offset = self.index.locate(int(self.index.shuffle[index]))
        sample = np.empty(self.seq_length + 1, dtype=np.int64)
        filled = 0
        while filled < len(sample):
            sequence = int(self.index.documents[place])
            tokens = self.file.read(sequence, offset, most=len(sample) - filled)
            sample[filled : filled + len(tokens)] = tokens
            filled += len(tokens)
            place, offset = place + 1, 0
        return sample
