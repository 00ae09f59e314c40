"""`--mock-data`: samples from nothing, the same on every machine, with something in them to learn.

The tokens in use stand in a secret circle, drawn once from the seed. A sample walks round it and now and then jumps to a random place,
so the next token can be told from the last one nine times out of ten: a model that learns reaches about 0.1 ln(used) + 0.33 nats from
ln(used).
"""

from __future__ import annotations

import numpy as np

from megapipe.data.dataset import TokenArray

JUMP_PROBABILITY = 0.1
MAX_USED_TOKENS = 512  # few enough that a tiny model learns the circle in some hundred steps


class SyntheticDataset:
    """num_samples samples of seq_length + 1 tokens below vocab_size. part: 0, 1 or 2 for train, valid, test: one circle, other walks."""

    def __init__(self, num_samples: int, seq_length: int, vocab_size: int, seed: int, part: int = 0) -> None:
        self.num_samples = num_samples
        self.seq_length = seq_length
        self.seed = seed
        self.part = part
        used = min(vocab_size, MAX_USED_TOKENS)
        self.circle = np.random.default_rng([seed, used]).permutation(used).astype(np.int64)

    def __len__(self) -> int:
        return self.num_samples

    def grow(self, size: int) -> None:
        self.num_samples = max(self.num_samples, size)

    def __getitem__(self, index: int) -> TokenArray:
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of a synthetic data set of {self.num_samples} samples")
        random = np.random.default_rng([self.seed, self.part, index])
        length, used = self.seq_length + 1, len(self.circle)
        jumps = random.random(length) < JUMP_PROBABILITY
        jumps[0] = True
        steps = np.where(jumps, random.integers(0, used, length), 1)
        # after a jump the walk goes on from the place jumped to, and one step on from any other
        sample: TokenArray = self.circle[np.cumsum(steps) % used]
        return sample
