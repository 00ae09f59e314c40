"""Sampling: candidates match the definitions, draws follow the probabilities and depend only on their key."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megapipe.errors import ConfigError
from megapipe.extras.inference.generate import Sampling

LOGITS = st.lists(st.floats(-20, 20), min_size=1, max_size=12)


def probabilities(sampling: Sampling, logits: torch.Tensor) -> torch.Tensor:
    """Return the distribution that `choose` draws from: [batch, vocabulary], fp64, zero outside the candidates."""
    values, tokens = sampling.candidates(logits)
    whole = torch.zeros(logits.shape, dtype=torch.float64)
    return whole.scatter(-1, tokens, values / values.sum(-1, keepdim=True))


@given(logits=LOGITS, temperature=st.floats(0.1, 5.0), top_k=st.integers(0, 14), top_p=st.floats(0.01, 1.0))
def test_candidates_are_the_fewest_most_likely_that_reach_top_p_among_the_top_k(
    logits: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    """The expected candidates are computed one token at a time in plain Python."""
    ranked = sorted(range(len(logits)), key=lambda token: -logits[token])[: top_k or None]
    weights = [math.exp((logits[token] - max(logits)) / temperature) for token in ranked]
    kept: list[int] = []
    reached = 0.0
    for token, weight in zip(ranked, weights, strict=True):
        if reached >= top_p:
            break
        kept.append(token)
        reached += weight / sum(weights)
    found = probabilities(Sampling(temperature, top_k, top_p), torch.tensor([logits], dtype=torch.float64))[0]
    total = sum(weights[: len(kept)])
    expected = torch.zeros(len(logits), dtype=torch.float64)
    expected[kept] = torch.tensor([weight / total for weight in weights[: len(kept)]], dtype=torch.float64)
    if abs(reached - top_p) > 1e-9:  # a sum equal to top_p in exact arithmetic may round either way
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_temperature_0_takes_the_most_likely_token() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, -1.0, 1.9]])
    assert Sampling(temperature=0.0, top_k=2, top_p=0.1).choose(logits, [0, 1], 5).tolist() == [1, 0]


def test_draws_follow_the_probabilities() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0, 0.5]])
    sampling = Sampling(temperature=1.3, top_p=0.9)
    count = 4000
    drawn = torch.bincount(sampling.choose(logits.expand(count, -1), range(count), 0), minlength=5).double() / count
    expected = probabilities(sampling, logits)[0]
    assert (drawn[expected == 0] == 0).all()
    assert (drawn - expected).abs().max() < 4 * math.sqrt(0.25 / count)  # four standard deviations


def test_a_draw_depends_on_seed_prompt_and_position_alone() -> None:
    logits = torch.zeros(6, 1000)
    whole = Sampling(seed=3).choose(logits, range(6), 2)
    for prompt in range(6):
        assert Sampling(seed=3).choose(logits[:1], [prompt], 2) == whole[prompt]
    assert len(set(whole.tolist())) > 3
    assert Sampling(seed=4).choose(logits, range(6), 2).tolist() != whole.tolist()
    assert Sampling(seed=3).choose(logits, range(6), 3).tolist() != whole.tolist()


@pytest.mark.parametrize(
    "values",
    [{"temperature": -0.1}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}, {"seed": -1}],
    ids=lambda values: next(iter(values)),
)
def test_values_out_of_range_are_refused_by_name(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="--" + next(iter(values)).replace("_", "-")):
        Sampling(**values)  # type: ignore[arg-type]
