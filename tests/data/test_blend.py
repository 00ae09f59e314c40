from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import megapipe.data.blend as blend
from megapipe.data.blend import BlendedDataset, blend_indices, normalize
from megapipe.data.dataset import SyntheticDataset
from megapipe.errors import DataError


def one_by_one(weights, size):
    """Choose the data set of each item by the rule as documented, one item at a time."""
    shares, taken, choices = np.array(weights), np.zeros(len(weights)), []
    for item in range(size):
        choices.append(int(np.argmax(shares * max(item, 1.0) - taken)))
        taken[choices[-1]] += 1
    return choices


@settings(max_examples=40)
@given(
    weights=st.lists(st.floats(0, 1), min_size=1, max_size=7).filter(lambda w: sum(w) > 1e-6), size=st.integers(0, 700)
)
def test_parallel_blocks_equal_the_sequential_rule(weights, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blend, "BLOCK", 16)  # many blocks, several rounds, and a warm-up that is sometimes too short
        patch.setattr(blend, "WARM_UP", 3)
        patch.setattr(blend, "ROUND_BLOCKS", 8)
        choices, numbers = blend_indices(normalize(weights), size)
    assert choices.tolist() == one_by_one(normalize(weights), size)
    for member in range(len(weights)):
        assert numbers[choices == member].tolist() == list(range(int((choices == member).sum())))


@pytest.mark.parametrize(
    "weights", [[1] * 3, [0.5, 0.3, 0.2], [1, 1e-6, 0.3], list(np.linspace(0.001, 1, 40) ** 4)], ids=len
)
def test_production_block_sizes_equal_the_rule(weights):
    assert blend_indices(normalize(weights), 9000)[0].tolist() == one_by_one(normalize(weights), 9000)


def test_blocks_with_a_wrong_start_are_computed_again(monkeypatch):
    monkeypatch.setattr(blend, "BLOCK", 16)
    monkeypatch.setattr(blend, "WARM_UP", 0)
    monkeypatch.setattr(blend, "_guess", lambda shares, items: np.stack([items, 0 * items], axis=1).astype(float))
    assert blend_indices((0.5, 0.5), 200)[0].tolist() == one_by_one((0.5, 0.5), 200)


def test_member_too_short_for_its_share_is_named():
    members = [SyntheticDataset(10, 4, 8, seed=1), SyntheticDataset(3, 4, 8, seed=1)]
    with pytest.raises(DataError, match="takes 5 samples of small, which has 3"):
        BlendedDataset(members, [0.5, 0.5], 10, names=["big", "small"])
