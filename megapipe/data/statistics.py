"""The number that a model has to beat: the entropy of single tokens, the loss of one that knows only how frequent each is."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megapipe.data.dataset import TokenDataset
from megapipe.errors import DataError


def unigram_entropy(source: TokenDataset | NDArray[np.integer], num_samples: int | None = None) -> float:
    """Entropy in nats of the frequencies of tokens: of an array, or of the labels of the first `num_samples` samples of a data set.

    Raises DataError if there is no token.
    """
    if isinstance(source, np.ndarray):
        counts = np.bincount(source.reshape(-1).astype(np.int64))
    else:
        counts = np.zeros(1, dtype=np.int64)
        for i in range(len(source) if num_samples is None else min(num_samples, len(source))):
            sample = np.bincount(source[i][1:], minlength=len(counts))
            sample[: len(counts)] += counts
            counts = sample
    counts = counts[counts > 0]
    if not len(counts):
        raise DataError("the entropy of no tokens at all is asked for")
    frequencies = counts / counts.sum()
    return float(-(frequencies * np.log(frequencies)).sum())
