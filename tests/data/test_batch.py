from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.data.batch import Batch, DocumentRules
from megapipe.errors import ConfigError

EOD = 0
ALL = DocumentRules(EOD, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)


def batch(rows, rules):
    return Batch.of(np.array(rows, dtype=np.int64), tuple(range(len(rows))), rules)


def test_end_of_document_belongs_to_the_document_it_ends():
    got = batch([[5, 6, EOD, 7, 8, EOD, EOD, 9, 4]], ALL)
    assert got.tokens.tolist() == [[5, 6, 0, 7, 8, 0, 0, 9]]
    assert got.labels.tolist() == [[6, 0, 7, 8, 0, 0, 9, 4]]
    assert got.document_ids is not None
    assert got.document_ids.tolist() == [[0, 0, 0, 1, 1, 1, 2, 3]]
    assert got.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 0, 0]]
    assert got.loss_mask.tolist() == [[1, 1, 0, 1, 1, 0, 0, 1]]


def test_without_rules_documents_run_on():
    got = batch([[5, EOD, 6, 7]], DocumentRules(EOD))
    assert (got.document_ids, got.position_ids, got.loss_mask) == (None, None, None)


@pytest.mark.parametrize("field", ["reset_position_ids", "reset_attention_mask", "eod_mask_loss"])
def test_each_rule_changes_its_own_array_only(field):
    plain, got = (
        batch([[5, EOD, 6, 7]], DocumentRules(EOD)),
        batch([[5, EOD, 6, 7]], DocumentRules(EOD, **{field: True})),
    )
    changed = {
        "reset_position_ids": "position_ids",
        "reset_attention_mask": "document_ids",
        "eod_mask_loss": "loss_mask",
    }[field]
    for name in ("tokens", "labels", "position_ids", "document_ids", "loss_mask"):
        assert np.array_equal(getattr(plain, name), getattr(got, name)) == (name != changed)


def walk(row):
    """Return positions and document ids of one row of inputs, by Megatron's loop over the ends of documents."""
    positions, documents, start, document = [], [], 0, 0
    for place, token in enumerate(row):
        positions.append(place - start)
        documents.append(document)
        if token == EOD:
            start, document = place + 1, document + 1
    return positions, documents


@settings(max_examples=50)
@given(
    rows=st.integers(1, 12).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 3), min_size=n + 1, max_size=n + 1), min_size=1, max_size=3)
    )
)
def test_positions_and_documents_equal_a_walk_over_the_tokens(rows):
    got = batch(rows, ALL)
    assert got.document_ids is not None
    assert got.position_ids.tolist() == [walk(row[:-1])[0] for row in rows]
    assert got.document_ids.tolist() == [walk(row[:-1])[1] for row in rows]


def test_types_and_shapes_are_those_promised():
    got = batch([[1, 2, 3], [4, 5, 6]], ALL)
    assert [(a.dtype, a.shape) for a in (got.tokens, got.labels, got.position_ids, got.document_ids)] == [
        (np.int64, (2, 2))
    ] * 4
    assert (got.loss_mask.dtype, got.loss_mask.shape) == (np.float32, (2, 2))
    assert got.tokens.flags.c_contiguous
    assert got.labels.flags.c_contiguous


def test_rules_without_an_end_of_document_token_are_refused():
    with pytest.raises(ConfigError, match="--reset-attention-mask, --eod-mask-loss"):
        DocumentRules(None, reset_attention_mask=True, eod_mask_loss=True)
