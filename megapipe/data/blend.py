"""Several data sets as one, by weight and without randomness. Equal to Megatron's BlendedDataset.

Item i goes to the member that is furthest behind its share: argmax over d of w_d max(i, 1) - taken_d, the first one winning ties. The
rule is sequential, and a Python loop over a billion items would take half an hour. So the items are cut into blocks that are run side
by side, each from a guess of what was taken before it. A wrong guess is forgotten within a few items, so each block is started a little
early; that every block ends exactly where the next one began is checked, and blocks whose start was wrong are run again. The result is
that of the loop, to the item.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megapipe.data.dataset import Array, TokenArray, TokenDataset
from megapipe.data.index_cache import Arrays, IndexCache
from megapipe.data.split import normalize
from megapipe.errors import DataError

BLOCK = 2048  # items a block
WARM_UP = 256  # items by which a block starts early
ROUND_BLOCKS = 8192  # blocks run side by side: bounds memory to some hundred MB at 10 members


class BlendedDataset:
    """`size` samples drawn from members in proportion to `weights`. Raises DataError if a member has fewer samples than its share."""

    def __init__(
        self,
        members: Sequence[TokenDataset],
        weights: Sequence[float],
        size: int,
        *,
        cache: IndexCache | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        self.members = tuple(members)
        self.names = tuple(names) if names is not None else tuple(f"member {d}" for d in range(len(self.members)))
        self.weights = normalize(weights)
        self.size = size
        self._cache = cache
        self.dataset_index, self.sample_index = self._indices(size)
        self._check_shares()

    def _indices(self, size: int) -> tuple[Array, Array]:
        def build() -> Arrays:
            dataset_index, sample_index = blend_indices(self.weights, size)
            return {"dataset_index": dataset_index, "sample_index": sample_index}

        arrays = (
            build()
            if self._cache is None
            else self._cache.arrays("blend", {"weights": self.weights, "size": size}, build)
        )
        return arrays["dataset_index"], arrays["sample_index"]

    def grow(self, size: int) -> None:
        """Up to where a member has no more samples: the rule looks back alone, so that a longer blend begins as the shorter one."""
        if size <= self.size:
            return
        dataset_index, sample_index = self._indices(size)
        lengths = np.array([len(member) for member in self.members])
        missing = np.flatnonzero(sample_index >= lengths[dataset_index])
        self.size = int(missing[0]) if len(missing) else size
        self.dataset_index, self.sample_index = dataset_index[: self.size], sample_index[: self.size]

    def _check_shares(self) -> None:
        shares = np.bincount(self.dataset_index, minlength=len(self.members))
        for member, share, name in zip(self.members, shares, self.names, strict=True):
            if share > len(member):
                raise DataError(f"the blend takes {share} samples of {name}, which has {len(member)}")

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> TokenArray:
        if not 0 <= index < self.size:
            raise IndexError(f"sample {index} of a blend of {self.size} samples")
        return self.members[int(self.dataset_index[index])][int(self.sample_index[index])]


def blend_indices(weights: Sequence[float], size: int) -> tuple[Array, Array]:
    """(member of each item [size] int16, number of the sample within its member [size] int64)."""
    shares = np.asarray(weights, dtype=np.float64)
    choices = np.empty(size, dtype=np.int16)
    taken = np.zeros(len(shares), dtype=np.float64)  # floats as in the rule; whole numbers up to 2^53 are exact
    for begin in range(0, size, BLOCK * ROUND_BLOCKS):
        end = min(size, begin + BLOCK * ROUND_BLOCKS)
        choices[begin:end], taken = _round(shares, begin, end, taken)
    sample_index = np.empty(size, dtype=np.int64)
    for member in range(len(shares)):
        places = np.flatnonzero(choices == member)
        sample_index[places] = np.arange(len(places))
    return choices, sample_index


def _round(shares: Array, begin: int, end: int, taken: Array) -> tuple[Array, Array]:
    """Choices of items begin .. end, and what is taken after them. taken: [members], before item `begin`."""
    starts = np.arange(begin, end, BLOCK)
    early = np.maximum(starts - WARM_UP, begin)
    guess = _guess(shares, early)
    guess[early == begin] = taken
    before = guess.copy()
    for step in range(WARM_UP):  # blocks near the beginning warm up for fewer items
        active = early + step < starts
        if not active.any():
            break
        _advance(shares, early + step, before, active)
    choices, after = _run(shares, starts, end, before)
    while len(wrong := 1 + np.flatnonzero((before[1:] != after[:-1]).any(axis=1))):
        # at least the first of them gets its true start, so this ends; mostly all of them do, at once
        before[wrong] = after[wrong - 1]
        choices[wrong], after[wrong] = _run(shares, starts[wrong], end, before[wrong])
    return choices.reshape(-1)[: end - begin], after[-1]


def _guess(shares: Array, items: Array) -> Array:
    """[blocks, members]: what is probably taken before each item: the shares rounded down, the largest remainders rounded up."""
    exact = shares * items[:, None]
    taken = np.floor(exact)
    missing = items - taken.sum(axis=1)
    ranks = np.argsort(np.argsort(-(exact - taken), axis=1, kind="stable"), axis=1, kind="stable")
    rounded: Array = taken + (ranks < missing[:, None])
    return rounded


def _advance(shares: Array, items: Array, taken: Array, active: Array) -> Array:
    """One item in every active block: chooses, and counts it in `taken`. Returns [blocks] the choices."""
    choice: Array = np.argmax(shares * np.maximum(items, 1.0)[:, None] - taken, axis=1)
    rows = np.flatnonzero(active)
    taken[rows, choice[rows]] += 1
    return choice


def _run(shares: Array, starts: Array, end: int, before: Array) -> tuple[Array, Array]:
    """([blocks, BLOCK] choices, [blocks, members] taken after them). The last block may be short: what follows `end` is not counted."""
    taken = before.copy()
    choices = np.empty((len(starts), BLOCK), dtype=np.int16)
    for step in range(min(BLOCK, end - int(starts[0]))):
        choices[:, step] = _advance(shares, starts + step, taken, starts + step < end)
    return choices, taken
