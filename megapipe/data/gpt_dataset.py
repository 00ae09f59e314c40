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
    ends: Array  # [E x sequences] int64: tokens of the stream up to and including each
    shuffle: Array  # [num_samples]: stream sample of each sample

    def __len__(self) -> int:
        return len(self.shuffle)

    def locate(self, position: int) -> tuple[int, int]:
        """Return (index into `documents`, offset in that document) of token `position` of the stream."""
        place = int(np.searchsorted(self.ends, position, side="right"))
        return place, position - (int(self.ends[place - 1]) if place else 0)


def build_sample_index(
    lengths: Array, first_sequence: int, num_samples: int, seq_length: int, seed: int
) -> SampleIndex:
    """Shuffle documents, then samples, with one numpy RandomState(seed).

    lengths: tokens of each sequence of the split, which starts at `first_sequence` of the file.
    """
    plan = plan_epochs(int(lengths.sum(dtype=np.int64)), num_samples, seq_length)
    random = np.random.RandomState(seed)
    stop = first_sequence + len(lengths)
    epoch = np.arange(first_sequence, stop, dtype=np.int32 if stop <= np.iinfo(np.int32).max else np.int64)
    parts = []
    shuffled_together = (plan.num_epochs - 1, 1) if plan.separate_last else (plan.num_epochs,)
    for num_epochs in shuffled_together:
        part = np.tile(epoch, num_epochs)
        random.shuffle(part)
        parts.append(part)
    documents = np.concatenate(parts)
    ends = np.cumsum(lengths[documents - first_sequence], dtype=np.int64)
    fits_uint32 = plan.num_samples < np.iinfo(np.uint32).max - 1
    samples = np.arange(plan.num_samples, dtype=np.uint32 if fits_uint32 else np.int64)
    random.shuffle(samples[: plan.num_samples_before_last])
    if plan.num_samples_before_last < plan.num_samples:
        random.shuffle(samples[plan.num_samples_before_last :])
    return SampleIndex(documents, ends, samples)


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
        lengths = file.lengths[first:last]
        if file.dtype.kind == "f":
            raise DataError(f"{file.prefix}.idx: tokens are whole numbers, but its dtype code is that of {file.dtype}")
        if not lengths.any():
            raise DataError(f"{file.prefix}: sequences {first}..{last} of {len(file)} hold no token to sample")

        def build() -> Arrays:
            # requesting 0 samples gives one epoch, the minimum
            return vars(build_sample_index(lengths, first, num_samples or 0, seq_length, seed))

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
        place, offset = self.index.locate(int(self.index.shuffle[index]) * self.seq_length)
        sample = np.empty(self.seq_length + 1, dtype=np.int64)
        filled = 0
        while filled < len(sample):
            sequence = int(self.index.documents[place])
            count = min(int(self.file.lengths[sequence]) - offset, len(sample) - filled)
            sample[filled : filled + count] = self.file.read(sequence, offset, count)
            filled += count
            place, offset = place + 1, 0
        return sample
