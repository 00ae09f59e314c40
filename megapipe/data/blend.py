"""Several datasets mixed by weight, without randomness. Same result as Megatron's BlendedDataset.

Item i goes to the dataset that is furthest behind its share: argmax over d of w_d max(i, 1) - taken_d, ties to the
first. The rule is sequential, and a Python loop over a billion items would take half an hour. So blocks of items are
computed side by side, each from a guess of what was taken before it. A block starts a little early, since the effect of
a wrong guess fades within a few items. Blocks that did not begin where the one before ended are computed again, so that
the result equals that of the loop.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megapipe.data.dataset import Array, TokenArray, TokenDataset
from megapipe.data.index_cache import Arrays, IndexCache
from megapipe.errors import DataError

BLOCK = 2048  # items per block
WARM_UP = 256  # items by which a block starts early
ROUND_BLOCKS = 8192  # blocks computed side by side: limits memory to some hundred MB for 10 datasets


def normalize(weights: Sequence[float]) -> tuple[float, ...]:
    """Divide weights by their sum, in float64."""
    values = np.array(weights, dtype=np.float64)
    return tuple((values / values.sum()).tolist())


class BlendedDataset:
    """`size` samples drawn from `members` by `weights`. Raises DataError if a member has less than its share."""

    def __init__(
        self,
        members: Sequence[TokenDataset],
        weights: Sequence[float],
        size: int,
        *,
        names: Sequence[str],
        cache: IndexCache | None = None,
    ) -> None:
        self.members = tuple(members)
        self.weights = normalize(weights)
        self.size = size
        self._cache = cache
        self.dataset_index, self.sample_index = self._indices(size)
        shares = np.bincount(self.dataset_index, minlength=len(self.members))
        for member, share, name in zip(self.members, shares, names, strict=True):
            if share > len(member):
                raise DataError(f"the blend takes {share} samples of {name}, which has {len(member)}")

    def _indices(self, size: int) -> tuple[Array, Array]:
        def build() -> Arrays:
            dataset_index, sample_index = blend_indices(self.weights, size)
            return {"dataset_index": dataset_index, "sample_index": sample_index}

        description = {"weights": self.weights, "size": size}
        arrays = build() if self._cache is None else self._cache.arrays("blend", description, build)
        return arrays["dataset_index"], arrays["sample_index"]

    def grow(self, size: int) -> None:
        """Extend up to where a member runs out of samples. A longer blend begins like a shorter one."""
        if size <= self.size:
            return
        dataset_index, sample_index = self._indices(size)
        lengths = np.array([len(member) for member in self.members])
        missing = np.flatnonzero(sample_index >= lengths[dataset_index])
        self.size = int(missing[0]) if len(missing) else size
        self.dataset_index, self.sample_index = dataset_index[: self.size], sample_index[: self.size]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> TokenArray:
        if not 0 <= index < self.size:
            raise IndexError(f"sample {index} of a blend of {self.size} samples")
        return self.members[int(self.dataset_index[index])][int(self.sample_index[index])]


def blend_indices(weights: Sequence[float], size: int) -> tuple[Array, Array]:
    """Return (dataset of each item, [size] int16; its sample within that dataset, [size] int64)."""
    shares = np.asarray(weights, dtype=np.float64)
    choices = np.empty(size, dtype=np.int16)
    taken = np.zeros(len(shares), dtype=np.float64)  # floats as in the rule; integers up to 2^53 are exact
    for begin in range(0, size, BLOCK * ROUND_BLOCKS):
        end = min(size, begin + BLOCK * ROUND_BLOCKS)
        choices[begin:end], taken = _round(shares, begin, end, taken)
    sample_index = np.empty(size, dtype=np.int64)
    for member in range(len(shares)):
        places = np.flatnonzero(choices == member)
        sample_index[places] = np.arange(len(places))
    return choices, sample_index


def _round(shares: Array, begin: int, end: int, taken: Array) -> tuple[Array, Array]:
    """Return (choices of items begin .. end, counts taken after them). taken: [members], counts before item `begin`."""
    starts = np.arange(begin, end, BLOCK)
    early = np.maximum(starts - WARM_UP, begin)
    before = _guess(shares, early)
    before[early == begin] = taken
    for step in range(WARM_UP):  # blocks near the beginning have fewer items to warm up on
        active = early + step < starts
        if not active.any():
            break
        _advance(shares, early + step, before, active)
    choices, after = _run(shares, starts, end, before)
    while len(wrong := 1 + np.flatnonzero((before[1:] != after[:-1]).any(axis=1))):
        # at least the first wrong block gets its true start, so the loop ends; mostly all of them get it at once
        before[wrong] = after[wrong - 1]
        choices[wrong], after[wrong] = _run(shares, starts[wrong], end, before[wrong])
    return choices.reshape(-1)[: end - begin], after[-1]


def _guess(shares: Array, items: Array) -> Array:
    """Return the likely counts before each item, [blocks, members]: shares rounded down, largest remainders up."""
    exact = shares * items[:, None]
    taken = np.floor(exact)
    missing = items - taken.sum(axis=1)
    ranks = np.argsort(np.argsort(-(exact - taken), axis=1, kind="stable"), axis=1, kind="stable")
    rounded: Array = taken + (ranks < missing[:, None])
    return rounded


def _advance(shares: Array, items: Array, taken: Array, active: Array) -> Array:
    """Choose one item in every active block and count it in `taken`. Returns the choices, [blocks]."""
    choice: Array = np.argmax(shares * np.maximum(items, 1.0)[:, None] - taken, axis=1)
    rows = np.flatnonzero(active)
    taken[rows, choice[rows]] += 1
    return choice


def _run(shares: Array, starts: Array, end: int, before: Array) -> tuple[Array, Array]:
    """Return (choices, [blocks, BLOCK]; counts after them, [blocks, members]). Items from `end` on are not counted."""
    taken = before.copy()
    choices = np.empty((len(starts), BLOCK), dtype=np.int16)
    for step in range(min(BLOCK, end - int(starts[0]))):
        choices[:, step] = _advance(shares, starts + step, taken, starts + step < end)
    return choices, taken
