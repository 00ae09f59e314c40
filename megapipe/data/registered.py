"""`RegisteredDataset`: the data set of an extension as samples of a run, checked, in epochs."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from megapipe.data.dataset import Array, TokenArray
from megapipe.errors import ConfigError, DataError


@dataclass(frozen=True)
class DatasetPart:
    """The part of the data that a run asks for."""

    name: str  # train, valid or test
    num_samples: int  # of the whole run
    seq_length: int
    vocab_size: int
    seed: int
    options: Mapping[str, str] = field(default_factory=dict)  # --dataset-options NAME=TEXT


def options_of(words: tuple[str, ...]) -> dict[str, str]:
    """Return the words of --dataset-options by name. Raises ConfigError."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not name or not equals:
            raise ConfigError(f"--dataset-options {word}: expected NAME=TEXT")
        if name in found:
            raise ConfigError(f"--dataset-options gives {name} twice")
        found[name] = text
    return found


class RegisteredDataset:
    """The samples of one part, [seq_length + 1] or with a loss mask [2, seq_length + 1]; more than the data set has are
    further epochs.

    build: makes the data set of the extension, which has a length and sample(index). shuffle: the order of each epoch
    is a permutation drawn from the seed and its number. Raises ConfigError if the data set has no length or no samples.
    """

    def __init__(
        self,
        name: str,
        part: DatasetPart,
        build: Callable[[DatasetPart], Any],
        shuffle: bool = True,
        has_loss_mask: bool = False,
    ) -> None:
        self.part, self._subject, self._shuffle = part, f"--dataset {name}, part {part.name}", shuffle
        self._has_loss_mask = has_loss_mask
        self._data = build(part)
        for word in ("__len__", "sample"):
            if not hasattr(self._data, word):
                raise ConfigError(f"{self._subject}: {type(self._data).__name__} has no {word}; see docs/extend.md")
        if not len(self._data):
            raise DataError(f"{self._subject} is empty, but the run takes {part.num_samples} samples of it")
        self._num_samples = part.num_samples
        kind, size = ("train", "valid", "test").index(part.name), len(self._data)
        self._order: Callable[[int], Array] = lru_cache(maxsize=2)(
            lambda epoch: np.random.default_rng([part.seed, kind, epoch]).permutation(size)
        )

    def __len__(self) -> int:
        return self._num_samples

    def grow(self, size: int) -> None:
        """Extend to `size` samples."""
        self._num_samples = max(self._num_samples, size)

    def __getitem__(self, index: int) -> TokenArray:
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples} of {self._subject}")
        epoch, place = divmod(index, len(self._data))
        number = int(self._order(epoch)[place]) if self._shuffle else place
        try:
            found = self._data.sample(number)
            if not self._has_loss_mask:
                return self._tokens(np.asarray(found), number)
            tokens, trained = found
            trained = np.asarray(trained)
        except DataError:
            raise
        except Exception as error:
            raise DataError(f"{self._subject}: sample {number}: {type(error).__name__}: {error}") from None
        if trained.shape != (self.part.seq_length + 1,) or not np.isin(trained, (0, 1)).all():
            rule = f"expected {self.part.seq_length + 1} numbers 0 or 1, 1 where the token is trained"
            raise DataError(f"{self._subject}: the loss mask of sample {number} is {list(trained.shape)}; {rule}")
        return np.stack([self._tokens(np.asarray(tokens), number), trained.astype(np.int64)])

    def _tokens(self, sample: Array, number: int) -> TokenArray:
        """Return the tokens of a sample in int64. Raises DataError for a wrong length, or a token out of range."""
        length, vocab_size = self.part.seq_length + 1, self.part.vocab_size
        if sample.shape != (length,) or sample.dtype.kind not in "iu":
            found = f"{list(sample.shape)} of {sample.dtype}"
            raise DataError(
                f"{self._subject}: sample {number} is {found}; expected {length} token ids (--seq-length + 1)"
            )
        low, high = int(sample.min()), int(sample.max())
        if low < 0 or high >= vocab_size:
            token = low if low < 0 else high
            raise DataError(f"{self._subject}: sample {number} has token {token}, the vocabulary has {vocab_size}")
        return sample.astype(np.int64)

    def fingerprint(self) -> dict[str, Any]:
        """Return what identifies the data and their order: its own fingerprint, its length and its first sample."""
        own = getattr(self._data, "fingerprint", "")
        return {
            "kind": "extension",
            "seq_length": self.part.seq_length,
            "tokens": f"{self._subject}, {len(self._data)} samples, the first with checksum "
            f"{zlib.crc32(self[0].tobytes()):08x}{own and f', fingerprint {own}'}",
        }
