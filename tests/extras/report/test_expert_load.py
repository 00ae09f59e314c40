"""The load of experts that chance alone gives."""

from __future__ import annotations

from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.extras.report.expert_load import expected_load


@given(st.integers(2, 4), st.integers(1, 3), st.integers(1, 3), st.data())
@settings(max_examples=25, deadline=None)
def test_the_expected_load_is_that_of_all_draws_without_replacement(
    experts: int, tokens: int, topk: int, data: st.DataObject
) -> None:
    topk = min(topk, experts)
    weights = data.draw(st.lists(st.integers(1, 5), min_size=experts, max_size=experts))
    total, largest = 0.0, 0.0
    for draws in product(permutations(range(experts), topk), repeat=tokens):
        chance, counts = 1.0, [0] * experts
        for of_token in draws:
            left = list(weights)
            for expert in of_token:
                chance *= left[expert] / sum(left)
                left[expert] = 0
                counts[expert] += 1
        total, largest = total + chance, largest + chance * max(counts)
    assert total == pytest.approx(1.0)
    assert expected_load([weight / sum(weights) for weight in weights], tokens, topk) == pytest.approx(
        (largest, tokens * topk / experts)
    )


def test_a_single_expert_gets_every_token() -> None:
    assert expected_load([1.0], 1_000_000, 1) == (1e6, 1e6)


@pytest.mark.parametrize(
    ("experts", "tokens", "topk", "slope"),
    [(8, 400, 2, 0.0), (32, 1000, 4, 0.0), (128, 500, 8, 0.0), (16, 2000, 2, 0.2), (2, 3000, 1, 0.0)],
    ids=str,
)
def test_the_expected_load_of_many_tokens_is_that_of_simulated_draws(
    experts: int, tokens: int, topk: int, slope: float
) -> None:
    random, logits = np.random.default_rng(7), slope * np.arange(experts)
    found = []
    for _ in range(60):
        keys = logits + random.gumbel(size=(tokens, experts))  # the largest are draws without replacement
        chosen = np.argpartition(-keys, topk - 1, axis=1)[:, :topk] if topk < experts else keys
        found.append(np.bincount(chosen.ravel(), minlength=experts).max())
    probabilities = np.exp(logits) / np.exp(logits).sum()
    largest, mean = expected_load(probabilities.tolist(), tokens, topk)
    assert mean == tokens * topk / experts
    assert largest == pytest.approx(np.mean(found), rel=0.02)
