"""The interface of datasets, synthetic samples for `--mock-data`, and ranges of samples that training passes over."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
TokenArray = NDArray[np.int64]

JUMP_PROBABILITY = 0.1
MAX_USED_TOKENS = 512  # few enough that a tiny model learns the cycle in some hundred steps


class TokenDataset(Protocol):
    """Samples of seq_length + 1 tokens (int64): inputs are all but the last token, labels all but the first."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> TokenArray: ...

    def grow(self, size: int) -> None:
        """Extend the dataset to `size` samples, or to as many as exist; existing samples do not change."""


class SyntheticDataset:
    """Generated samples that can be learned, the same on every machine.

    A permutation of the tokens in use, drawn from the seed, forms a cycle, which a sample follows with jumps to random
    places. So the last token predicts the next one nine times out of ten: a model that learns gets from a loss of
    ln(used) to about 0.1 ln(used) + 0.33. part: 0, 1 or 2 for train, valid, test, which share the cycle.
    """

    def __init__(self, num_samples: int, seq_length: int, vocab_size: int, seed: int, part: int = 0) -> None:
        self.num_samples = num_samples
        self.seq_length = seq_length
        self.seed = seed
        self.part = part
        used = min(vocab_size, MAX_USED_TOKENS)
        self.cycle = np.random.default_rng([seed, used]).permutation(used).astype(np.int64)

    def __len__(self) -> int:
        return self.num_samples

    def grow(self, size: int) -> None:
        self.num_samples = max(self.num_samples, size)

    def __getitem__(self, index: int) -> TokenArray:
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of a synthetic dataset of {self.num_samples} samples")
        random = np.random.default_rng([self.seed, self.part, index])
        length, used = self.seq_length + 1, len(self.cycle)
        jumps = random.random(length) < JUMP_PROBABILITY
        jumps[0] = True
        steps = np.where(jumps, random.integers(0, used, length), 1)  # a jump adds a random offset, any other step 1
        sample: TokenArray = self.cycle[np.cumsum(steps) % used]
        return sample


@dataclass(frozen=True)
class SkippedSamples:
    """Skipped ranges of a dataset. A sample has an index in it, and a number among the samples that are not skipped."""

    windows: tuple[tuple[int, int], ...] = ()  # (first, past the last), ascending, with gaps between: see `of`, `plus`

    @classmethod
    def of(cls, windows: Iterable[Iterable[int]]) -> SkippedSamples:
        """Merge windows given in any order; empty ones are dropped."""
        merged: list[tuple[int, int]] = []
        for first, past in sorted((first, past) for first, past in windows):
            if merged and first <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(merged[-1][1], past)
            elif past > first:
                merged.append((first, past))
        return cls(tuple(merged))

    def plus(self, first: int, past: int) -> SkippedSamples:
        """Add a window."""
        return SkippedSamples.of((*self.windows, (first, past)))

    def index(self, number: int) -> int:
        """Return the dataset index of the sample with this number."""
        for first, past in self.windows:
            if number < first:
                break
            number += past - first
        return number
