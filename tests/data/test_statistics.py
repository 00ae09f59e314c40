from __future__ import annotations

import math

import numpy as np
import pytest

from megapipe.data.statistics import unigram_entropy
from megapipe.errors import DataError
from tests.data.test_loader import Recorded


def test_entropy_of_tokens_equals_the_formula():
    assert unigram_entropy(np.arange(8, dtype=np.uint16)) == pytest.approx(math.log(8))
    assert unigram_entropy(np.array([1, 1, 1, 7])) == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    assert unigram_entropy(np.zeros(5, dtype=np.int64)) == 0.0


def test_entropy_of_a_data_set_counts_labels_of_the_samples_asked():
    assert unigram_entropy(Recorded(6)) == pytest.approx(math.log(6))
    assert unigram_entropy(Recorded(6), num_samples=3) == pytest.approx(math.log(3))


def test_entropy_of_nothing_is_an_error():
    with pytest.raises(DataError, match="no tokens"):
        unigram_entropy(np.zeros(0, dtype=np.int64))
