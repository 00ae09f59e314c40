from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.data.sample_index import build_sample_index, plan_epochs
from megapipe.errors import DataError

LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(lambda lengths: sum(lengths) > 0)


@settings(max_examples=60)
@given(lengths=LENGTHS, num_samples=st.integers(0, 40), seq_length=st.integers(1, 9))
def test_boundaries_equal_a_walk_over_the_concatenated_documents(lengths, num_samples, seq_length):
    index = build_sample_index(np.array(lengths, np.int32), 0, num_samples, seq_length, seed=7)
    owners = [(place, offset) for place, document in enumerate(index.documents) for offset in range(lengths[document])]
    assert [tuple(row) for row in index.boundaries()] == [owners[k * seq_length] for k in range(len(index) + 1)]
    assert [index.locate(k * seq_length) for k in range(len(index) + 1)] == [
        owners[k * seq_length] for k in range(len(index) + 1)
    ]


@settings(max_examples=60)
@given(lengths=LENGTHS, num_samples=st.integers(0, 40), seq_length=st.integers(1, 9), seed=st.integers(0, 3))
def test_every_sample_and_every_document_occurs(lengths, num_samples, seq_length, seed):
    index = build_sample_index(np.array(lengths, np.int32), 100, num_samples, seq_length, seed)
    plan = plan_epochs(sum(lengths), num_samples, seq_length)
    assert len(index) >= num_samples
    assert sorted(index.shuffle.tolist()) == list(range(plan.num_samples))
    assert sorted(index.documents.tolist()) == sorted([*range(100, 100 + len(lengths))] * plan.num_epochs)
    assert plan.num_epochs == 1 or (plan.num_epochs - 1) * sum(lengths) < num_samples * seq_length + 1


@pytest.mark.parametrize(
    ("num_samples", "num_epochs", "last_apart"),
    [(9, 1, False), (10, 2, True), (15, 2, True), (16, 2, False), (17, 2, False), (19, 2, False), (20, 3, True)],
)
def test_last_epoch_is_apart_when_less_than_four_fifths_are_needed(num_samples, num_epochs, last_apart):
    plan = plan_epochs(100, num_samples, 10)
    assert (plan.num_epochs, plan.last_apart) == (num_epochs, last_apart)


def test_last_epoch_apart_puts_samples_of_whole_epochs_first():
    index = build_sample_index(np.full(10, 10, np.int32), 0, 10, 10, seed=1)
    assert sorted(index.shuffle[:9].tolist()) == list(range(9))
    assert sorted(index.documents[:10].tolist()) == list(range(10))


def test_no_token_at_all_is_an_error():
    with pytest.raises(DataError, match="holds no token"):
        plan_epochs(0, 5, 10)
