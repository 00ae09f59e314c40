"""The load of experts that chance alone gives."""

from __future__ import annotations

import numpy as np
import pytest

from megapipe.extras.report.charts import expected_imbalance


def test_a_single_expert_gets_every_token() -> None:
    assert expected_imbalance(1, 1_000_000, 1) == 1.0


@pytest.mark.parametrize(
    ("experts", "tokens", "topk"), [(8, 400, 2), (32, 1000, 4), (128, 500, 8), (2, 3000, 1), (4, 50, 4)], ids=str
)
def test_the_expected_load_is_that_of_simulated_draws(experts: int, tokens: int, topk: int) -> None:
    random = np.random.default_rng(7)
    found = []
    for _ in range(60):
        chosen = np.argsort(random.random((tokens, experts)), axis=1)[:, :topk]
        found.append(np.bincount(chosen.ravel(), minlength=experts).max())
    assert expected_imbalance(experts, tokens, topk) == pytest.approx(
        np.mean(found) * experts / tokens / topk, rel=0.02
    )
