from __future__ import annotations

import numpy as np
import pytest

from megapipe.data.dataset import SyntheticDataset
from megapipe.extras.cli.quickstart import unigram_entropy


def test_samples_depend_on_seed_part_and_index_only():
    def sample(seed=1, part=0, index=5, length=100):
        return SyntheticDataset(length, 32, 100, seed, part)[index].tolist()

    assert sample() == sample(length=7)
    assert len({tuple(sample()), tuple(sample(seed=2)), tuple(sample(part=1)), tuple(sample(index=6))}) == 4


@pytest.mark.parametrize("vocab_size", [2, 100, 50257])
def test_tokens_stay_inside_the_vocabulary(vocab_size):
    samples = np.stack([SyntheticDataset(20, 64, vocab_size, 1)[i] for i in range(20)])
    assert samples.shape == (20, 65)
    assert samples.dtype == np.int64
    assert samples.min() >= 0
    assert samples.max() < min(vocab_size, 512)


def test_next_token_can_be_learned_and_train_helps_valid():
    train, valid = (SyntheticDataset(200, 64, 50, 1, part) for part in (0, 1))
    counts = np.zeros((50, 50))
    for i in range(200):
        np.add.at(counts, (train[i][:-1], train[i][1:]), 1)
    guesses = counts.argmax(axis=1)
    hits = np.mean([guesses[valid[i][:-1]] == valid[i][1:] for i in range(200)])
    assert 0.87 < hits < 0.93
    assert unigram_entropy(np.stack([valid[i] for i in range(200)])) > 0.98 * np.log(50)
