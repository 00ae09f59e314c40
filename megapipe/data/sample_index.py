"""The order in which one token file becomes samples: epochs, shuffled documents, shuffled samples. Equal to Megatron's GPTDataset.

With T tokens in the split and N samples asked for, the documents are repeated for the fewest epochs E with E T >= N seq + 1 and laid end
to end in a shuffled order. Stream sample k holds the seq + 1 tokens from k seq on (one shared with the next); item j of the data set is
stream sample shuffle[j]. All floor((E T - 1) / seq) of them exist. When the last epoch is needed for less than 80 % it is shuffled apart,
so that samples of whole epochs come first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megapipe.data.dataset import Array
from megapipe.errors import DataError

LAST_EPOCH_THRESHOLD = 0.80


@dataclass(frozen=True)
class EpochPlan:
    """How often the documents are repeated, and how the samples fall into whole epochs and the last one."""

    num_epochs: int
    num_samples: int  # all that the stream holds
    num_samples_before_last: int  # those of the epochs before the last, if it is shuffled apart; else all
    last_apart: bool


def plan_epochs(num_tokens: int, num_samples: int, seq_length: int) -> EpochPlan:
    """num_tokens: of one epoch. num_samples: asked for. Raises DataError if there are no tokens at all."""
    if num_tokens < 1:
        raise DataError(
            f"{num_samples} samples of {seq_length} tokens are asked of a part of the data that holds no token"
        )
    num_epochs = max(1, -(-(num_samples * seq_length + 1) // num_tokens))
    total = (num_epochs * num_tokens - 1) // seq_length
    before_last = ((num_epochs - 1) * num_tokens - 1) // seq_length
    per_epoch = (num_tokens - 1) // seq_length
    last_apart = num_epochs > 1 and num_samples - before_last < int(LAST_EPOCH_THRESHOLD * per_epoch)
    return EpochPlan(num_epochs, total, before_last if last_apart else total, last_apart)


@dataclass(frozen=True)
class SampleIndex:
    """documents: [E x sequences] sequence numbers in stream order. ends: [E x sequences] int64, tokens of the stream up to and with each.
    shuffle: [num_samples] stream sample of each item."""

    documents: Array
    ends: Array
    shuffle: Array
    seq_length: int

    def __len__(self) -> int:
        return len(self.shuffle)

    def locate(self, position: int) -> tuple[int, int]:
        """Place in `documents`, and offset in that document, of token `position` of the stream."""
        place = int(np.searchsorted(self.ends, position, side="right"))
        return place, position - (int(self.ends[place - 1]) if place else 0)

    def boundaries(self) -> Array:
        """[num_samples + 1, 2]: (place in `documents`, offset) at which each stream sample starts: Megatron's sample index, written out."""
        starts = np.arange(len(self) + 1, dtype=np.int64) * self.seq_length
        places = np.searchsorted(self.ends, starts, side="right")
        before = np.where(places > 0, self.ends[places - 1], 0)
        return np.stack([places, starts - before], axis=1)


def build_sample_index(
    lengths: Array, first_sequence: int, num_samples: int, seq_length: int, seed: int
) -> SampleIndex:
    """lengths: tokens of each sequence of the split, which starts at `first_sequence` of the file.

    One numpy RandomState(seed) shuffles the documents first and the samples second.
    """
    num_tokens = int(lengths.sum(dtype=np.int64))
    plan = plan_epochs(num_tokens, num_samples, seq_length)
    random = np.random.RandomState(seed)
    documents = _shuffled_documents(len(lengths), first_sequence, plan, random)
    ends = np.cumsum(lengths[documents - first_sequence], dtype=np.int64)
    return SampleIndex(documents, ends, _shuffled_samples(plan, random), seq_length)


def _shuffled_documents(
    num_sequences: int, first_sequence: int, plan: EpochPlan, random: np.random.RandomState
) -> Array:
    dtype = np.int32 if first_sequence + num_sequences <= np.iinfo(np.int32).max else np.int64
    epoch = np.arange(first_sequence, first_sequence + num_sequences, dtype=dtype)
    parts = []
    for num_epochs in (plan.num_epochs - 1, 1) if plan.last_apart else (plan.num_epochs,):
        part = np.tile(epoch, num_epochs)
        random.shuffle(part)
        parts.append(part)
    return np.concatenate(parts)


def _shuffled_samples(plan: EpochPlan, random: np.random.RandomState) -> Array:
    dtype = np.uint32 if plan.num_samples < np.iinfo(np.uint32).max - 1 else np.int64
    samples = np.arange(plan.num_samples, dtype=dtype)
    random.shuffle(samples[: plan.num_samples_before_last])
    if plan.num_samples_before_last < plan.num_samples:
        random.shuffle(samples[plan.num_samples_before_last :])
    return samples
